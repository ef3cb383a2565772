"""Slices of one sample: what goes in, what should come out, and what does.

They are read from the dataset and from the run's kept values by the process that shows them: the one that
trains has no memory for that in its budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.dashboard.facts import RunFacts
from oocdl.storage.dataset.dataset import DatasetSpec, open_dataset
from oocdl.storage.run.run_store import RunStore

MOST_BYTES = 512 << 20
"""Of chunks that a slice is read from; a larger one is left out."""
MOST_PIXELS = 320
"""Along each side; larger slices are thinned."""
COLOR_CHANNELS = 4
"""An image with more along its first axis is a volume without channels."""


@dataclass(frozen=True)
class Picture:
    """A slice. Shape (rows, columns)."""

    title: str
    pixels: npt.NDArray[np.float32]
    is_labels: bool
    """Whether pixels are numbers of classes."""


def read_pictures(run: Path, facts: RunFacts, sample: int) -> tuple[list[Picture], list[str]]:
    """Read slices of a sample of the dataset, and of what ``keep=`` kept of the last committed step.

    Returns them, and lines that say what is not shown. Raises what opening the dataset and the run raises.
    """
    found: list[Picture] = []
    missing: list[str] = []
    if facts.dataset:
        names = tuple(dict.fromkeys(name for _, name in facts.images))
        arrays = open_dataset(DatasetSpec(facts.dataset, facts.group, names, True)).arrays
        for role, name in facts.images:
            _add(found, missing, f"{role}: {name}, sample {sample}", arrays[name].reader, sample)
    else:
        missing.append("the dataset is no path, so its images cannot be read here")
    kept = RunStore.open(run).kept()
    for name, array in kept.items():
        if not name.startswith("grad/"):
            _add(found, missing, f"output: {name}, sample {sample}", array, 0)
    if not kept:
        missing.append("no output is kept: fit(keep=[OUTPUT]) shows what the model predicts")
    return found, missing


def _add(found: list[Picture], missing: list[str], title: str, array: Any, row: int) -> None:
    """Read the middle slice of one sample, if it is an image or a volume."""
    shape = array.shape[1:]
    is_labels = np.issubdtype(array.dtype, np.integer)
    channels = not is_labels and (len(shape) == 4 or (len(shape) == 3 and shape[0] <= COLOR_CHANNELS))
    rank = len(shape) - channels
    if rank not in (2, 3) or min(shape[channels:]) < 2:
        return
    is_output = title.startswith("output")
    where: list[Any] = [row, *([slice(None) if is_output else 0] if channels else [])]
    where += [shape[channels] // 2] if rank == 3 else []
    chunks = getattr(array, "stored_chunks", array.chunks)
    if prod(chunks) * array.dtype.itemsize > MOST_BYTES:
        missing.append(f"{title}: its chunks are larger than {MOST_BYTES >> 20} MiB")
        return
    pixels = np.asarray(array[tuple(slice(at, at + 1) if isinstance(at, int) else at for at in where)])
    single = tuple(axis for axis, at in enumerate(where) if isinstance(at, int))
    pixels = np.squeeze(pixels, single)
    if is_output and channels and pixels.ndim == 3:
        is_labels = pixels.shape[0] > 1
        pixels = pixels.argmax(axis=0) if is_labels else pixels[0]
    steps = [max(-(-extent // MOST_PIXELS), 1) for extent in pixels.shape]
    pixels = pixels[:: steps[0], :: steps[1]].astype(np.float32)
    found.append(Picture(title, pixels, bool(is_labels)))
