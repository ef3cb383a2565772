"""``predict``: takes outputs, region by region as they are computed, to the arrays of their samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Region, as_slices, intersect, is_empty, moved, region_shape, within
from oocdl.planning.binding import Binding
from oocdl.planning.passes import PassInfo
from oocdl.runtime import weight_io
from oocdl.runtime.inputs import own_regions
from oocdl.storage.dataset.sample_stack import members_of
from oocdl.storage.files import reporting
from oocdl.storage.run.lock import RunLock
from oocdl.training.prediction.class_labels import (
    ClassLabels,
    facts_of_volumes,
    labels_of,
    write_volumes,
)
from oocdl.training.prediction.inference import Inference, Measured
from oocdl.training.prediction.predictions import Output, Predictions

Place = tuple["zarr.Array[Any]", Region, Sequence[int]]
"""Array of a sample; where in it, and where in the network's output, the sample stands."""


@dataclass(frozen=True, eq=False)
class Canvas:
    """The outputs of a batch, as the network has them: what is around smaller samples is left out."""

    places: Sequence[Place]
    """By position in the batch."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __setitem__(self, region: Region, values: Array) -> None:
        for position, (array, prefix, starts) in enumerate(self.places[slice(*region[0])]):
            own, part = self._own(region, array, prefix, starts)
            if not is_empty(own):
                place, found = (*prefix, *own), values[position][within(part, region[1:])]
                array[as_slices(place)] = found.reshape(region_shape(place))

    def __getitem__(self, region: Region) -> Array:
        found: Array = np.zeros(region_shape(region), self.dtype)
        for position, (array, prefix, starts) in enumerate(self.places[slice(*region[0])]):
            own, part = self._own(region, array, prefix, starts)
            if not is_empty(own):
                read = np.asarray(array[as_slices((*prefix, *own))])
                found[position][within(part, region[1:])] = read.reshape(region_shape(own))
        return found

    def _own(
        self, region: Region, array: zarr.Array[Any], prefix: Region, starts: Sequence[int]
    ) -> tuple[Region, Region]:
        """Return the part of a region that is a sample's own, in its array and in the network's output."""
        extents = array.shape[len(prefix) :]
        part = intersect(region[1:], moved(tuple((0, extent) for extent in extents), starts))
        return moved(part, [-start for start in starts]), part


def write_predictions(inference: Inference, target: Path, argmax: bool, volumes: Path | None) -> zarr.Group:
    """Run the network over a dataset and write its outputs, or their classes, to a group; returns that.

    With ``volumes`` labels are written there too, as NIfTI. Raises what ``Run.predict`` raises.
    """
    outputs = list(_outputs_of(inference))
    classes = {one.name: one.sample_shape[0] for one in outputs if one.sample_shape} if argmax else {}
    outputs = [labels_of(one) if argmax else one for one in outputs]
    facts = () if volumes is None else facts_of_volumes(inference, outputs)
    with _alone(target):
        made, _ = _run(inference, target, outputs, classes)
        group = made.finish()
        if volumes is not None:
            with reporting(volumes):
                labels = [made.place(outputs[0].name, row) for row in range(len(facts))]
                write_volumes(volumes, facts, labels)
    return group


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Lock a place to write to, by a file beside it. Raises InUseError if another process writes there."""
    path = target.absolute().with_name(f".{target.name}.lock")
    with reporting(target):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def write_labels_of(inference: Inference, target: Path) -> tuple[Predictions, list[Measured]]:
    """Evaluate a network, and write the classes of the outputs that it keeps to a group that is for reading.

    Of one channel the class is 1 where it is above 0.
    """
    outputs = list(_outputs_of(inference))
    classes = {one.name: one.sample_shape[0] for one in outputs}
    return _run(inference, target, [labels_of(one, 1) for one in outputs], classes)


def _run(
    inference: Inference, target: Path, outputs: Sequence[Output], classes: Mapping[str, int]
) -> tuple[Predictions, list[Measured]]:
    """Run the network, and write its outputs, or classes of those that have so many, to a group."""
    with reporting(target):
        samples = {
            name: its if _is_like(inference, outputs, row) else {}  # else they lie elsewhere in space
            for row, (name, its) in enumerate(inference.samples.items())
        }
        made = Predictions(target, outputs, inference.facts(), samples)
    takers = {name: ClassLabels(count, target) for name, count in classes.items()}
    lock = threading.Lock()

    def deliver(plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        compiled = inference.compiled[plan_id]
        factored = compiled.plan.factored
        for output, name in compiled.outputs.items():
            if factored.stored(name) != value:
                continue
            shape = factored.graph.values[name].shape
            canvas = _canvas(
                made, output, (shape[0], *shape[2:]) if output in takers else shape, info.indices
            )
            for box, place in own_regions(factored.factors[name], region):
                with lock, reporting(target):
                    found = array[place].reshape(region_shape(box))
                    if output in takers:
                        takers[output].put(canvas, box, info.indices, found)
                    else:
                        canvas[box] = found

    return made, inference.run(deliver, made)


def _is_like(inference: Inference, outputs: Sequence[Output], row: int) -> bool:
    """Whether all outputs of a sample have its extents."""
    extents = inference.extents(row)
    mine = (one for one in outputs if one.row in (None, row))
    return all(one.sample_shape[-len(extents) :] == extents for one in mine)


def _outputs_of(inference: Inference) -> Iterator[Output]:
    """The arrays to write: one for all samples, or one for each where they differ in size."""
    full = {kind.label: name for name, kind in inference.kinds.items() if not kind.is_rest}
    for label, plan_id in full.items():
        compiled = inference.compiled[plan_id]
        for output, name in compiled.outputs.items():
            value = compiled.plan.factored.graph.values[name]
            regions = [region for region, _ in compiled.graph.pieces[compiled.plan.factored.stored(name)]]
            chunks = weight_io.chunks_of(compiled, name, regions)[1:]
            if not inference.sized.labels:
                yield Output(output, (inference.binding.samples, *value.shape[1:]), value.dtype, (1, *chunks))
            for row, its in enumerate(inference.sized.labels):
                if its == label:
                    binding, axes = inference.sized.bindings[label], len(inference.sized.spaces[0])
                    shape = _own_shape(binding, row, value.shape[1:], axes)
                    sizes = tuple(max(min(pair), 1) for pair in zip(chunks, shape, strict=True))
                    yield Output(output, shape, value.dtype, sizes, row)


def _own_shape(binding: Binding, row: int, shape: Shape, axes: int) -> Shape:
    """Return the shape of an output of a sample: with its own extents, if the output has the padded ones."""
    array = binding.arrays[next(iter(binding.inputs.values()))]
    own = members_of(array)[row].shape
    if len(shape) < axes or shape[-axes:] != array.shape[-axes:]:
        return shape
    return (*shape[:-axes], *own[-axes:])


def _canvas(made: Predictions, output: str, shape: Shape, rows: Sequence[int]) -> Canvas:
    places: list[Place] = []
    for row in rows:
        array, prefix = made.place(output, row)
        own = array.shape[len(prefix) :]
        places.append((array, prefix, [(mine - its) // 2 for mine, its in zip(shape[1:], own, strict=True)]))
    return Canvas(places, shape, np.dtype(places[0][0].dtype))
