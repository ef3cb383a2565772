"""The class of each voxel, taken of logits as they are computed: no logits of a whole sample are kept."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from oocdl.data.label_volumes import sample_facts, write_labels
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices, region_shape
from oocdl.training.prediction.inference import Inference
from oocdl.training.prediction.predictions import Output

Facts = Sequence[tuple[str, Mapping[str, Any]]]
"""Name and attributes of each sample."""
LABELS = "labels.zarr"
"""Labels beside the volumes that are made of them, where no other place was given."""


def labels_of(output: Output, least: int = 2) -> Output:
    """Return the array of labels [N, ..] of an output [N, C, ..].

    Raises InputError if it has fewer than ``least`` classes.
    """
    axis, sample = 1 if output.row is None else 0, output.sample_shape
    if len(sample) < 1 or sample[0] < least:
        raise InputError(
            f"argmax is over classes, the second axis, and output '{output.name}' has the shape "
            f"{list(output.shape)}; leave it out, and compare the output with a threshold"
        )
    shape, chunks = (one[:axis] + one[axis + 1 :] for one in (output.shape, output.chunks))
    dtype = np.min_scalar_type(max(sample[0] - 1, 1))
    return replace(output, shape=shape, chunks=chunks, dtype=str(dtype))


class Labels(Protocol):
    """Labels of a batch, by region."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, region: Region) -> Array: ...

    def __setitem__(self, region: Region, values: Array) -> None: ...


class ClassLabels:
    """Writes to labels [N, ..] the class of the largest of logits [N, C, ..], the first of equal ones.

    Of one class it writes whether its logit is above 0.

    Regions come in any order, one at a time, of one batch after the other. Where a region has not all
    classes, the largest logits so far are kept in a file without a name in ``folder``, as float64.
    """

    def __init__(self, classes: int, folder: Path) -> None:
        self.classes, self.folder = classes, folder
        self._rows: tuple[int, ...] = ()
        self._best: Array | None = None

    def put(self, labels: Labels, region: Region, rows: Sequence[int], logits: Array) -> None:
        """Take logits of a region of [N, C, ..], which the batch of samples ``rows`` has."""
        start, stop = region[1]
        place = (region[0], *region[2:])
        found = np.empty(region_shape(place), labels.dtype)
        for at in np.ndindex(found.shape[:2]):  # argmax makes int64: not of all at once
            own = logits[(at[0], slice(None), *at[1:])]
            found[at] = own[0] > 0 if self.classes == 1 else own.argmax(0) + start
        if (start, stop) != (0, self.classes):
            found = self._larger(labels, place, rows, logits, found)
        labels[place] = found

    def _larger(
        self, labels: Labels, place: Region, rows: Sequence[int], logits: Array, found: Array
    ) -> Array:
        """Labels of what is larger than all that came before; equal ones are of the first class."""
        if self._best is None or self._rows != tuple(rows):
            self._rows, shape = tuple(rows), labels.shape
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self._best = np.memmap(file, np.float64, "w+", shape=shape)
            self._best.fill(-np.inf)
            for row in range(len(rows)):  # none comes behind the last class
                one = (row, row + 1), *((0, extent) for extent in shape[1:])
                labels[one] = np.full(region_shape(one), self.classes - 1, labels.dtype)
        inner = as_slices(place)
        best, before, now = self._best[inner], labels[place], logits.max(1)
        now = np.where(np.isnan(now), np.inf, now)  # NaN is the largest to argmax
        taken = (now > best) | ((now == best) & (found < before))
        self._best[inner] = np.where(taken, now, best)
        return np.where(taken, found, before)


def facts_of_volumes(inference: Inference, outputs: Sequence[Output]) -> Facts:
    """Return name and attributes of the volume of each sample.

    Raises InputError unless there is one array of labels, of three spatial axes and the extents of its
    sample; DatasetError if the dataset's attributes are of other samples.
    """
    if len({one.name for one in outputs}) != 1 or len(outputs[0].sample_shape) != 3:
        shapes = ", ".join(f"'{one.name}' {list(one.shape)}" for one in outputs[:3])
        raise InputError(f"nifti= takes one output of three spatial axes; labels of this model are {shapes}")
    for one in outputs:
        extents = inference.extents(one.row or 0)
        if one.sample_shape != extents:
            raise InputError(
                f"nifti= takes labels of each voxel of a sample, and those of {list(extents)} voxels are "
                f"{list(one.sample_shape)}; leave it out, or have the network give the size of its input"
            )
    return list(inference.samples.items()) or sample_facts(inference.dataset, outputs[0].shape[0])


def write_volumes(folder: Path, facts: Facts, places: Sequence[tuple[zarr.Array[Any], Region]]) -> None:
    """Write labels [z, y, x] as a NIfTI file for each sample, of its place in an array."""
    folder.mkdir(parents=True, exist_ok=True)
    others = {path.name for path in folder.glob("*.nii.gz")} - {f"{name}.nii.gz" for name, _ in facts}
    if others:
        warnings.warn(
            f"{folder} has labels of other samples, too: {', '.join(sorted(others)[:5])}", stacklevel=5
        )
    for (name, told), (array, prefix) in zip(facts, places, strict=True):

        def planes(start: int, stop: int, array: zarr.Array[Any] = array, prefix: Region = prefix) -> Array:
            found: Array = np.asarray(array[(*as_slices(prefix), slice(start, stop))])
            return found.reshape(found.shape[len(prefix) :])

        write_labels(folder, name, told, array.shape[len(prefix) :], array.dtype, planes)
