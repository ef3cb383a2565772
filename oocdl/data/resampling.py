"""Resampling of volumes to another number of voxels, plane by plane in the order in which a file has them.

Voxel centres lie at half numbers, so the whole field of view stays (as in ``scipy.ndimage.zoom`` with
``grid_mode=True, mode="nearest"``, which nnU-Net uses): an output voxel o lies at (o + 1/2) n / m - 1/2 of n
voxels that become m, clipped to the first and the last. Images are interpolated linearly along each axis,
in float64; a label is that of the nearest voxel, the later one of two that are equally near.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Sizes = Sequence[int]
Taps = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]  # two voxels, and the weight of the second


def resampled_shape(shape: Sizes, spacing: Sequence[float], target: Sequence[float]) -> tuple[int, ...]:
    """Return how many voxels of another spacing cover a volume, along each axis; as nnU-Net rounds.

    >>> resampled_shape((40, 100, 100), (3.0, 1.0, 1.0), (1.0, 1.0, 1.5))
    (120, 100, 67)
    """
    return tuple(max(1, round(s / t * n)) for n, s, t in zip(shape, spacing, target, strict=True))


def resampled_affine(affine: Floats, before: Sizes, after: Sizes) -> Floats:
    """Return the affine (of voxels (x, y, z)) of a volume [z, y, x] that was resampled."""
    scale = np.array(before[::-1]) / np.array(after[::-1])
    inner = np.diag([*scale, 1.0])
    inner[:3, 3] = scale / 2 - 0.5
    return affine @ inner


def nearest(before: int, after: int) -> npt.NDArray[np.int64]:
    """Return the nearest of ``before`` voxels to each of ``after``; exact, as it is done in integers."""
    return (2 * np.arange(after, dtype=np.int64) + 1) * before // (2 * after)


def taps(before: int, after: int, is_label: bool) -> Taps:
    """Return what each of ``after`` voxels is made of."""
    if is_label:
        low = nearest(before, after)
        return low, low, np.zeros(after)
    place = np.clip((np.arange(after) + 0.5) * (before / after) - 0.5, 0, before - 1)
    if before == after:
        place = np.arange(after, dtype=np.float64)
    low = np.floor(place).astype(np.int64)
    return low, np.minimum(low + 1, before - 1), place - low


def resample(pieces: Iterable[Array], before: Sizes, after: Sizes, is_label: bool) -> Iterator[Array]:
    """Yield the planes, [1, y, x], of a volume whose planes come in ``pieces``; few are held."""
    low, high, weight = taps(before[0], after[0], is_label)
    held, first, made = np.empty((0, *after[1:])), 0, 0
    for piece in pieces:
        if not is_label:
            piece = piece.astype(np.float64)
        for axis in (1, 2):
            piece = _along(piece, axis, taps(before[axis], after[axis], is_label))
        held = np.concatenate((held, piece)) if len(held) else piece
        while made < after[0] and high[made] < first + len(held):
            one, other = held[low[made] - first], held[high[made] - first]
            share = weight[made]
            yield (one if not share else one * (1 - share) + other * share)[None]
            made += 1
        done = len(held) if made == after[0] else min(int(low[made]) - first, len(held))
        held, first = held[done:], first + done


def _along(piece: Array, axis: int, made_of: Taps) -> Array:
    low, high, weight = made_of
    if len(low) == piece.shape[axis] and not weight.any():
        return piece
    found = piece.take(low, axis)
    if not weight.any():
        return found
    weight = weight.reshape([-1 if axis == at else 1 for at in range(3)])
    found *= 1 - weight
    found += piece.take(high, axis) * weight
    return found
