"""Distances of the surfaces of predicted and true labels, which are read a few planes at a time.

Edges are as MONAI has them: voxels that have one of another class, or the end of the volume, beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.data.label_volumes import sample_facts
from oocdl.data.nifti import spacing_of
from oocdl.errors import BudgetError, DatasetError, InputError
from oocdl.graph.ir.index import as_slices
from oocdl.graph.ir.index import whole as region_of
from oocdl.graph.onnx.model_file import size_text
from oocdl.host.heap import give_back_freed_memory
from oocdl.host.limits import anonymous_bytes
from oocdl.ops.loss_functions import labels_of, reads_labels
from oocdl.ops.metric_functions import Numbers, Surface
from oocdl.planning.binding import Target
from oocdl.planning.machine import FILE_BYTES, KERNEL_BYTES
from oocdl.storage.dataset.sample_stack import own_sized
from oocdl.training.metric_values import PassSums
from oocdl.training.prediction.inference import Inference
from oocdl.training.prediction.predictions import Predictions

Labels = npt.NDArray[np.int32]
SLAB_VOXELS = 1 << 20
"""Voxels that are read at once, unless a plane, or a layer of chunks that finds room, has more."""
SLAB_VOXEL_BYTES, POINT_BYTES = 32, 96
"""Bytes for each voxel that is read, and for each that is kept: coordinates, tree, distances."""


@dataclass(frozen=True)
class Edges:
    """The edge voxels of all classes of a volume: their indices, of shape (voxels, axes), and classes."""

    places: npt.NDArray[np.int32]
    classes: Labels

    def of(self, number: int, spacing: Sequence[float]) -> Numbers:
        found: Numbers = self.places[self.classes == number] * np.asarray(spacing, np.float64)
        return found


def edges_of(slabs: Iterable[Labels], least: int, afford: Callable[[int], None]) -> Edges:
    """Find the edge voxels of classes from ``least`` in slabs, after which comes a plane of no class."""
    around, kept, plane, count = None, list[tuple[Any, Labels]](), 0, 0
    for slab in slabs:
        wide = np.pad(slab, [(0, 0), *[(1, 1)] * (slab.ndim - 1)], constant_values=-1)
        around = np.concatenate([np.full_like(wide[:1], -1) if around is None else around, wide])
        inner = (slice(1, -1),) * slab.ndim
        core = around[inner]
        edge = np.zeros(core.shape, bool)
        for axis in range(slab.ndim):
            for beside in (slice(0, -2), slice(2, None)):
                edge |= core != around[(*inner[:axis], beside, *inner[axis + 1 :])]
        edge &= core >= least
        count += int(np.count_nonzero(edge))
        afford(count)
        places = np.argwhere(edge).astype(np.int32)
        places[:, 0] += plane
        kept.append((places, core[edge]))
        plane, around = plane + len(core), around[-2:].copy()
    return Edges(np.concatenate([one for one, _ in kept]), np.concatenate([one for _, one in kept]))


def both_ways(library: Any, predicted: Numbers, true: Numbers) -> tuple[Numbers, Numbers]:
    """Return the distance of each predicted edge voxel to the true edge, and back; to nothing, infinity."""
    if not len(predicted) or not len(true):
        return np.full(len(predicted), np.inf), np.full(len(true), np.inf)
    pairs = (predicted, true), (true, predicted)
    there, back = (library.KDTree(to, leafsize=32).query(of)[0] for of, to in pairs)
    return there, back


def spacings_of(inference: Inference) -> list[list[float]]:
    """Return the spacing of each sample in millimetres, else 1; DatasetError for no positive numbers."""
    graph, outputs = inference.first.plan.factored.graph, inference.first.outputs.values()
    axes = len(graph.values[next(iter(outputs))].shape) - 2
    told = list(inference.samples.items())
    if not told and axes <= 3:
        told = list(sample_facts(inference.dataset, inference.binding.samples))
    found: list[list[float]] = []
    for name, facts in told:
        given = facts.get("spacing", facts.get("affine", np.eye(4)))
        try:
            if "spacing" not in facts:
                given = spacing_of(np.asarray(given, np.float64).reshape(4, 4))[-axes:]
            steps = [float(one) for one in given]
        except (TypeError, ValueError):
            steps = []
        if len(steps) != axes or not all(0 < one < np.inf for one in steps):
            text = f"the spacing of sample '{name}' is to be {axes} positive numbers, not {given}"
            raise DatasetError(text)
        found.append(steps)
    return found or [[1.0] * axes] * inference.binding.samples


def distances(
    inference: Inference, library: Any, made: Predictions, spacings: Sequence[list[float]]
) -> dict[int, PassSums]:
    """Return for each sample the distances of each output and class, by the names of the metrics."""
    give_back_freed_memory()
    metrics = [one for one in inference.settings.metrics if isinstance(one, Surface)]
    found: dict[int, PassSums] = {}
    for row, spacing in enumerate(spacings):
        values: dict[str, dict[str, Any]] = {output: {} for output in inference.first.metric_sums}
        for target in inference.binding.targets:
            if target.output in inference.first.outputs:
                volume = _Volume(inference, target, made, row)
                extents = inference.extents(row)
                if volume.shape != extents and set(spacing) != {1.0}:
                    raise InputError(
                        f"surface metrics with a spacing take labels of each voxel of a sample, and those of "
                        f"{list(extents)} voxels are {list(volume.shape)}; leave the metrics out"
                    )
                values[target.output] = _of_classes(volume, metrics, library, spacing)
        found[row] = values
    return found


def _of_classes(
    volume: _Volume, metrics: Sequence[Surface], library: Any, spacing: Sequence[float]
) -> dict[str, list[list[float]]]:
    one, classes = volume.classes == 1, max(volume.classes, 2)
    least = 0 if not one and any(metric.include_background for metric in metrics) else 1
    predicted = edges_of(volume.slabs(volume.predicted), least, volume.afford)
    volume.kept = len(predicted.classes)
    true = edges_of(volume.slabs(volume.true), least, volume.afford)
    pairs = [(np.zeros(0), np.zeros(0))] * least
    for number in range(least, classes):
        pairs.append(both_ways(library, predicted.of(number, spacing), true.of(number, spacing)))
    return {metric.name: [[metric.distance(*pair) for pair in pairs[int(one) :]]] for metric in metrics}


class _Volume:
    """Predicted and true labels of a sample; negative where the loss ignores them."""

    kept = 0

    def __init__(self, inference: Inference, target: Target, made: Predictions, row: int) -> None:
        self._array, self._prefix = made.place(target.output, row)
        self._truth, self._row = own_sized(inference.binding.arrays[target.array], row), row
        logits = inference.first.plan.factored.graph.values[inference.first.outputs[target.output]].shape
        known = labels_of(target.spec, logits, (logits[0], *logits[2:]))
        scale = inference.preparation.scale.get(target.array)
        dtype = "int64" if reads_labels(target.spec) else inference.settings.dtype
        self._scale = None if scale is None else np.asarray(scale, dtype)
        self.classes, self._ignored = logits[1], None if known is None else known.ignore_index
        self.shape = self._array.shape[len(self._prefix) :]
        taken = anonymous_bytes() + KERNEL_BYTES + FILE_BYTES + self._truth.reading_bytes
        self._left_bytes = max(inference.settings.memory_bytes - taken, 0)
        area = max(prod(self.shape[1:]), 1)
        layer = max(self._truth.chunks[-len(self.shape)], self._array.chunks[-len(self.shape)])
        most = max(SLAB_VOXELS, self._left_bytes // (4 * SLAB_VOXEL_BYTES)) // area
        self._depth = max(min(max(SLAB_VOXELS // area // layer, 1) * layer, most), 1)
        self._slab_bytes = (min(self._depth, self.shape[0]) + 2) * area * SLAB_VOXEL_BYTES

    def slabs(self, read: Callable[[int, int], Labels]) -> Iterator[Labels]:
        for start in range(0, self.shape[0], self._depth):
            self.afford(0)
            yield read(start, min(start + self._depth, self.shape[0]))
        yield np.full((1, *self.shape[1:]), -1, np.int32)

    def true(self, start: int, stop: int) -> Labels:
        channels, space = self._truth.shape[1 : -len(self.shape)], self.shape[1:]
        region = (self._row, self._row + 1), *region_of(channels), (start, stop), *region_of(space)
        found = self._truth.read(region).reshape(stop - start, *space)
        if self._scale is not None:  # as what the loss reads
            found = found.astype(self._scale.dtype) * self._scale
        labels = np.asarray(found > 0.5 if self.classes == 1 else found, np.int32)
        return labels if self._ignored is None else np.where(found == self._ignored, np.int32(-1), labels)

    def predicted(self, start: int, stop: int) -> Labels:
        found = np.asarray(self._array[(*as_slices(self._prefix), slice(start, stop))], np.int32)
        labels = found.reshape(stop - start, *self.shape[1:])
        return labels if self._ignored is None else np.where(self.true(start, stop) < 0, np.int32(-1), labels)

    def afford(self, count: int) -> None:
        needed = self._slab_bytes + (self.kept + count) * POINT_BYTES
        if needed > self._left_bytes:
            raise BudgetError(
                f"surfaces of sample {self._row} need {size_text(needed)} or more, for {self.kept + count:,} "
                f"edge voxels, and may take {size_text(self._left_bytes)} of the budget; pass memory= more, "
                "or no surface metric"
            )
