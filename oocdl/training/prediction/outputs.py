"""``predict``: takes outputs, or the classes of their largest logits, to the arrays of their samples."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.config.options import Size
from oocdl.data.label_volumes import sample_facts, write_labels
from oocdl.errors import InputError, ModelError, printable
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Region, as_slices, intersect, is_empty, moved, region_shape, within
from oocdl.host.optional import needed
from oocdl.host.paths import path_of
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.planning.passes import PassInfo
from oocdl.runtime import weight_io
from oocdl.storage.files import make_writable, reporting
from oocdl.storage.run.lock import locked
from oocdl.storage.run.run_store import RunStore
from oocdl.training.metric_values import Measured
from oocdl.training.prediction.inference import Inference
from oocdl.training.prediction.predictions import Output, Predictions
from oocdl.training.signature import public
from oocdl.training.versions import Which, version_of

Facts = list[tuple[str, Mapping[str, Any]]]
LABELS = "labels.zarr"
"""Labels beside the volumes that are made of them, where no other place was given."""


@public
def predict(
    runs: Any,
    dataset: Any,
    out: str | Path | None = None,
    *,
    argmax: bool = False,
    probabilities: bool = False,
    mirror: bool | Sequence[int] = False,
    nifti: str | Path | None = None,
    memory: Size | None = None,
    batch_size: int = 1,
    inputs: Mapping[str, str] | None = None,
    spill: str | Path | None = None,
    which: Which | Sequence[Which] = None,
) -> zarr.Group:
    """Run trained models over a dataset, and write what they predict to the Zarr group ``out``.

    The group gets one array for each output, with the sample axis first; an earlier prediction is
    replaced. Until its end the group is marked (``oocdl_unfinished`` in its attributes), and is no
    dataset. If the call is killed, the same call with the same runs, dataset and options goes on with it,
    and computes what is not there as it was written. An output whose name cannot be a file's has it in
    the attributes of its array.

    Of several runs, and with ``mirror``, the mean is predicted: of probabilities where the loss has classes
    (of deep supervision: of the first output), else of outputs. Runs may differ in weights, network and
    normalisation; outputs, targets and precision are the same.

    Parameters
    ----------
    runs
        A run, or runs whose mean is predicted: paths, or what ``fit`` and ``open`` return.
    dataset
        What the network is run over, as in ``fit``; it needs no targets.
    out
        Path of the Zarr group to write; default with ``nifti``: labels.zarr in that folder.
    argmax
        Write the class of each voxel (uint8, [N, ..]) instead of logits [N, C, ..]; no logits are stored.
    probabilities
        Write probabilities of classes instead of outputs: softmax, or sigmoid where classes do not exclude
        each other or there is one. Losses without classes are refused.
    mirror
        Mirror samples along all spatial axes, or along these (0 is the first), in all combinations.
    nifti
        Folder for labels as NIfTI, with ``argmax``: ``<sample>.nii.gz`` in the grid of the sample's file.
    memory
        Memory budget of the process; default: that of the (first) run.
    inputs
        Model input -> dataset array; default: as in the run.
    spill
        Folder for what does not fit; default: $OOCDL_SPILL, else in the (first) run, or in the folder for
        temporary files, with a warning, if the run can only be read.
    which
        The version: "last", "best", "ema" (the last, with the averages that ``ema=`` has made), or a step
        of ``checkpoints``; of several runs, one of these or one for each; default: that of the best
        validation if ``EarlyStopping`` has restored it, else the last.

    Raises
    ------
    What ``fit`` raises.
    """
    if (nifti is not None and not argmax) or (out is None and nifti is None):
        raise InputError("predict takes out, a Zarr group to write, or argmax and nifti, a folder")
    if argmax and probabilities:
        raise InputError("argmax writes classes in the place of their probabilities: leave one of them out")
    members = runs if isinstance(runs, list | tuple) else [runs]
    versions = which if isinstance(which, list | tuple) else [which] * len(members)
    if not members or len(versions) != len(members):
        raise InputError(f"predict takes a version of each run, got {len(versions)} of {len(members)} runs")
    stores = [RunStore.open(path_of("runs", getattr(run, "path", run))) for run in members]
    volumes = None if nifti is None else path_of("nifti", nifti)
    if volumes is not None:
        needed("nibabel", "writing NIfTI", "mri")  # before memory is planned, and the network runs
    target = path_of("out", out) if out is not None else Path(volumes or "") / LABELS
    inference = Inference(
        [version_of(*pair) for pair in zip(stores, versions, strict=True)],
        dataset, memory, batch_size, inputs, spill, mirror=mirror, probabilities=probabilities,
    )  # fmt: skip
    logits, facts = list(_outputs_of(inference)), Facts()
    if volumes is not None and isinstance(inference.settings.loss, DeepSupervision):
        # Other outputs than the first are aids of training.
        logits = [one for one in logits if one.name == inference.model.outputs[0].name]
    outputs = [labels_of(one) for one in logits] if argmax else logits
    if volumes is not None:
        facts = _facts_of_volumes(inference, outputs)
        make_writable(volumes)  # before the network runs
    with locked(target):
        made, _ = _run(inference, target, outputs, logits if argmax else ())
        group = made.finish()
        if volumes is not None:
            with reporting(volumes):
                _write_volumes(volumes, facts, made, outputs[0].name)
    return group


def write_labels_of(inference: Inference, target: Path) -> tuple[Predictions, list[Measured]]:
    """Evaluate a network, and write the classes of the outputs that it keeps to a group for reading."""
    logits = list(_outputs_of(inference))
    return _run(inference, target, [labels_of(one, 1) for one in logits], logits)


def _run(
    inference: Inference, target: Path, outputs: Sequence[Output], logits: Sequence[Output]
) -> tuple[Predictions, list[Measured]]:
    samples = dict[str, Mapping[str, Any]]()
    for row, (name, its) in enumerate(inference.samples.items()):
        mine, extents = (one for one in outputs if one.row in (None, row)), inference.extents(row)
        is_like = all(one.sample_shape[-len(extents) :] == extents for one in mine)
        samples[name] = its if is_like else {}  # else they lie elsewhere in space
    with reporting(target):
        made = Predictions(target, outputs, inference.facts(), samples, inference.reads())
    labels = {one.name: ClassLabels(one.sample_shape[0], target) for one in logits}
    names, lock = {one.name for one in outputs}, threading.Lock()

    def deliver(plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        compiled = inference.compiled[plan_id]
        wanted = {name: its for name, its in compiled.outputs.items() if name in names}
        for output, box, part in weight_io.boxes_of(compiled, wanted, value, region, array):
            own = compiled.plan.factored.graph.values[compiled.outputs[output]].shape
            shape = _by_sample(output, own, len(info.indices))
            box = (*((0, 1),) * (len(shape) - len(own)), *box)
            part = part.reshape(region_shape(box))
            with lock, reporting(target):
                if output in labels:
                    shape = (shape[0], *shape[2:])
                    box, part = labels[output].of(box, part, info.indices, shape)
                _put(made, output, shape, info.indices, box, part)

    return made, inference.run(deliver, made)


def _by_sample(output: str, shape: Shape, batch: int) -> Shape:
    """Return the shape of an output whose first axis is that of samples; ModelError if it has none."""
    if shape[:1] == (batch,):
        return shape
    if batch == 1:
        return 1, *shape  # a Squeeze without axes takes that of one sample away
    raise ModelError(
        f"output '{printable(output)}' has the shape {list(shape)} for {batch} samples, whose axis has to be "
        "the first; pass batch_size=1"
    )


def _put(
    made: Predictions, output: str, shape: Shape, rows: Sequence[int], region: Region, values: Array
) -> None:
    for position, row in enumerate(rows[slice(*region[0])]):
        array, prefix = made.place(output, row)
        own = array.shape[len(prefix) :]
        starts = [(mine - its) // 2 for mine, its in zip(shape[1:], own, strict=True)]
        part = intersect(region[1:], moved(tuple((0, extent) for extent in own), starts))
        if not is_empty(part):
            place = (*prefix, *moved(part, [-start for start in starts]))
            array[as_slices(place)] = values[position][within(part, region[1:])].reshape(region_shape(place))


def _outputs_of(inference: Inference) -> Iterator[Output]:
    """Yield the arrays to write: one for all samples, or one for each where they differ in size."""
    full = {kind.label: name for name, kind in inference.kinds.items() if not kind.is_rest}
    others = inference.outputs_unlike_inputs()
    for label, plan_id in full.items():
        compiled, binding = inference.compiled[plan_id], inference.sized.bindings[label]
        padded = binding.arrays[next(iter(binding.inputs.values()))].shape
        for output, name in compiled.outputs.items():
            value = compiled.plan.factored.graph.values[name]
            regions = [region for region, _ in compiled.graph.pieces[compiled.plan.factored.stored(name)]]
            _, *sample = _by_sample(output, value.shape, inference.kinds[plan_id].batch)
            chunks = weight_io.chunks_of(compiled, name, regions)[len(value.shape) - len(sample) :]
            if not inference.sized.labels:
                yield Output(output, (inference.binding.samples, *sample), value.dtype, (1, *chunks))
            for row, its in enumerate(inference.sized.labels):
                if its == label:
                    own, shape = inference.extents(row), tuple(sample)
                    if output not in others and shape[-len(own) :] == padded[-len(own) :]:
                        shape = (*shape[: -len(own)], *own)
                    sizes = tuple(max(min(pair), 1) for pair in zip(chunks, shape, strict=True))
                    yield Output(output, shape, value.dtype, sizes, row)


def labels_of(output: Output, least: int = 2) -> Output:
    """Return the array of labels of an output [N, C, ..]; InputError for fewer than ``least`` classes."""
    axis, sample = 1 if output.row is None else 0, output.sample_shape
    if len(sample) < 1 or sample[0] < least:
        raise InputError(
            f"argmax is over classes, the second axis, and output '{output.name}' has the shape "
            f"{list(output.shape)}; leave it out, and compare the output with a threshold"
        )
    shape, chunks = (one[:axis] + one[axis + 1 :] for one in (output.shape, output.chunks))
    return replace(output, shape=shape, chunks=chunks, dtype=str(np.min_scalar_type(max(sample[0] - 1, 1))))


class ClassLabels:
    """Takes the class of the largest of logits [N, C, ..], the first of equal ones; of one, if it is above 0.

    Where a region has not all classes, what is largest so far is kept in files without names in ``folder``.
    """

    def __init__(self, classes: int, folder: Path) -> None:
        self.classes, self.folder = classes, folder
        self._rows: tuple[int, ...] = ()
        self._best: tuple[Array, Array] | None = None

    def of(self, region: Region, logits: Array, rows: Sequence[int], shape: Shape) -> tuple[Region, Array]:
        """Return where labels of a region of logits are in those of a batch, and what they are so far."""
        start, stop = region[1]
        place = (region[0], *region[2:])
        labels = np.empty(region_shape(place), np.min_scalar_type(max(self.classes - 1, 1)))
        for at in np.ndindex(labels.shape[:2]):  # argmax makes int64: not of all at once
            own = logits[(at[0], slice(None), *at[1:])]
            labels[at] = own[0] > 0 if self.classes == 1 else own.argmax(0) + start
        if (start, stop) == (0, self.classes):
            return place, labels
        if self._best is None or self._rows != tuple(rows):
            self._rows = tuple(rows)
            best = self._kept(shape, np.float64, -np.inf)
            self._best = best, self._kept(shape, labels.dtype, self.classes - 1)  # none is behind the last
        best, before = (kept[as_slices(place)] for kept in self._best)
        now = logits.max(1)
        now = np.where(np.isnan(now), np.inf, now)  # NaN is the largest to argmax
        taken = (now > best) | ((now == best) & (labels < before))
        best[taken], before[taken] = now[taken], labels[taken]
        return place, before

    def _kept(self, shape: Shape, dtype: Any, start: float) -> Array:
        with tempfile.TemporaryFile(dir=self.folder) as file:
            kept = np.memmap(file, dtype, "w+", shape=shape)
        kept.fill(start)
        return kept


def _facts_of_volumes(inference: Inference, outputs: Sequence[Output]) -> Facts:
    """Return name and attributes of the volume of each sample; InputError for other labels than volumes."""
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


def _write_volumes(folder: Path, facts: Facts, made: Predictions, output: str) -> None:
    others = {path.name for path in folder.glob("*.nii.gz")} - {f"{name}.nii.gz" for name, _ in facts}
    if others:
        text = f"{folder} has labels of other samples, too: {', '.join(sorted(others)[:5])}"
        warnings.warn(text, stacklevel=5)
    for row, (name, told) in enumerate(facts):
        array, prefix = made.place(output, row)

        def planes(start: int, stop: int, array: zarr.Array[Any] = array, prefix: Region = prefix) -> Array:
            found: Array = np.asarray(array[(*as_slices(prefix), slice(start, stop))])
            return found.reshape(found.shape[len(prefix) :])

        write_labels(folder, name, told, array.shape[len(prefix) :], array.dtype, planes)
