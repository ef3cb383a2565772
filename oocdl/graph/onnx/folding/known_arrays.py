"""Computes arrays that are known before the run: indices, tables of signals, numbers by their bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, Shape

REDUCTIONS: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def wrapped(index: Array, extent: int, axis: str) -> Array:
    """Return indices counted from the start; raises ModelError for one outside of ``extent``."""
    where = np.where(index < 0, index + extent, index).astype(np.int64)
    if where.size and (where.min() < 0 or where.max() >= extent):
        worst = index.reshape(-1)[int(np.argmax((where < 0) | (where >= extent)))]
        raise ModelError(f"index {int(worst)} is outside {axis} of extent {extent}")
    return where


def flat_indices(index: Array, extents: Sequence[int]) -> Array:
    """Return indices ``[.., k]`` of ``k`` axes as numbers of elements in C order.

    >>> flat_indices(np.array([[1, 2], [0, -1]]), (2, 3))
    array([5, 2])
    """
    total = np.zeros(index.shape[:-1], np.int64)
    for axis, extent in enumerate(extents):
        total = total * extent + wrapped(index[..., axis], extent, f"axis {axis}")
    return total


def box_of(flat: Array, extents: Shape) -> list[tuple[int, int]] | None:
    """Return the box, as ranges of all axes, whose elements ``flat`` names in order; None if there is none.

    >>> box_of(np.array([[1, 2], [4, 5]]), (2, 3))
    [(0, 2), (1, 3)]
    """
    if not flat.size or not extents:
        return None
    first, last = (np.unravel_index(int(end), extents) for end in (flat.reshape(-1)[0], flat.reshape(-1)[-1]))
    box = [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
    if prod(max(stop - start, 0) for start, stop in box) != flat.size:
        return None
    named = np.ravel_multi_index(np.ix_(*(np.arange(*side) for side in box)), extents)
    return box if (named.reshape(-1) == flat.reshape(-1)).all() else None


def last_places(flat: Array, rows: int) -> Array:
    """Return for each of ``rows`` the last place in ``flat`` that names it, or -1.

    >>> last_places(np.array([2, 0, 2]), 4)
    array([ 1, -1,  2, -1])
    """
    found = np.full(rows, -1, np.int64)
    found[flat.reshape(-1)] = np.arange(flat.size)
    return found


def scatter(data: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    """Return ``data`` with ``updates`` written at ``places``, or joined to what is there by ``reduction``."""
    result = data.copy()
    if reduction == "none":
        result[places] = updates
    else:
        REDUCTIONS[reduction].at(result, places, updates)
    return result


def along(index: Array, extent: int, axis: int) -> tuple[Array, ...]:
    """Return the places that indices along one axis mean, as an index of NumPy."""
    places: list[Array] = list(np.indices(index.shape, sparse=True))
    places[axis] = wrapped(index, extent, f"axis {axis}")
    return tuple(places)


_COSINES = {
    "HannWindow": (0.5, -0.5),
    "HammingWindow": (25 / 46, -21 / 46),
    "BlackmanWindow": (0.42, -0.5, 0.08),
}


def window(op: str, size: int, periodic: bool) -> Array:
    """Return a window as a sum of cosines, in float64."""
    turns = 2 * np.pi * np.arange(size) / (size if periodic else size - 1)
    return np.asarray(sum(part * np.cos(times * turns) for times, part in enumerate(_COSINES[op])))


def mel_weights(bins: int, dft_length: int, rate: int, low: float, high: float) -> Array:
    """Return [frequencies, bins]: triangles that are equally wide in mel, whose corners are frequencies."""
    ends = [2595 * np.log1p(edge / 700) / np.log(10) for edge in (low, high)]
    mel = ends[0] + np.arange(bins + 2) * ((ends[1] - ends[0]) / (bins + 2))
    hertz = 700 * np.expm1(mel / 2595 * np.log(10))
    corners = ((dft_length + 1) * hertz // rate).astype(int)
    found = np.zeros((dft_length // 2 + 1, bins))
    if corners.min() < 0 or corners.max() > len(found):
        raise ValueError(f"frequencies {low} to {high} are not in {len(found)} bins at a rate of {rate}")
    for place, (left, centre, right) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        found[left : centre + 1, place] = np.arange(centre - left + 1) / max(centre - left, 1)
        if left == centre:
            found[centre, place] = 1
        found[centre:right, place] = np.arange(right - centre, 0, -1) / max(right - centre, 1)
    return found


def shifted(a: Array, b: Array, direction: str) -> Array:
    """Shift the bits of whole numbers; by as many as they have, or more, nothing is left of them."""
    width = 8 * a.dtype.itemsize
    inside = (b >= 0) & (b < width)
    by = np.where(inside, b, 0).astype(a.dtype)
    if direction == "LEFT":
        return np.asarray(np.where(inside, np.left_shift(a, by), 0).astype(a.dtype))
    if direction != "RIGHT":
        raise ValueError(f"direction '{direction}' is not LEFT or RIGHT")
    return np.asarray(np.where(inside, np.right_shift(a, by), np.where(a < 0, -1, 0)).astype(a.dtype))


def recast(a: Array, dtype: np.dtype[Any]) -> Array:
    """Return the same bits as numbers of another type that has as many."""
    if a.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"{a.dtype} and {dtype} do not have as many bits")
    return a.view(dtype)


def unique(a: Array, axis: int | None, by_value: bool) -> tuple[Array, Array, Array, Array]:
    """Return what there is, where first, which of it stands at each place, and how often it is there."""
    _, first, inverse, counts = np.unique(a, True, True, True, axis=axis)
    order = np.arange(len(first)) if by_value else np.argsort(first)
    values = np.take(a.reshape(-1) if axis is None else a, first[order], axis or 0)
    rank = np.argsort(order)
    return values, first[order], rank[inverse.reshape(-1)], counts[order]
