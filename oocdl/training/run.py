"""``Run``: reads a run directory, finished or not; predicts, evaluates and exports its model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import zarr

from oocdl.config import Settings
from oocdl.config.options import Metrics, Size
from oocdl.dashboard import page_process
from oocdl.errors import InputError, ModelWarning, StoreError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import whole
from oocdl.graph.onnx.writer import export_onnx
from oocdl.host.paths import path_of
from oocdl.planning.passes import Course
from oocdl.pytorch.door import load
from oocdl.report import notebook
from oocdl.report.history_view import frame, plot, told_of
from oocdl.report.plan_view import Plan
from oocdl.report.run_report import Report, read_report
from oocdl.report.tables import key_values
from oocdl.storage.files import reporting
from oocdl.storage.run.manifest import Manifest, TensorSpec
from oocdl.storage.run.run_store import RunStore
from oocdl.storage.run.safetensors_file import write_safetensors
from oocdl.storage.run.sealed_files import understood
from oocdl.training.job import plan_again
from oocdl.training.prediction.evaluation import evaluated, library_of, table_path
from oocdl.training.prediction.inference import Inference, model_of, model_path_of
from oocdl.training.prediction.outputs import predict as predict_runs
from oocdl.training.resume import ALL, given_plan, numerics_of, settings_of, spec_of
from oocdl.training.signature import public
from oocdl.training.versions import Weights, Which, kept_steps, version_of

OF_OTHERS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".npz", ".pb", ".tflite"})
"""Endings of formats of networks and weights that ``export`` does not write."""


@dataclass(eq=False)
class Run:
    """A run on disk, finished or not. Made by ``fit`` and ``open``.

    It reads what is committed, also while another process trains it. ``history`` has a dict for each step;
    ``weights`` and ``kept`` map names to read-only Zarr arrays. Raises StoreError if there is no run in
    ``path``, CorruptError if it is damaged.
    """

    path: Path
    made: Plan | None = field(default=None, repr=False)
    """The plan it was trained by, where this process trained it."""

    def __post_init__(self) -> None:
        self._store = RunStore.open(self.path)
        settings_of(self._store)
        with understood(self.path):
            _ = model_path_of(self._store), self.facts["accumulate"], self.finished

    @property
    def _meta(self) -> Mapping[str, Any]:
        """The metadata of the last commit."""
        manifest = self._store.current()
        return {"step": 0, "steps": 0, "due": None} if manifest is None else manifest.meta

    @property
    def steps(self) -> int:
        """Number of committed steps."""
        return int(self._meta["step"])

    @property
    def total_steps(self) -> int:
        """Steps that were asked for; 0 before the first commit."""
        return int(self._meta["steps"])

    @property
    def committed_at(self) -> float | None:
        """Time of the last commit, in seconds since 1970; None before the first."""
        return self._store.committed_at()

    @property
    def peak_bytes(self) -> int:
        """The most memory that a process had while it trained, by the kernel's count; 0 before a commit."""
        return max((int(row["process_bytes"]) for row in self.history), default=0)

    @property
    def settings(self) -> Settings:
        """The settings that it was trained with, all ``steps`` that were asked for among them."""
        found = settings_of(self._store, ALL)
        return replace(found, steps=self.total_steps or found.steps)

    @cached_property
    def plan(self) -> Plan:
        """The plan that it was trained by. That of a run that was opened is made again, by the same cuts.

        Then it takes a second or more, and needs the model's file and the dataset where they were.
        Raises what ``oocdl.plan`` raises; StoreError if the run has no plan, or another version made it.
        """
        if self.made is not None:
            return self.made
        frozen, source = given_plan("path", self.path), self._store.meta.get("source")
        settings = settings_of(self._store, ALL)
        spec = None if source is None else spec_of(source, settings.allow_missing_chunks)
        if spec is not None and spec.validation is not None:
            settings, spec = replace(settings, validation=spec.validation), replace(spec, validation=None)
        found = plan_again(model_of(self._store).path, spec, settings, frozen)
        if numerics_of(found.kinds) != frozen["numerics"]:
            raise StoreError(f"the plan of the run in {self.path} is of another version of oocdl")
        return found

    @property
    def facts(self) -> Mapping[str, Any]:
        """The run's settings as plain data: loss, optimizer, batch size and others."""
        return dict(self._store.meta["identity"])

    @property
    def model_name(self) -> str:
        """The path of its model."""
        return str(model_path_of(self._store))

    @property
    def finished(self) -> bool:
        """Whether all steps that were asked for are committed."""
        meta = self._meta
        return "due" not in meta and int(meta["step"]) >= int(meta["steps"])  # due: its last validation

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each committed step: step, epoch, loss, lr, seconds, and bytes moved and at the peak."""
        return list(self._store.history())

    def frame(self) -> Any:
        """Return the history as a ``pandas.DataFrame`` by step (``pip install 'oocdl[pandas]'``)."""
        return frame(self.history)

    def plot(self, path: str | Path) -> Path:
        """Draw losses, learning rate and seconds of each step, as PNG or SVG; returns the path.

        Raises InputError where matplotlib is missing (``pip install 'oocdl[plot]'``) or no step is committed.
        """
        return plot(self.history, f"{Path(self._store.meta['model']).name}, {self.path.name}", path)

    @property
    def weights(self) -> Mapping[str, zarr.Array[Any]]:
        """Committed weights by the model's initializer names, which in a file of a module are PyTorch's.

        After ``EarlyStopping`` with ``restore_best_weights`` they are those of the best validation.
        """
        return Weights(version_of(self._store), model_path_of(self._store))

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Steps whose versions ``ModelCheckpoint`` or ``EarlyStopping`` has kept, the best first."""
        return kept_steps(self._store)

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The history's row of the best version that is kept; None if there is none."""
        kept = self.checkpoints
        return next((row for row in self.history if kept and row["step"] == kept[0]), None)

    @property
    def kept(self) -> Mapping[str, zarr.Array[Any]]:
        """Activations and gradients of the last step that ``keep=`` named."""
        return self._store.kept()

    def report(self, page: str | Path | None = None) -> Report:
        """Return measured beside predicted times, layer by layer, of the last session.

        ``print(run.report())`` shows tables. With ``page``, such as "report.html", all pictures of the
        dashboard and these tables are written there as one HTML file, which needs no network. Raises
        StoreError before a full batch of the largest samples was measured, or if the page cannot be written.
        """
        found = read_report(self.path)
        if page is not None:
            page_process.write_report(self.path, path_of("page", page), found._repr_html_())
        return found

    @public
    def export(self, path: str | Path, which: Which = None) -> Path:
        """Write the model with its trained weights as an ONNX file; returns its path.

        A path that ends in ".safetensors" gets the weights alone. ``which`` is as in ``predict``. Raises
        InputError for the ending of another format, StoreError if no step is committed, if the model's file
        has changed since the run began, or if ``path`` cannot be written.
        """
        target = path_of("path", path)
        if target.suffix.lower() in OF_OTHERS:
            way = "'.onnx' or '.safetensors'; load_into puts the weights into a PyTorch module"
            raise InputError(f"export writes no {target.suffix} file: end the path in {way}")
        model, store = model_of(self._store), version_of(self._store, which)
        _, specs = self._committed(store)

        def blocks(name: str) -> Iterator[Array] | None:
            return _verified_blocks(store, specs[name]) if name in specs else None

        if target.suffix == ".safetensors":
            weights = {name: spec for name, spec in specs.items() if spec.kind == "weights"}
            with reporting(target):
                return write_safetensors(target, weights, lambda n: _verified_blocks(store, weights[n]))
        read, scale = self.facts["inputs"].values(), self.facts.get("scale") or {}
        scaled = {name: factor for name, factor in scale.items() if name in read}
        for done, asked in {"normalises": self.facts.get("normalize"), "scales": scaled}.items():
            if asked:
                text = f"the run {done} its inputs ({asked}), the exported file does not: give it such"
                warnings.warn(text, ModelWarning, stacklevel=4)
        with reporting(target):
            return export_onnx(model.path, target, blocks)

    @public
    def load_into(self, module: Any, which: Which = None) -> None:
        """Put the trained weights and running statistics into a ``torch.nn.Module``.

        The run is one of ``fit(module, ...)``, or of a file of ``from_torch``. Tensors go by PyTorch's names,
        in the module's dtype and on its device; ``num_batches_tracked`` grows as it would have there.
        Modes (``train()``, ``eval()``) and what the run did not train stay as they are. ``which`` is as in
        ``predict``. Raises StoreError if no step is committed; InputError, before anything is changed, if the
        module is another one, or the file is not of a module.
        """
        model, store = model_of(self._store), version_of(self._store, which)
        manifest, specs = self._committed(store)
        if model.metadata is None:
            text = f"{model.path} does not say what its weights are called in PyTorch; train a file of "
            raise InputError(f"{text}oocdl.from_torch, or read run.weights")
        shapes = {name: specs[name].shape for name in model.metadata.facts if name in specs}
        facts = self.facts
        samples = facts["dataset"][next(iter(facts["inputs"].values()))]["shape"][0]
        course = Course(samples, settings_of(self._store, ALL), labels=facts.get("sizes", ()))
        passes = course.passes_until(manifest.meta["step"])
        load(module, model.metadata, shapes, lambda name: _verified_blocks(store, specs[name]), passes)

    predict = predict_runs

    @public
    def evaluate(
        self,
        dataset: Any,
        *,
        memory: Size | None = None,
        batch_size: int = 1,
        inputs: Mapping[str, str] | None = None,
        targets: Mapping[str, str] | None = None,
        metrics: Metrics = (),
        per_sample: str | Path | None = None,
        spill: str | Path | None = None,
        which: Which = None,
    ) -> dict[str, Any]:
        """Return the mean loss of the trained model over a dataset, those of several heads, and metrics.

        The model runs as it predicts: with running statistics, without dropout. All values are floats, but
        that of "confusion": counts by true and predicted class, an int64 array [C, C].

        Parameters
        ----------
        dataset
            What the network is run over, with its targets, as in ``fit``.
        memory
            Memory budget of the process; default: that of the run.
        inputs
            Model input -> dataset array; default: as in the run.
        targets
            Model output -> dataset array that it is compared with; default: as in the run.
        metrics
            Metrics to compute too, by name or as objects of ``oocdl.metrics``: those of ``fit``, "confusion",
            and distances of surfaces, "hd95" and "asd", for which labels are kept in the spill meanwhile.
        per_sample
            Table with a row for each sample to write: a file that ends in .csv or .json.
        spill
            Folder for what does not fit, as in ``predict``.
        which
            The version, as in ``predict``.

        Raises
        ------
        What ``fit`` raises.
        """
        table, library, store = table_path(per_sample), library_of(metrics), version_of(self._store, which)
        inference = Inference([store], dataset, memory, batch_size, inputs, spill, True, targets, metrics)
        return evaluated(inference, library, table)

    def _committed(self, store: RunStore) -> tuple[Manifest, dict[str, TensorSpec]]:
        """Return the version of a store, and what it has by name. Raises StoreError if there is none."""
        manifest = store.current()
        if manifest is None:
            raise StoreError(f"run {self.path} has no committed step yet")
        return manifest, {tensor.spec.name: tensor.spec for tensor in manifest.tensors.values()}

    def _repr_html_(self) -> str:
        done, asked = self.steps, self.total_steps
        bar = notebook.bar(done / asked if asked else 0.0, f"{done} of {asked} steps")
        told = [("model", self._store.meta["model"]), *told_of(self.history)]
        return bar + notebook.page(key_values(f"run {self.path}", told))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, steps={self.steps}{'' if self.finished else ', unfinished'})"


def _verified_blocks(store: RunStore, spec: TensorSpec) -> Iterator[Array]:
    """Yield a committed array in C order, the rows of a chunk at a time, each verified as it is read."""
    if not spec.shape:
        yield store.read(spec.name, ())
    for start in range(0, spec.shape[0], spec.chunks[0]) if spec.shape else ():
        stop = min(start + spec.chunks[0], spec.shape[0])
        yield store.read(spec.name, ((start, stop), *whole(spec.shape[1:])))
