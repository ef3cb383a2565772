"""The class of each voxel, taken of logits as they are computed: no logits of a whole sample are kept."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.data.label_volumes import sample_facts, write_labels
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices, region_shape
from oocdl.storage.dataset.dataset import Dataset
from oocdl.training.predictions import Output

Facts = Sequence[tuple[str, Mapping[str, Any]]]
"""Name and attributes of each sample."""
LABELS = "labels.zarr"
"""Labels beside the volumes that are made of them, where no other place was given."""


def labels_of(output: Output) -> Output:
    """Return the array of labels [N, ..] of an output [N, C, ..]. Raises InputError if it has no classes."""
    if len(output.shape) < 2 or output.shape[1] < 2:
        raise InputError(
            f"argmax is over classes, the second axis, and output '{output.name}' has the shape "
            f"{list(output.shape)}; leave it out, and compare the output with a threshold"
        )
    shape, chunks = ((one[0], *one[2:]) for one in (output.shape, output.chunks))
    dtype = np.min_scalar_type(output.shape[1] - 1)
    return replace(output, shape=shape, chunks=chunks, dtype=str(dtype))


class ClassLabels:
    """Writes to an array [N, ..] the class of the largest of logits [N, C, ..], the first of equal ones.

    Regions come in any order, one at a time, of one batch after the other. Where a region has not all
    classes, the largest logits so far are kept in a file without a name in ``folder``, as float64.
    """

    def __init__(self, labels: zarr.Array[Any], classes: int, folder: Path) -> None:
        self.labels, self.classes, self.folder = labels, classes, folder
        self._rows: tuple[int, ...] = ()
        self._best: Array | None = None

    def put(self, region: Region, rows: Sequence[int], logits: Array) -> None:
        """Take logits of a region of [N, C, ..], which the batch of samples ``rows`` has."""
        start, stop = region[1]
        place = (region[0], *region[2:])
        found = np.empty(region_shape(place), self.labels.dtype)
        for at in np.ndindex(found.shape[:2]):  # argmax makes int64: not of all at once
            found[at] = logits[(at[0], slice(None), *at[1:])].argmax(0) + start
        if (start, stop) != (0, self.classes):
            found = self._larger(place, rows, logits, found)
        self.labels[as_slices(place)] = found

    def _larger(self, place: Region, rows: Sequence[int], logits: Array, found: Array) -> Array:
        """Labels of what is larger than all that came before; equal ones are of the first class."""
        if self._best is None or self._rows != tuple(rows):
            self._rows, shape = tuple(rows), (len(rows), *self.labels.shape[1:])
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self._best = np.memmap(file, np.float64, "w+", shape=shape)
            self._best.fill(-np.inf)
            self.labels[rows[0] : rows[-1] + 1] = self.classes - 1  # none comes behind it
        first = rows[0]
        inner = as_slices(((place[0][0] - first, place[0][1] - first), *place[1:]))
        best, before, now = self._best[inner], np.asarray(self.labels[as_slices(place)]), logits.max(1)
        taken = (now > best) | ((now == best) & (found < before))
        self._best[inner] = np.where(taken, now, best)
        return np.where(taken, found, before)


def facts_of_volumes(dataset: Dataset, outputs: Sequence[Output]) -> Facts:
    """Return name and attributes of the volume of each sample.

    Raises InputError unless there is one array of labels, of three spatial axes; DatasetError if the
    dataset's attributes are of other samples.
    """
    if len(outputs) != 1 or len(outputs[0].shape) != 4:
        shapes = ", ".join(f"'{one.name}' {list(one.shape)}" for one in outputs)
        raise InputError(f"nifti= takes one output of three spatial axes; labels of this model are {shapes}")
    return sample_facts(dataset, outputs[0].shape[0])


def write_volumes(folder: Path, facts: Facts, labels: zarr.Array[Any]) -> None:
    """Write labels [N, z, y, x] as a NIfTI file for each sample."""
    folder.mkdir(parents=True, exist_ok=True)
    for row, (name, told) in enumerate(facts):

        def planes(start: int, stop: int, row: int = row) -> Array:
            return np.asarray(labels[row, start:stop])

        write_labels(folder, name, told, labels.shape[1:], labels.dtype, planes)
