"""Forward passes of a run's model over a dataset, within a budget, for ``predict`` and ``evaluate``."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings, make_settings
from oocdl.config.options import Metrics, Size
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.heap import use_one_heap
from oocdl.host.limits import check_budget
from oocdl.planning.binding import Binding, bind
from oocdl.planning.choice.pass_kinds import draft_alike
from oocdl.planning.compiler import CompiledPass, draft_pass
from oocdl.planning.machine import Machine, check_device, machine_for
from oocdl.planning.passes import Course
from oocdl.planning.recipe import PassKind, Request
from oocdl.planning.sample_sizes import sized
from oocdl.runtime.session import Session
from oocdl.storage.dataset.dataset import Dataset, open_dataset
from oocdl.storage.dataset.sample_stack import own_sized, samples_of
from oocdl.storage.files import existing, make_private
from oocdl.storage.run.run_store import RunStore
from oocdl.training.metric_values import Gathered, Measured, fold
from oocdl.training.prediction.predictions import Predictions, warn_of_predictions
from oocdl.training.preparing import measured, preparation_of, with_numbers_of
from oocdl.training.resume import identity, same_operators
from oocdl.training.signals import Signals


@dataclass(frozen=True, eq=False)
class Trained:
    """A run whose weights are read."""

    path: Path
    store: RunStore
    settings: Settings
    """Settings that it was trained with."""
    model: Callable[[], OnnxModel]
    """Opens its model. Raises StoreError if that has changed."""


class Inference:
    """Forward passes over a dataset, within a budget."""

    def __init__(
        self,
        trained: Trained,
        dataset: Any,
        memory: Size | None,
        batch_size: int,
        inputs: Mapping[str, str] | None,
        spill: str | Path | None,
        with_targets: bool = False,
        targets: Mapping[str, str] | None = None,
        metrics: Metrics = (),
    ) -> None:
        stored = trained.settings
        given = {"inputs": inputs, "targets": targets, "memory": memory, "spill": spill, "metrics": metrics}
        checked = make_settings(batch_size=batch_size, **given)
        kept = {"inputs": inputs, "targets": targets, "memory_bytes": memory}
        # Where the run's owner spilled is nothing to the caller.
        names = ["batch_size", "spill", "metrics", *(name for name in kept if kept[name] is not None)]
        changes = {name: getattr(checked, name) for name in names}
        use_one_heap()
        self.trained, self.settings = trained, replace(stored, scale=None, **changes)
        self.dataset: Dataset = open_dataset(dataset, stored.allow_missing_chunks)
        model = self.model = trained.model()
        same_operators(trained.path, trained.store.meta["identity"], digests(model.nodes))
        self.binding: Binding = bind(model, self.dataset, self.settings, with_targets=with_targets)
        facts, whole = trained.store.meta["identity"], range(self.binding.samples)
        used = self.dataset.only(self.binding.used)
        least, alike = facts.get("multiple", ()), _outputs_like_inputs(model, facts)
        self.sized = sized(model, used, self.binding, self.settings, whole, least=least, alike=alike)
        self.dataset, self.binding = self.sized.dataset, self.sized.bindings[""]
        self.preparation = self._preparation(facts, stored)
        check_budget(self.settings.memory_bytes)
        self.machine: Machine = machine_for(
            self.settings, self.dataset, preparing_bytes=self.preparation.nbytes
        )
        settings = replace(self.settings, validation=None)
        self.course = Course(0, settings, self.binding.samples, further_labels=self.sized.labels)
        self.kinds = self.course.validation_kinds
        self.image = self.dataset.arrays[next(iter(self.binding.inputs.values()))]
        self.samples = samples_of(self.image)
        """Name of each sample that is a group -> its attributes."""
        limits = self.machine.limits(self.settings, self.machine.unit_bytes)
        self.compiled: dict[str, CompiledPass] = {}
        for plan_id, kind in self.kinds.items():
            request = Request(
                model=model,
                binding=self.sized.bindings[kind.label],
                settings=self.settings,
                batch=kind.batch,
                kind=PassKind.FORWARD,
            )
            others = list(self.compiled.values())
            draft = draft_alike(request, others[0]) if others else draft_pass(request)
            self.compiled[plan_id] = draft.cut(limits)
            check_device(self.compiled[plan_id].plan, self.machine)
        self.first = next(iter(self.compiled.values()))
        warn_of_predictions(self.first.plan.factored.graph, model)

    def extents(self, row: int) -> tuple[int, ...]:
        """Return the spatial extents of a sample, of which there may be none."""
        axes = max(len(port.dims) for port in self.model.inputs) - 2
        return own_sized(self.image, row).shape[-axes:] if axes > 0 else ()

    def _preparation(self, identity: Mapping[str, Any], trained: Settings) -> Preparation:
        """Return what is done to samples of this dataset: what is done to those of each input in training."""
        arrays = {array: identity["inputs"][name] for name, array in self.binding.inputs.items()}
        heads = {
            target.array: identity["loss"][target.output]["target"]
            for target in self.binding.targets
            if target.output in identity["loss"]
        }
        factors, asked = trained.scale or {}, trained.normalize
        pairs = [*arrays.items(), *heads.items()]
        scale = {now: factors[then] for now, then in pairs if then in factors}
        if isinstance(asked, Mapping):
            asked = {now: asked[then] for now, then in arrays.items() if then in asked}
        made = preparation_of(self.model, self.sized, replace(self.settings, scale=scale, normalize=asked))
        return with_numbers_of(made, self.trained.store, arrays)

    def facts(self) -> dict[str, Any]:
        """Return what predictions depend on, as plain data."""
        manifest = self.trained.store.current()
        version = "" if manifest is None else hashlib.sha256(manifest.dumps().encode()).hexdigest()
        plans = {name: compiled.plan.numerics() for name, compiled in self.compiled.items()}
        return {
            "version": version,
            **({"instead": dict(self.trained.store.instead)} if self.trained.store.instead else {}),
            "numerics": plans,
            "scale": self.preparation.scale,
            **identity(self.model, self.binding, self.settings),
        }

    def spill(self) -> Path:
        """Return the folder of the spill: a run that cannot be written is read all the same."""
        inside = self.trained.path / "spill"
        if os.access(existing(inside), os.W_OK) and not inside.is_symlink():
            return self.settings.spill_folder(inside)
        other = Path(tempfile.gettempdir()) / f"oocdl-spill-{os.geteuid()}"
        folder = self.settings.spill_folder(other)
        if folder == other:
            make_private(other)
            text = f"the run in {self.trained.path} cannot be written; spilling to {other}"
            warnings.warn(text, stacklevel=5)
        return folder

    def run(self, deliver: Any = None, made: Predictions | None = None) -> list[Measured]:
        """Run all batches in dataset order; returns the losses of each, and the sums of its metrics.

        Batches whose samples are all in ``made`` are left out.
        """
        passes = () if deliver is None else self.compiled.values()
        watched = frozenset(c.plan.factored.stored(name) for c in passes for name in c.outputs.values())
        gathered, results = Gathered(self.compiled), list[Measured]()
        watched |= gathered.watched
        done = set() if made is None else made.done
        signals, spill = Signals(), self.spill()

        def take(*piece: Any) -> None:
            gathered.deliver(*piece)
            if deliver is not None:
                deliver(*piece)

        taker, prepared = take if watched else None, measured(self.preparation, self.dataset)
        session = Session(self.compiled, self.dataset, prepared, self.machine, spill, taker, watched)
        with signals, session:
            session.load(next(iter(self.compiled)), self.trained.store.read)
            for plan_id, info in self.course.validation_passes:
                if done.issuperset(info.indices):
                    continue
                with signals.allowed():
                    results.append(gathered.run(session, plan_id, info))
                if made is not None:
                    made.note(info.indices)
                if len(results) > 1:
                    fold(results[0].sums, results[-1].sums)
        return results


def _outputs_like_inputs(model: OnnxModel, identity: Mapping[str, Any]) -> set[str]:
    """Return the outputs that a run has trained on targets with the extents of its inputs.

    Of outputs with one target the first counts: the others may be smaller (``DeepSupervision``).
    """
    arrays, axes = identity["dataset"], max(len(port.dims) for port in model.inputs) - 2
    shapes = [arrays[name]["shape"] for name in identity["inputs"].values()]
    if axes < 1:
        return set()
    heads = [port.name for port in model.outputs if port.name in identity["loss"]]
    first = {identity["loss"][output]["target"]: output for output in reversed(heads)}
    return {
        output
        for target, output in first.items()
        if any(arrays[target]["shape"][-axes:] == shape[-axes:] for shape in shapes)
    }
