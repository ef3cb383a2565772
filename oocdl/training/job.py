"""What one call of ``fit`` or ``plan`` is about: a model, a dataset, settings, and the machine for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.config import Settings, make_settings
from oocdl.errors import BudgetError, InputError
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.host.heap import use_one_heap
from oocdl.host.paths import path_of
from oocdl.planning.binding import Binding, bind
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import Machine, machine_for
from oocdl.planning.passes import Course, compile_passes
from oocdl.report.plan_view import Plan
from oocdl.storage.dataset.dataset import Dataset, open_dataset
from oocdl.training import plan_cache
from oocdl.training.resume import freeze, numerics_of


@dataclass(frozen=True, eq=False)
class Job:
    """A model, a dataset and settings that belong together."""

    model: OnnxModel
    dataset: Dataset
    settings: Settings
    binding: Binding
    machine: Machine

    @property
    def course(self) -> Course:
        """All steps of the run."""
        return Course(self.binding.samples, self.settings)

    def plan(self, frozen: Mapping[str, Any] | None = None) -> Plan:
        """How the job runs: as ``frozen`` says, or as is best, which is looked up if it was found before."""
        if frozen is not None:
            kinds = self._compiled(frozen)
        else:
            kinds = self._found_before() if plan_cache.is_on() else self._compiled({})
        return Plan(kinds, self.settings, self.machine, self.model.path.name, self.dataset, self.course)

    def _compiled(self, frozen: Mapping[str, Any]) -> dict[str, CompiledPass]:
        return compile_passes(self.model, self.binding, self.settings, self.machine, self.course, frozen)

    def _found_before(self) -> dict[str, CompiledPass]:
        """The plan in the cache; else one that is searched for, and put there."""
        key = plan_cache.plan_key(self.model, self.binding, self.settings, self.machine)
        known = plan_cache.load(key, self.machine)
        if known is not None:
            try:
                kinds = self._compiled(known)
                self.machine.room_bytes(kind.plan for kind in kinds.values())
                if numerics_of(kinds) == known["numerics"]:
                    return kinds
            except (BudgetError, InputError):
                known = None  # it does not fit what this process has left: another is searched for
        kinds = self._compiled({})
        plan_cache.store(key, self.machine, freeze(kinds))
        return kinds


def job_of(model: str | Path, dataset: Any, options: Mapping[str, Any], crew: tuple[int, ...] = ()) -> Job:
    """Open a model and a dataset, and measure what the process may take.

    ``crew``: threads of a process and processes, of a cluster.
    """
    settings = make_settings(**options)
    use_one_heap()
    opened = inspect_onnx(path_of("model", model))
    data = open_dataset(dataset, settings.allow_missing_chunks)
    binding = bind(opened, data, settings)
    data = data.only(binding.used)
    return Job(opened, data, settings, binding, machine_for(settings, data, *crew))
