"""A job, which a call of ``fit`` or ``plan`` makes: a model or module, a dataset, settings and a machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from oocdl.augmentation.crop import crop_of
from oocdl.augmentation.preparation import Preparation
from oocdl.config import OPTIONS, Settings
from oocdl.errors import InputError, StoreError
from oocdl.graph.onnx.onnx_file import network_differences
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.host.heap import use_one_heap
from oocdl.host.limits import anonymous_bytes, cores
from oocdl.host.paths import path_of
from oocdl.ops.param_groups import lasting_groups, step_scalars
from oocdl.ops.schedules import lasting
from oocdl.planning.binding import Binding, bind
from oocdl.planning.choice.pass_kinds import compile_passes
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import Crew, Machine, machine_for
from oocdl.planning.passes import MAIN, Course
from oocdl.planning.sample_sizes import Sized, cropped, sized
from oocdl.pytorch.door import from_dataset
from oocdl.report.plan_view import Plan
from oocdl.storage.dataset.dataset import Dataset, DatasetSpec, open_dataset
from oocdl.storage.dataset.sample_stack import members_of
from oocdl.storage.files import make_writable
from oocdl.storage.run.pointer import EXPORT_FOLDERS, MODULE_FILES
from oocdl.storage.run.sealed_files import read_sealed
from oocdl.training import plan_cache
from oocdl.training.call import Call
from oocdl.training.preparing import preparation_of
from oocdl.training.resume import ANEW

Muster = Callable[[], tuple[Crew, int]]


@dataclass(frozen=True, eq=False)
class Job:
    """A model, a dataset and settings that belong together."""

    model: OnnxModel
    dataset: Dataset
    settings: Settings
    sized: Sized
    machine: Machine
    course: Course
    validation: Sized | None = None
    preparation: Preparation = field(default_factory=Preparation)
    """What is done to samples before the network reads them; its tables are not measured yet."""

    @property
    def binding(self) -> Binding:
        return self.sized.bindings[""]

    @property
    def validation_binding(self) -> Binding | None:
        return None if self.validation is None else self.validation.bindings[""]

    def plan(self, frozen: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan: by the cuts in ``frozen``, else the best, from the cache if it is there."""
        if frozen is None and os.environ.get(plan_cache.VARIABLE) != "off":
            facts = self.settings, self.machine, self.course, self.validation_binding
            key = plan_cache.plan_key(self.model, self.binding, *facts)
            kinds = plan_cache.cached_passes(key, self.machine, self._compiled)
        else:
            kinds = self._compiled(frozen or {})
        machine = replace(self.machine, together=next(iter(kinds.values())).plan.threads)
        return Plan(kinds, self.settings, machine, self.model.path.name, self.dataset, self.course)

    def _compiled(self, frozen: Mapping[str, Any]) -> dict[str, CompiledPass]:
        validations = (self.validation or self.sized).bindings
        trained = {"": self.sized.crops} if self.sized.crops else self.sized.bindings
        how = self.settings, self.machine, self.course, frozen
        return compile_passes(self.model, trained, *how, validations)


def job_of(model: str | Path, dataset: Any, settings: Settings, muster: Muster | None = None) -> Job:
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
    seen = crop_of(settings.augment) is None or settings.held_out is not None
    sizes = sized(opened, data, binding, settings, course.trained, whole=seen)
    sizes = cropped(opened, sizes, settings, course.trained)
    data, course = sizes.dataset, replace(course, labels=sizes.labels)
    if settings.validation is not None and settings.held_out is None:
        further = open_dataset(settings.validation, settings.allow_missing_chunks)
        found = bind(opened, further, replace(settings, batch_size=1))
        how, least = (found, settings, range(found.samples)), sizes.multiple
        validation = sized(opened, further.only(found.used), *how, least=least)
        data, validation = data.with_validation(validation.dataset), validation.apart()
        course = replace(course, further_samples=found.samples, further_labels=validation.labels)
    for name in (one.name for one in settings.metrics if not one.of_runs):
        raise InputError(f"'{name}' is no metric of validations; pass it to Run.evaluate(metrics=)")
    has_groups = course.further_labels or any(map(members_of, binding.arrays.values()))
    if settings.pad_to_multiple_of and not has_groups:
        what = "samples that have a group each, and these are stacked"
        raise InputError(f"pad_to_multiple_of is for {what}: leave it out")
    for name in ("metrics", "validation_steps", "validation_freq"):
        if getattr(settings, name) != OPTIONS[name].default and not course.validated:
            raise InputError(f"{name} is of a validation; pass validation=, a dataset or a share of this one")
    if settings.batch_size > (most := len(course.trained)):
        text = f"batch_size must be 1...{most} (samples that are trained on), got {settings.batch_size}"
        raise InputError(text)
    preparation = preparation_of(opened, sizes, settings, validation)
    rate = lasting(settings.optimizer.lr, course.total_steps)
    groups = lasting_groups(settings.param_groups, course.total_steps)
    settings = replace(settings, optimizer=replace(settings.optimizer, lr=rate), param_groups=groups)
    step_scalars(settings.optimizer, groups, None, 0)  # a rate that is no number is refused here
    crew = None
    if muster is not None:
        data.spec.check_sent()
        crew, budget_bytes = muster()
        settings = replace(settings, memory_bytes=budget_bytes)
    machine = machine_for(settings, data, crew=crew, preparing_bytes=preparation.nbytes)
    course = replace(course, settings=settings)
    return Job(opened, data, settings, sizes, machine, course, validation, preparation)


def plan_again(
    model: Path, source: DatasetSpec | None, settings: Settings, frozen: Mapping[str, Any]
) -> Plan:
    """Plan a run again by its cuts, for as many processes as it had. Raises what ``fit`` raises."""
    if source is None:
        raise InputError("the run was trained on a store that was open; oocdl.plan(model, store) plans anew")
    workers = int(frozen[MAIN].get("workers", 0))
    crew = Crew(settings.threads or cores(), workers, workers, anonymous_bytes())
    muster = (lambda: (crew, settings.memory_bytes)) if workers else None
    return job_of(model, source, settings, muster).plan(frozen)


def is_module(model: Any) -> bool:
    """Whether ``model`` is a ``torch.nn.Module``; does not import PyTorch, which a thread may be at."""
    kind = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return kind is not None and isinstance(model, kind)


@contextmanager
def planned_file(
    model: Any, dataset: Any, settings: Settings, dynamic: Any = None, verify: bool = True
) -> Iterator[tuple[Any, Any]]:
    """Give ``model`` and ``dataset``; of a module, a file until the block ends, and the open dataset."""
    if not is_module(model):
        yield model, dataset
        return
    with tempfile.TemporaryDirectory(prefix="oocdl-") as folder:
        path = Path(folder) / f"{type(model).__name__}.onnx"
        yield path, from_dataset(model, dataset, settings, path, dynamic, verify)


@contextmanager
def trained_file(
    model: Any, dataset: Any, settings: Settings, call: Call
) -> Iterator[tuple[Any, Path | None, Any]]:
    """Give model, run directory and dataset; of a module, a file in it: the run's own if it is there."""
    if not is_module(model):
        yield model, call.workdir, dataset
        return
    folder = (call.workdir or Path(f"{type(model).__name__}.run")).absolute()
    made = not folder.exists()
    make_writable(folder)
    new = folder / MODULE_FILES.replace("*", token_hex(4))
    try:
        if call.resume is False and _file_of(folder) is not None:
            raise StoreError(f"a run is in {folder} already; pass resume=True to go on, or resume='restart'")
        data = from_dataset(model, dataset, settings, new, call.dynamic, call.verify)
        old = _file_of(folder) if call.resume is True else None
        if old is not None:
            way_out = (
                ANEW if model.training else f"call its train(), if the run began in training mode, or {ANEW}"
            )
            check_same(old, new, f"the run in {folder}", way_out)
        yield old or new, folder, data
    finally:
        used = _file_of(folder)
        for file in folder.glob(f"{MODULE_FILES}*"):
            named = used is not None and file.name.startswith(used.name)
            if not named and (used == new or file.name.startswith(new.name)):
                file.unlink(missing_ok=True)
        for left in folder.glob(EXPORT_FOLDERS) if used == new else ():
            shutil.rmtree(left, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _file_of(folder: Path) -> Path | None:
    found = read_sealed(folder / "run.json")
    return None if found is None else folder / str(found[0]["model"])


def check_same(old: Path, new: Path, what: str, way_out: str) -> None:
    """Raise InputError if a module is another network than the one that something was begun with."""
    found = network_differences(inspect_onnx(old), inspect_onnx(new))
    if found:
        raise InputError(f"{what} is of another network: {found}; {way_out}")
