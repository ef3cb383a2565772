"""What one call of ``fit`` or ``plan`` is about: a model, a dataset, settings, and the machine for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.config import Settings, make_settings
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.host.heap import use_one_heap
from oocdl.host.paths import path_of
from oocdl.planning.binding import Binding, bind
from oocdl.planning.machine import Machine, machine_for
from oocdl.planning.passes import Course, compile_passes
from oocdl.report.plan_view import Plan
from oocdl.storage.dataset.dataset import Dataset, open_dataset


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
        """How the job runs: as ``frozen`` says, or as is best."""
        course = self.course
        kinds = compile_passes(self.model, self.binding, self.settings, self.machine, course, frozen or {})
        return Plan(kinds, self.settings, self.machine, self.model.path.name, self.dataset, course)


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
