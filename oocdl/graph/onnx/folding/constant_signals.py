"""Computes tables of signal processing, and numbers by their bits, where all of it is known: plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array

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
