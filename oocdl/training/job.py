"""A job, which one call of ``fit`` or ``plan`` makes: a model, a dataset, settings and a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.host.heap import use_one_heap
from oocdl.host.limits import anonymous_bytes, cores
from oocdl.host.paths import path_of
from oocdl.ops.param_groups import lasting_groups
from oocdl.ops.schedules import lasting
from oocdl.planning.binding import Binding, bind
from oocdl.planning.choice.pass_kinds import compile_passes
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import Crew, Machine, machine_for
from oocdl.planning.passes import MAIN, Course
from oocdl.planning.sample_sizes import Sized, sized
from oocdl.report.plan_view import Plan
from oocdl.storage.dataset.dataset import Dataset, DatasetSpec, open_dataset
from oocdl.training import plan_cache
from oocdl.training.preparing import preparation_of


@dataclass(frozen=True, eq=False)
class Job:
    """A model, a dataset and settings that belong together."""

    model: OnnxModel
    dataset: Dataset
    settings: Settings
    sized: Sized
    """The dataset in views of one size each, with their bindings."""
    machine: Machine
    course: Course
    """All steps of the run."""
    validation: Sized | None = None
    """The validation dataset; None if there is none of its own."""
    preparation: Preparation = field(default_factory=Preparation)
    """What is done to samples before the network reads them; its tables are not measured yet."""

    @property
    def binding(self) -> Binding:
        """The binding to samples of the main size."""
        return self.sized.bindings[""]

    @property
    def validation_binding(self) -> Binding | None:
        """The binding to samples of the validation dataset's main size."""
        return None if self.validation is None else self.validation.bindings[""]

    def plan(self, frozen: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan: by the cuts in ``frozen``, else the best, from the cache if it is there."""
        if frozen is None and plan_cache.is_on():
            key = plan_cache.plan_key(
                self.model, self.binding, self.settings, self.machine, self.course, self.validation_binding
            )
            kinds = plan_cache.cached_passes(key, self.machine, self._compiled)
        else:
            kinds = self._compiled(frozen or {})
        return Plan(kinds, self.settings, self.machine, self.model.path.name, self.dataset, self.course)

    def _compiled(self, frozen: Mapping[str, Any]) -> dict[str, CompiledPass]:
        bindings = self.sized.bindings
        validations = bindings if self.validation is None else self.validation.bindings
        how = self.settings, self.machine, self.course, frozen
        return compile_passes(self.model, bindings, *how, validations)


def job_of(
    model: str | Path,
    dataset: Any,
    settings: Settings,
    muster: Callable[[], tuple[Crew, int]] | None = None,
) -> Job:
    """Open a model and a dataset, and measure what this process may take.

    ``muster`` gives a crew that works in its place, each with its own budget in bytes; it is called last, as
    to wait for workers may take a day. Raises what ``fit`` raises where things do not go together.
    """
    use_one_heap()
    opened = inspect_onnx(path_of("model", model))
    data = open_dataset(dataset, settings.allow_missing_chunks)
    binding = bind(opened, data, settings)
    data, validation = data.only(binding.used), None
    course = Course(binding.samples, settings)
    sizes = sized(opened, data, binding, settings, course.trained)
    data, course = sizes.dataset, replace(course, labels=sizes.labels)
    if settings.validation is not None and settings.held_out is None:
        further = open_dataset(settings.validation, settings.allow_missing_chunks)
        found = bind(opened, further, replace(settings, batch_size=1))
        further = further.only(found.used)
        whole, least = range(found.samples), sizes.multiple
        validation = sized(opened, further, found, settings, whole, least=least)
        data, validation = data.with_validation(validation.dataset), validation.apart()
        course = replace(course, further_samples=found.samples, further_labels=validation.labels)
    for metric in settings.metrics:
        if not metric.of_runs:
            raise InputError(
                f"'{metric.name}' is no metric of validations; pass it to Run.evaluate(metrics=)"
            )
    if settings.pad_to_multiple_of and not (course.labels or course.further_labels):
        raise InputError(
            "pad_to_multiple_of is for samples that have a group each, and these are stacked: leave it out"
        )
    if settings.metrics and not course.validated:
        raise InputError(
            "metrics are those of a validation; pass validation=, a dataset or a share of this one"
        )
    if settings.batch_size > len(course.trained):
        raise InputError(
            f"batch_size must be 1...{len(course.trained)} (samples that are trained on), "
            f"got {settings.batch_size}"
        )
    preparation = preparation_of(opened, sizes, settings, validation)
    rate = lasting(settings.optimizer.lr, course.total_steps)
    groups = lasting_groups(settings.param_groups, course.total_steps)
    settings = replace(settings, optimizer=replace(settings.optimizer, lr=rate), param_groups=groups)
    crew = None
    if muster is not None:
        data.spec().check_sent()
        crew, budget_bytes = muster()
        settings = replace(settings, memory_bytes=budget_bytes)
    machine = machine_for(settings, data, crew=crew, preparing_bytes=preparation.nbytes)
    course = replace(course, settings=settings)
    return Job(opened, data, settings, sizes, machine, course, validation, preparation)


def plan_again(
    model: Path, source: DatasetSpec | None, settings: Settings, frozen: Mapping[str, Any]
) -> Plan:
    """Make the plan of a run again: by its cuts, for as many processes as it had.

    Raises InputError where the dataset had no name, and what ``fit`` raises for a model or a dataset.
    """
    if source is None:
        raise InputError("the run was trained on a store that was open; oocdl.plan(model, store) plans anew")
    workers = int(frozen[MAIN].get("workers", 0))
    crew = Crew(settings.threads or cores(), workers, workers, anonymous_bytes())
    muster = (lambda: (crew, settings.memory_bytes)) if workers else None
    return job_of(model, source, settings, muster).plan(frozen)
