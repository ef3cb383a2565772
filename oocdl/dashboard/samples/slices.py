"""Slices of one sample: what goes in, what should come out, and what does.

Inputs and targets are read by the run at a commit, while no pass runs: in the memory that its budget has for
reading its dataset, a block after the other. Pages see them wherever they see the run. Outputs that ``keep``
names are in the run itself, and read by the process that shows them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.index import Region
from oocdl.runtime.inputs import READ_CHUNKS, read_blocks
from oocdl.storage.dataset.dataset import DataArray, Dataset
from oocdl.storage.run.run_store import RunStore

MOST_BYTES = 512 << 20
"""Maximum size of the chunks that a slice is read from; an output with larger ones is left out."""
MOST_PIXELS = 256
"""Along each side; larger slices are thinned."""
MOST_PICTURES = 6
"""Maximum number of pictures of inputs and targets together."""
COLOR_CHANNELS = 4
"""An image with more along its first axis is a volume without channels."""
Place = tuple[int | slice, ...]
"""Position, or whole range, along each axis behind that of the samples."""


@dataclass(frozen=True)
class Picture:
    """A slice. Shape (rows, columns)."""

    title: str
    pixels: npt.NDArray[np.float32]
    is_labels: bool
    """Whether pixels are numbers of classes."""


@dataclass(frozen=True)
class SamplePictures:
    """Inputs and targets of a sample of the last step of a commit."""

    step: int
    sample: int
    pictures: tuple[Picture, ...]

    def packed(self) -> bytes:
        """All of it as an npz file."""
        out = io.BytesIO()
        arrays: dict[str, Any] = {f"pixels{n}": one.pixels for n, one in enumerate(self.pictures)}
        np.savez_compressed(
            out,
            at=np.array([self.step, self.sample]),
            titles=np.array([one.title for one in self.pictures], dtype=np.str_),
            are_labels=np.array([one.is_labels for one in self.pictures], dtype=bool),
            **arrays,
        )
        return out.getvalue()


def unpacked(data: bytes) -> SamplePictures:
    """Read what ``packed`` has made."""
    with np.load(io.BytesIO(data)) as arrays:
        step, sample = arrays["at"].tolist()
        facts = zip(arrays["titles"].tolist(), arrays["are_labels"].tolist(), strict=True)
        found = [
            Picture(title, arrays[f"pixels{n}"], is_labels) for n, (title, is_labels) in enumerate(facts)
        ]
    return SamplePictures(step, sample, tuple(found))


def read_sample(
    dataset: Dataset, images: Sequence[tuple[str, str]], step: int, sample: int
) -> SamplePictures:
    """Read middle slices of the images and volumes of a sample of the dataset.

    ``images``: see ``RunFacts``. Raises DatasetError.
    """
    found: list[Picture] = []
    for role, name in images:
        array = dataset.arrays[name]
        is_labels = bool(np.issubdtype(array.dtype, np.integer)) and role == "target"
        place = _place(array.shape[1:], is_labels)
        if place is not None and len(found) < MOST_PICTURES:
            pixels = _read_thinned(array, sample, place)
            found.append(Picture(f"{role}: {name}, sample {sample}", pixels, is_labels))
    return SamplePictures(step, sample, tuple(found))


def read_outputs(run: Path, sample: int, outputs: Sequence[str]) -> tuple[list[Picture], list[str]]:
    """Read slices of what ``keep=`` kept of the last committed step, of whose first ``sample`` it is.

    ``outputs`` are the network's. Returns slices, and lines that say what is not shown. Raises what opening
    the run raises.
    """
    found: list[Picture] = []
    missing: list[str] = []
    kept = RunStore.open(run).kept()
    for name, array in kept.items():
        title, place = f"output: {name}, sample {sample}", _place(array.shape[1:], False)
        if name.startswith("grad/") or place is None:
            continue
        if prod(array.chunks) * array.dtype.itemsize > MOST_BYTES:
            missing.append(f"{title}: its chunks are larger than {MOST_BYTES >> 20} MiB")
            continue
        channels = (slice(None),) if has_channels(array.shape[1:]) else ()
        pixels = np.asarray(array[(0, *channels, *place[len(channels) :])])
        is_labels = pixels.ndim == 3 and pixels.shape[0] > 1
        if pixels.ndim == 3:
            pixels = pixels.argmax(axis=0) if is_labels else pixels[0]
        rows, columns = map(_stride, pixels.shape)
        found.append(Picture(title, pixels[::rows, ::columns].astype(np.float32), is_labels))
    if not kept:
        missing.append(f"no output is kept: fit(keep={list(outputs)}) shows what the model predicts")
    return found, missing


def has_channels(shape: tuple[int, ...]) -> bool:
    """Whether the first axis of a sample is that of channels."""
    return len(shape) == 4 or (len(shape) == 3 and shape[0] <= COLOR_CHANNELS)


def _place(shape: tuple[int, ...], is_labels: bool) -> Place | None:
    """Where the middle slice is of a sample of a shape; None if that is no image and no volume."""
    channels = int(not is_labels and has_channels(shape))
    rank = len(shape) - channels
    if rank not in (2, 3) or min(shape[channels:]) < 2:
        return None
    middle = (shape[channels] // 2,) if rank == 3 else ()
    return (*(0,) * channels, *middle, slice(None), slice(None))


def _stride(extent: int) -> int:
    return max(-(-extent // MOST_PIXELS), 1)


def _read_thinned(array: DataArray, sample: int, place: Place) -> npt.NDArray[np.float32]:
    """Read some of the rows and columns of a slice, at once as much as a pass reads of the dataset."""
    region: Region = (
        (sample, sample + 1),
        *(
            (at, at + 1) if isinstance(at, int) else (0, extent)
            for at, extent in zip(place, array.shape[1:], strict=True)
        ),
    )
    extents = array.shape[-2:]
    steps = [_stride(extent) for extent in extents]
    out = np.zeros([-(-extent // step) for extent, step in zip(extents, steps, strict=True)], np.float32)
    for block in read_blocks(region, array.chunks, array.itemsize, READ_CHUNKS):
        (rows, columns), (row_step, column_step) = block[-2:], steps
        found = array.read(block).reshape(rows[1] - rows[0], columns[1] - columns[0])
        thin = found[-rows[0] % row_step :: row_step, -columns[0] % column_step :: column_step]
        top, left = -(-rows[0] // row_step), -(-columns[0] // column_step)
        out[top : top + thin.shape[0], left : left + thin.shape[1]] = thin
    return out
