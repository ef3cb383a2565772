"""A sample of the dataset, thinned for a browser: middle slices, whole volumes, and planes through them.

Slices of inputs and targets are read by the run at a commit, while no pass runs, in the memory that its
budget has for reading its dataset: pages see them wherever they see the run. Where a page sees the dataset,
it reads whole samples itself. Outputs that ``keep`` names are in the run.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oocdl.dashboard.facts import RunFacts
from oocdl.dashboard.series import packed
from oocdl.runtime.inputs import READ_CHUNKS, read_blocks
from oocdl.storage.dataset.dataset import DataArray, Dataset, DatasetSpec, open_dataset
from oocdl.storage.dataset.sample_stack import own_sized
from oocdl.storage.run.run_store import RunStore

MOST_BYTES = 512 << 20
"""Maximum size of a sample, and of the chunks of an output, that a page reads; larger ones are left out."""
MOST_PIXELS, MOST_SIDE = 256, 160
"""Maximum extent of an axis of a slice and of a volume; larger ones are thinned."""
MOST_PICTURES = 6
"""Maximum number of slices of inputs and targets together."""
COLOR_CHANNELS = 4
"""An image with more along its first axis is a volume without channels."""
Volume = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Picture:
    """A slice or a volume, of two or three axes."""

    title: str
    """It begins with "input", "target" or "output"."""
    pixels: Volume
    is_labels: bool
    """Whether pixels are numbers of classes."""


@dataclass(frozen=True)
class SamplePictures:
    """Inputs and targets of a sample of the last step of a commit: slices, or volumes that are read here."""

    step: int
    sample: int
    pictures: tuple[Picture, ...]

    def first(self, role: str) -> Picture | None:
        """Return the first picture of a role; None if there is none."""
        return next((one for one in self.pictures if one.title.startswith(role)), None)

    def packed(self) -> bytes:
        return packed(
            at=np.array([self.step, self.sample]),
            titles=np.array([one.title for one in self.pictures], dtype=np.str_),
            are_labels=np.array([one.is_labels for one in self.pictures], dtype=bool),
            **{f"pixels{n}": one.pixels for n, one in enumerate(self.pictures)},
        )


def unpacked(data: bytes) -> SamplePictures:
    """Read what ``packed`` has made."""
    with np.load(io.BytesIO(data)) as arrays:
        step, sample = arrays["at"].tolist()
        facts = zip(arrays["titles"].tolist(), arrays["are_labels"].tolist(), strict=True)
        pictures = [
            Picture(title, arrays[f"pixels{n}"], is_labels) for n, (title, is_labels) in enumerate(facts)
        ]
    return SamplePictures(step, sample, tuple(pictures))


def read_sample(
    dataset: Dataset, images: Sequence[Sequence[str]], step: int, sample: int, is_whole: bool = False
) -> SamplePictures:
    """Read middle slices of the images and volumes of a sample; where ``is_whole``, one whole of each role.

    ``images``: see ``RunFacts``. Raises DatasetError.
    """
    pictures: list[Picture] = []
    for role, name in images:
        array = own_sized(dataset.arrays[name], sample)
        is_labels = role == "target" and bool(np.issubdtype(array.dtype, np.integer))
        axes = space_of(array.shape[1:], is_labels)
        if axes is None or len(pictures) == MOST_PICTURES:
            continue
        if is_whole and (
            any(one.title.startswith(role) for one in pictures)
            or prod(array.shape[1:]) * array.itemsize > MOST_BYTES
        ):
            continue
        fixed = (0,) * (len(array.shape) - 1 - len(axes)) + (() if is_whole else _middle(axes))
        pixels = _read_thinned(array, sample, fixed, MOST_SIDE if is_whole else MOST_PIXELS)
        pictures.append(Picture(f"{role}: {name}, sample {sample}", pixels, is_labels))
    return SamplePictures(step, sample, tuple(pictures))


def read_whole(facts: RunFacts, step: int, sample: int) -> SamplePictures | None:
    """Read a sample of a run's dataset; None if it is not seen here, too large, or no image.

    Raises DatasetError.
    """
    if not facts.dataset or "://" in facts.dataset or not Path(facts.dataset).exists():
        return None
    found = read_sample(dataset_of(facts), facts.images, step, sample, is_whole=True)
    return found if found.pictures else None


def dataset_of(facts: RunFacts) -> Dataset:
    """Open the dataset of a run. Raises DatasetError."""
    names = tuple(dict.fromkeys(name for _, name in facts.images))
    return open_dataset(DatasetSpec(facts.dataset, facts.group, names, True))


def read_outputs(run: Path, sample: int, outputs: Sequence[str]) -> tuple[list[Picture], list[str]]:
    """Read slices of what ``keep=`` kept of the last committed step, of whose first ``sample`` it is.

    Returns them, and lines that say what is not shown of the network's ``outputs``. Raises what opening the
    run raises.
    """
    pictures: list[Picture] = []
    missing: list[str] = []
    kept = RunStore.open(run).kept()
    for name, array in kept.items():
        title, axes = f"output: {name}, sample {sample}", space_of(array.shape[1:], False)
        if name.startswith("grad/") or axes is None:
            continue
        if prod(array.chunks) * array.dtype.itemsize > MOST_BYTES:
            missing.append(f"{title}: its chunks are larger than {MOST_BYTES >> 20} MiB")
            continue
        lead = len(array.shape) - 1 - len(axes)
        channels: tuple[int | slice, ...] = (slice(None), *(0,) * (lead - 1)) if lead else ()
        pixels = np.asarray(array[(0, *channels, *_middle(axes), ...)])
        is_labels = lead > 0 and pixels.shape[0] > 1
        if lead:
            pixels = pixels.argmax(axis=0) if is_labels else pixels[0]
        rows, columns = strides_of(pixels.shape, MOST_PIXELS)
        pictures.append(Picture(title, pixels[::rows, ::columns].astype(np.float32), is_labels))
    if not kept:
        missing.append(f"no output is kept: fit(keep={list(outputs)}) shows what the model predicts")
    return pictures, missing


def space_of(shape: Sequence[int], is_labels: bool) -> tuple[int, ...] | None:
    """The extents of a sample without its channels; None if it is no image and no volume."""
    has_channels = len(shape) == 4 or (len(shape) == 3 and shape[0] <= COLOR_CHANNELS)
    axes = tuple(shape[1:] if has_channels and not is_labels else shape)
    axes = axes[1:] if len(axes) > 2 and axes[0] == 1 else axes
    return axes if len(axes) in (2, 3) and min(axes) > 1 else None


def _middle(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the position of a volume's middle slice; an empty one for an image."""
    return tuple(extent // 2 for extent in axes[:-2])


def strides_of(axes: Sequence[int], most: int = MOST_SIDE) -> tuple[int, ...]:
    """Return by how much each axis is thinned, so that at most so many of its elements are left."""
    return tuple(max(-(-extent // most), 1) for extent in axes)


def _read_thinned(array: DataArray, sample: int, fixed: Sequence[int], most: int) -> Volume:
    """Read a sample at fixed places of its first axes, and of the others at most so many elements each.

    At once as much is read as a pass reads of the dataset.
    """
    axes = array.shape[1 + len(fixed) :]
    strides = strides_of(axes, most)
    out = np.zeros([-(-extent // step) for extent, step in zip(axes, strides, strict=True)], np.float32)
    box = (*((at, at + 1) for at in (sample, *fixed)), *((0, extent) for extent in axes))
    for block in read_blocks(box, array.chunks, array.itemsize, READ_CHUNKS):
        inner = list(zip(block[1 + len(fixed) :], strides, strict=True))
        read = array.read(block).reshape([high - low for (low, high), _ in inner])
        kept = read[tuple(slice(-low % step, None, step) for (low, _), step in inner)]
        starts = [-(-low // step) for (low, _), step in inner]
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
