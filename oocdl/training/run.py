"""``Run``: reads a run directory, finished or not; predicts, evaluates and exports its model."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.config import Settings, make_settings, restored
from oocdl.engines.engine import resolve
from oocdl.errors import CorruptError, InputError, StoreError, printable
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region, as_slices, region_shape, whole
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.graph.onnx.writer import export_onnx
from oocdl.host.heap import use_one_heap
from oocdl.host.limits import check_budget
from oocdl.host.paths import path_of
from oocdl.ops import RULES
from oocdl.planning.binding import Binding, bind
from oocdl.planning.compiler import CompiledPass, draft_pass
from oocdl.planning.machine import Machine, check_device, machine_for
from oocdl.planning.passes import PassInfo
from oocdl.planning.recipe import PassKind, Request
from oocdl.pytorch.door import load
from oocdl.report.run_report import Report, read_report
from oocdl.runtime import weight_io
from oocdl.runtime.inputs import own_regions
from oocdl.runtime.session import Session
from oocdl.storage.dataset.dataset import Dataset, batches, open_dataset
from oocdl.storage.files import existing, reporting
from oocdl.storage.run.manifest import TensorSpec
from oocdl.storage.run.run_store import RunStore
from oocdl.training.predictions import Output, Predictions, warn_of_draws
from oocdl.training.resume import identity, same_operators
from oocdl.training.signals import Signals


class _Arrays(Mapping[str, "zarr.Array[Any]"]):
    """Maps names of weights to read-only Zarr arrays of the committed version."""

    def __init__(self, store: RunStore, model: Path) -> None:
        self.store = store
        self.model = model

    def _names(self) -> list[str]:
        manifest = self.store.current()
        found = manifest.tensors.values() if manifest else ()
        return [tensor.spec.name for tensor in found if tensor.spec.kind == "weights"]

    def __getitem__(self, name: str) -> zarr.Array[Any]:
        if name not in (names := self._names()):
            # A tied weight has several names in the module that the file was made of.
            metadata = inspect_onnx(self.model).metadata if self.model.is_file() else None
            found = metadata.initializer_of(name) if metadata is not None else None
            if found not in names:
                raise KeyError(name)
            name = found
        return self.store.array("weights", name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return printable(f"<{len(self)} arrays: {', '.join(self)}>")


@dataclass(eq=False)
class Run:
    """A run on disk, finished or not. Made by ``fit`` and ``open``.

    It reads what is committed, also while another process trains it. ``history`` has a dict for each step;
    ``weights`` and ``kept`` map names to read-only Zarr arrays. Raises StoreError if there is no run in
    ``path``, CorruptError if it is damaged.
    """

    path: Path
    plan: Any = None
    """The ``Plan`` it was trained by, where this process trained it."""

    def __post_init__(self) -> None:
        self._store = RunStore.open(self.path)
        try:
            self._settings: Settings = restored(self._store.meta["settings"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CorruptError(
                f"the settings in {self.path / 'run.json'} cannot be read ({reason}); of another version?"
            ) from error

    @property
    def steps(self) -> int:
        """Number of committed steps."""
        manifest = self._store.current()
        return int(manifest.meta["step"]) if manifest else 0

    @property
    def finished(self) -> bool:
        """Whether all steps that were asked for are committed."""
        manifest = self._store.current()
        return manifest is not None and int(manifest.meta["step"]) >= int(manifest.meta["steps"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each committed step: step, epoch, loss, lr, seconds, and bytes moved and at the peak."""
        return self._store.history()

    @property
    def weights(self) -> Mapping[str, zarr.Array[Any]]:
        """Committed weights by the model's initializer names, which in a file of a module are PyTorch's."""
        return _Arrays(self._store, self._model_path)

    @property
    def kept(self) -> Mapping[str, zarr.Array[Any]]:
        """Activations and gradients of the last step that ``keep=`` named."""
        return self._store.kept()

    def report(self) -> Report:
        """Return measured beside predicted times, layer by layer, of the last session in one process.

        ``print(run.report())`` shows tables. Raises StoreError where no whole step was measured, as with a
        Dask client.
        """
        return read_report(self.path)

    def export(self, path: str | Path) -> Path:
        """Write the model with its trained weights as an ONNX file; returns its path.

        Raises StoreError if no step is committed, if the model's file has changed since the run began, or if
        ``path`` cannot be written.
        """
        target = path_of("path", path)
        model = self._model()
        manifest = self._store.current()
        if manifest is None:
            raise StoreError(f"run {self.path} has no committed step yet")
        specs = {tensor.spec.name: tensor.spec for tensor in manifest.tensors.values()}

        def blocks(name: str) -> Iterator[Array] | None:
            return _verified_blocks(self._store, specs[name]) if name in specs else None

        with reporting(target):
            return export_onnx(model.path, target, blocks)

    def load_into(self, module: Any) -> None:
        """Put the trained weights and running statistics into a ``torch.nn.Module``.

        The run is one of ``fit(module, ...)``, or of a file of ``from_torch``. Tensors go by PyTorch's names,
        in the module's dtype and on its device; ``num_batches_tracked`` grows as it would have there.
        Modes (``train()``, ``eval()``) and what the run did not train stay as they are. Raises StoreError if
        no step is committed; InputError, before anything is changed, if the module is another one, or the
        file is not of a module.
        """
        model = self._model()
        manifest = self._store.current()
        if manifest is None:
            raise StoreError(f"run {self.path} has no committed step yet")
        if model.metadata is None:
            raise InputError(
                f"{model.path} does not say what its weights are called in PyTorch; train a file of "
                "oocdl.from_torch, or read run.weights"
            )
        specs = {tensor.spec.name: tensor.spec for tensor in manifest.tensors.values()}
        shapes = {name: specs[name].shape for name in model.metadata.facts if name in specs}
        passes = self.steps * int(self._store.meta["identity"]["accumulate"])
        load(module, model.metadata, shapes, lambda name: _verified_blocks(self._store, specs[name]), passes)

    def predict(
        self,
        dataset: Any,
        out: str | Path,
        *,
        memory: int | str | None = None,
        batch_size: int = 1,
        inputs: Mapping[str, str] | None = None,
        spill: str | Path | None = None,
    ) -> zarr.Group:
        """Run the trained model over a dataset, and write its outputs to the Zarr group ``out``.

        The group gets one array for each output, with the sample axis first; an earlier prediction is
        replaced. Until its end the group is marked (``oocdl_unfinished`` in its attributes), and is no
        dataset. If the call is killed, the same call with the same run, dataset and options goes on with it,
        and computes what is not there as it was written. An output whose name cannot be a file's has it in
        the attributes of its array.

        ``memory`` is the budget of the process, by default that of the run; ``inputs`` maps model inputs to
        arrays of the dataset. ``spill`` is the folder for what does not fit: by default ``$OOCDL_SPILL``,
        else in the run, or in the folder for temporary files, with a warning, if the run can only be read.
        Raises what ``fit`` raises.
        """
        target = path_of("out", out)
        inference = _Inference(self, dataset, memory, batch_size, inputs, targets=False, spill=spill)
        compiled = inference.first
        factored = compiled.plan.factored
        outputs = []
        for output, name in compiled.outputs.items():
            value = factored.graph.values[name]
            regions = [region for region, _ in compiled.graph.pieces[factored.stored(name)]]
            shape = (inference.binding.samples, *value.shape[1:])
            chunks = (1, *weight_io.chunks_of(compiled, name, regions)[1:])
            outputs.append(Output(output, shape, value.dtype, chunks))
        with reporting(target):
            made = Predictions(target, outputs, inference.facts())
        lock = threading.Lock()

        def deliver(plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
            compiled = inference.compiled[plan_id]
            factored = compiled.plan.factored
            for output, name in compiled.outputs.items():
                if factored.stored(name) != value:
                    continue
                for box, place in own_regions(factored.factors[name], region):
                    first = info.indices[0]
                    where = as_slices(((first + box[0][0], first + box[0][1]), *box[1:]))
                    with lock, reporting(target):
                        made.arrays[output][where] = array[place].reshape(region_shape(box))

        inference.run(deliver, made)
        return made.finish()

    def evaluate(
        self,
        dataset: Any,
        *,
        memory: int | str | None = None,
        batch_size: int = 1,
        inputs: Mapping[str, str] | None = None,
        targets: Mapping[str, str] | None = None,
        spill: str | Path | None = None,
    ) -> dict[str, float]:
        """Return the mean loss of the trained model over a dataset; with several heads, their losses too.

        The model runs as it predicts: with running statistics, without dropout. ``memory``, ``inputs`` and
        ``targets`` are as in ``fit``, by default those of the run; ``spill`` as in ``predict``. Raises what
        ``fit`` raises.
        """
        asked = _Inference(
            self, dataset, memory, batch_size, inputs, targets=True, target_map=targets, spill=spill
        )
        return asked.run()

    @property
    def _model_path(self) -> Path:
        name: str = self._store.meta["model"]
        return self.path.absolute() / name  # in the run, if it was made of a module

    def _model(self) -> OnnxModel:
        model = inspect_onnx(self._model_path)
        if model.fingerprint() != self._store.meta["identity"]["model"]:
            raise StoreError(f"{model.path} is no longer the file this run was started with; restore it")
        return model

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, steps={self.steps}{'' if self.finished else ', unfinished'})"


def _verified_blocks(store: RunStore, spec: TensorSpec) -> Iterator[Array]:
    """Yield a committed array in C order, the rows of a chunk at a time, each verified as it is read."""
    if not spec.shape:
        yield store.read(spec.name, ())
        return
    rows = spec.chunks[0]
    for start in range(0, spec.shape[0], rows):
        stop = min(start + rows, spec.shape[0])
        yield store.read(spec.name, ((start, stop), *whole(spec.shape[1:])))


class _Inference:
    """Forward passes over a dataset, within a budget."""

    def __init__(
        self,
        run: Run,
        dataset: Any,
        memory: int | str | None,
        batch_size: int,
        inputs: Mapping[str, str] | None,
        targets: bool,
        target_map: Mapping[str, str] | None = None,
        spill: str | Path | None = None,
    ) -> None:
        stored = run._settings
        try:
            resolve(stored.engine)
        except InputError as error:
            raise StoreError(
                f"the run in {run.path} is of another version of oocdl: {error}; export its model, and start "
                "a run with that"
            ) from None
        checked = make_settings(
            batch_size=batch_size, inputs=inputs, targets=target_map, memory=memory, spill=spill
        )
        # Where the run's owner spilled is nothing to the caller.
        changes: dict[str, Any] = {"batch_size": checked.batch_size, "scale": None, "spill": checked.spill}
        changes |= {} if inputs is None else {"inputs": checked.inputs}
        changes |= {} if target_map is None else {"targets": checked.targets}
        changes |= {} if memory is None else {"memory_bytes": checked.memory_bytes}
        use_one_heap()
        self.run_, self.settings = run, replace(stored, **changes)
        self.dataset: Dataset = open_dataset(dataset, stored.allow_missing_chunks)
        model = self.model = run._model()
        same_operators(run.path, run._store.meta["identity"], digests(model.nodes))
        self.binding: Binding = bind(model, self.dataset, self.settings, with_targets=targets)
        self.dataset = self.dataset.only(self.binding.used)
        self.scale = self._scale(run._store.meta["identity"], stored.scale or {})
        check_budget(self.settings.memory_bytes)
        self.machine: Machine = machine_for(self.settings, self.dataset)
        self.batch = min(batch_size, self.binding.samples)
        sizes = {self.batch} | ({self.binding.samples % self.batch} - {0})
        limits = self.machine.limits(self.settings, self.machine.unit_bytes)
        request = Request(
            model=model,
            binding=self.binding,
            settings=self.settings,
            batch=self.batch,
            rules=RULES,
            kind=PassKind.FORWARD,
        )
        self.compiled: dict[str, CompiledPass] = {
            f"infer{size}": draft_pass(replace(request, batch=size)).cut(limits) for size in sorted(sizes)
        }
        for compiled in self.compiled.values():
            check_device(compiled.plan, self.machine)
        self.first = self.compiled[f"infer{self.batch}"]
        warn_of_draws(self.first.plan.factored.graph)

    def _scale(self, identity: Mapping[str, Any], trained: Mapping[str, float]) -> dict[str, float]:
        """Return factors by array of this dataset: those that the same input or head had in training."""
        now = {("input", name): array for name, array in self.binding.inputs.items()}
        now |= {("head", target.output): target.array for target in self.binding.targets}
        then = {("input", name): array for name, array in identity["inputs"].items()}
        then |= {("head", name): head["target"] for name, head in identity["loss"].items()}
        return {array: trained[then[key]] for key, array in now.items() if then.get(key) in trained}

    def facts(self) -> dict[str, Any]:
        """Return what predictions depend on, as plain data."""
        manifest = self.run_._store.current()
        version = "" if manifest is None else hashlib.sha256(manifest.dumps().encode()).hexdigest()
        plans = {name: compiled.plan.numerics() for name, compiled in self.compiled.items()}
        return {
            "version": version,
            "numerics": plans,
            "scale": self.scale,
            **identity(self.model, self.binding, self.settings),
        }

    def _spill(self) -> Path:
        """Return the folder of the spill: a run that cannot be written is read all the same."""
        inside = self.run_.path / "spill"
        if os.access(existing(inside), os.W_OK) and not inside.is_symlink():
            return self.settings.spill_folder(inside)
        other = Path(tempfile.gettempdir()) / f"oocdl-spill-{os.geteuid()}"
        folder = self.settings.spill_folder(other)
        if folder == other:
            warnings.warn(f"the run in {self.run_.path} cannot be written; spilling to {other}", stacklevel=4)
        return folder

    def run(self, deliver: Any = None, made: Predictions | None = None) -> dict[str, float]:
        """Run all batches in dataset order; returns the losses, averaged over samples.

        Batches whose samples are all in ``made`` are left out.
        """
        passes = () if deliver is None else self.compiled.values()
        watched = frozenset(c.plan.factored.stored(name) for c in passes for name in c.outputs.values())
        totals: dict[str, float] = {}
        done = set() if made is None else made.done
        signals, spill = Signals(), self._spill()
        session = Session(self.compiled, self.dataset, self.scale, self.machine, spill, deliver, watched)
        with signals, session:
            session.load(f"infer{self.batch}", self.run_._store.read)
            for indices in batches(self.binding.samples, self.batch, shuffle=False):
                rows = tuple(int(i) for i in indices)
                if done.issuperset(rows):
                    continue
                plan_id = f"infer{len(rows)}"
                with signals.allowed():
                    found = session.run_pass(plan_id, PassInfo(0, self.settings.seed, rows))
                if made is not None:
                    made.note(rows)
                for title, loss in self.compiled[plan_id].named_losses(found).items():
                    totals[title] = totals.get(title, 0.0) + loss * len(rows)
        return {title: float(np.float64(total) / self.binding.samples) for title, total in totals.items()}
