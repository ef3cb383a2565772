"""A sample as a volume, thinned for a browser: image, target and prediction, and planes through them.

A page reads them where it sees the dataset: the run has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oocdl.dashboard.facts import RunFacts
from oocdl.dashboard.samples.slices import has_channels
from oocdl.runtime.inputs import READ_CHUNKS, read_blocks
from oocdl.storage.dataset.dataset import DataArray, DatasetSpec, open_dataset

MOST_SIDE = 160
"""Along each axis; larger samples are thinned."""
MOST_BYTES = 512 << 20
"""Maximum size of a sample that the page reads; of a larger one it shows the slices in the run."""
MOST_CLASSES = 64
Labels = npt.NDArray[np.int64]
Volume = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """A sample of the dataset. Arrays have two or three axes, and the same shape."""

    number: int
    image: Volume | None
    target: Volume | None
    is_labels: bool
    """Whether the target's values are numbers of classes."""
    strides: tuple[int, ...]
    """Stride along each axis at which elements were taken."""


def read_volumes(facts: RunFacts, number: int) -> Sample | None:
    """Read a sample of a run's dataset; None if it is not seen here, too large, or no image.

    Raises DatasetError.
    """
    path = Path(facts.dataset)
    if not facts.dataset or "://" in facts.dataset or not path.exists():
        return None
    names = tuple(dict.fromkeys(name for _, name in facts.images))
    arrays = open_dataset(DatasetSpec(facts.dataset, facts.group, names, True)).arrays
    found: dict[str, tuple[Volume, tuple[int, ...], bool]] = {}
    for role, name in facts.images:
        array = arrays[name]
        labels = bool(np.issubdtype(array.dtype, np.integer)) and role == "target"
        axes = space_of(array.shape[1:], labels)
        if role in found or axes is None or prod(array.shape[1:]) * array.itemsize > MOST_BYTES:
            continue
        strides = strides_of(axes)
        found[role] = _thinned(array, number, len(array.shape) - 1 - len(axes), strides), strides, labels
    if not found:
        return None
    image, target = found.get("input"), found.get("target")
    if image is not None and target is not None and image[0].shape != target[0].shape:
        target = None
    strides = (image or target or next(iter(found.values())))[1]
    return Sample(
        number,
        None if image is None else image[0],
        None if target is None else target[0],
        target is not None and target[2],
        strides,
    )


def space_of(shape: Sequence[int], is_labels: bool) -> tuple[int, ...] | None:
    """The extents of a sample without its channels; None if it is no image and no volume."""
    axes = tuple(shape[1:] if not is_labels and has_channels(tuple(shape)) else shape)
    axes = axes[1:] if len(axes) > 2 and axes[0] == 1 else axes
    return axes if len(axes) in (2, 3) and min(axes) > 1 else None


def strides_of(axes: Sequence[int]) -> tuple[int, ...]:
    """Return by how much each axis is thinned."""
    return tuple(max(-(-extent // MOST_SIDE), 1) for extent in axes)


def _thinned(array: DataArray, number: int, channels: int, strides: Sequence[int]) -> Volume:
    """Read the first channel of a sample, some elements of it, a block after the other."""
    axes = array.shape[1 + channels :]
    out = np.zeros([-(-extent // step) for extent, step in zip(axes, strides, strict=True)], np.float32)
    box = ((number, number + 1), *[(0, 1)] * channels, *((0, extent) for extent in axes))
    for block in read_blocks(box, array.chunks, array.itemsize, READ_CHUNKS):
        inner = block[1 + channels :]
        read = array.read(block).reshape([high - low for low, high in inner])
        pick = tuple(slice(-low % step, None, step) for (low, _), step in zip(inner, strides, strict=True))
        kept = read[pick]
        starts = [-(-low // step) for (low, _), step in zip(inner, strides, strict=True)]
        out[tuple(slice(s, s + n) for s, n in zip(starts, kept.shape, strict=True))] = kept
    return out


def plane(volume: Volume, axis: int, at: int, is_nifti: bool) -> Volume:
    """Return a plane through a volume as a figure draws it, upright: its first row is the lowest.

    ``is_nifti``: axes are x, y, z, which point right, front and up; else z, y, x, of which y points down.
    """
    if volume.ndim == 2:
        return volume[::-1]
    cut: Volume = np.take(volume, at, axis)
    return cut.T if is_nifti else cut[::-1] if axis == 0 else cut


def contours(labels: Volume) -> dict[str, list[float]]:
    """Return the borders between classes in a plane as segments, each with the larger of its classes."""
    rows, columns = np.nonzero(labels[:, 1:] != labels[:, :-1])
    upper, across = np.nonzero(labels[1:] != labels[:-1])
    first = np.maximum(labels[rows, columns], labels[rows, columns + 1])
    second = np.maximum(labels[upper, across], labels[upper + 1, across])
    return {
        "x0": [*(columns + 1.0), *across.astype(float)],
        "y0": [*rows.astype(float), *(upper + 1.0)],
        "x1": [*(columns + 1.0), *(across + 1.0)],
        "y1": [*(rows + 1.0), *(upper + 1.0)],
        "of": [*first.astype(float), *second.astype(float)],
    }


def dice_of(counts: Mapping[str, npt.NDArray[np.int64]]) -> dict[int, float]:
    """Return Dice of each class that is there, of the numbers of voxels that were counted.

    >>> dice_of({"both": np.array([3, 1]), "target": np.array([4, 2]), "predicted": np.array([4, 2])})
    {0: 0.75, 1: 0.5}
    """
    sums = counts["target"] + counts["predicted"]
    return {int(n): float(2 * counts["both"][n] / sums[n]) for n in np.flatnonzero(sums)}
