"""Computes arrays that are known before the run: indices, and what stands at them."""

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
