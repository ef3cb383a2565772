"""Walks through a search: trains what is left to train, and tells Optuna what has become of it."""

from __future__ import annotations

import shutil
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from oocdl.config import make_settings
from oocdl.errors import InputError, ModelWarning, StoreError
from oocdl.events import Notice, SearchEvent, SearchListener, TrialDone
from oocdl.host.limits import default_budget_bytes
from oocdl.host.paths import path_of
from oocdl.runtime.cluster.connecting import connected
from oocdl.storage.files import reporting
from oocdl.storage.run.lock import RunLock
from oocdl.training.job import check_same, is_module, planned_file
from oocdl.training.resume import refuse_if
from oocdl.tuning.asked import SEARCH_FILE, Asked, Data, opened, picked
from oocdl.tuning.search_study import STATES, SearchStudy
from oocdl.tuning.trial import Measure, Result, Task, run_trial
from oocdl.tuning.trial_workers import Workers

OURS = ("LOCK", "model")
"""Names in the folder of a search before it is one."""


@dataclass(eq=False)
class Said:
    """Tells listeners what happens, and what is wrong with the model once for all trials."""

    listeners: Sequence[SearchListener]
    warns: bool
    """Whether remarks are warnings, as nobody else shows them."""
    said: set[str] = field(default_factory=set)

    def emit(self, event: SearchEvent) -> None:
        for listener in self.listeners:
            listener(event)

    def note(self, text: str) -> None:
        self.emit(Notice(text))

    def result(self, result: Result) -> None:
        """Tell notes and remarks that no trial before has had."""
        for text in dict.fromkeys((*result.notes, *result.remarks)):
            if text not in self.said:
                self.said.add(text)
                self.note(text)
                if self.warns and text in result.remarks:
                    warnings.warn(text, ModelWarning, stacklevel=6)


class ThisProcess:
    """Trains one trial after the other, here."""

    def hire(self, memory_bytes: int | None) -> tuple[int, int | None]:
        """Return the bytes and the compute threads (None: one for each core) that a trial may have."""
        return memory_bytes or default_budget_bytes(), None

    def run(self, queue: deque[Task]) -> Iterator[Result]:
        while queue:
            yield run_trial(queue.popleft())


Crew = ThisProcess | Workers


def run_search(
    asked: Asked, model: Any, dataset: Any, folder: Path, client: Any, wait_seconds: float, say: Said
) -> None:
    """Train all trials of a search that are left to train. Raises what ``search`` does."""
    with _locked(folder):
        data = opened(asked, _model_file(model, dataset, asked, folder), dataset)
        with _crew(client, data, folder, say, wait_seconds) as crew:
            study, share = _begun(folder, asked, data, crew)
            task_of = partial(_task, asked, data, study, share)
            queue = deque(task_of(*trial) for trial in study.unfinished() or study.ask())
            training = {task.trial for task in queue}
            for result in crew.run(queue):
                say.result(result)
                if study.tell(result):
                    queue.appendleft(task_of(result.trial, result.rung + 1))
                else:
                    training.remove(result.trial)
                rows = {row["trial"]: row for row in study.rows()}
                ended = sum(row["state"] in STATES.values() for row in rows.values())
                say.emit(TrialDone(rows[result.trial], ended, asked.trials))
                if not training:
                    queue.extend(task_of(*trial) for trial in study.ask())
                    training.update(task.trial for task in queue)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is one of a search, or is new. Raises StoreError for any other."""
    is_new, is_search = not folder.exists(), (folder / SEARCH_FILE).is_file()
    others = not is_search and any(path.name not in OURS for path in folder.glob("*"))
    if others or not (is_new or folder.is_dir()):
        raise StoreError(f"{folder} is not empty and no search; choose another workdir")
    with reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder / "LOCK")
    try:
        yield
    finally:
        if not (folder / SEARCH_FILE).exists():  # refused: as it was before
            shutil.rmtree(folder / "model", ignore_errors=True)
            (folder / "LOCK").unlink(missing_ok=True)
            with suppress(OSError):  # another process has come into it
                if is_new:
                    folder.rmdir()
        lock.release()


def _model_file(model: Any, dataset: Any, asked: Asked, folder: Path) -> Path:
    if not is_module(model):
        return path_of("model", model).absolute()
    kept = folder / "model" / f"{type(model).__name__}.onnx"
    settings = make_settings(**asked.options)
    with planned_file(model, dataset, settings) as (new, _), reporting(folder):
        if (folder / SEARCH_FILE).is_file() and kept.is_file():
            check_same(kept, new, f"the search in {folder}", "choose another workdir")
        else:
            shutil.rmtree(kept.parent, ignore_errors=True)
            shutil.copytree(new.parent, kept.parent)
    return kept


@contextmanager
def _crew(client: Any, data: Data, folder: Path, say: Said, wait_seconds: float) -> Iterator[Crew]:
    if client is None:
        yield ThisProcess()
        return
    files = [data.model, folder]
    for spec in (one.spec for one in (data.dataset, data.validation) if one is not None):
        spec.check_sent()
        files += [Path(spec.source)] if isinstance(spec.source, str) and "://" not in spec.source else []
    with connected(client) as connection:
        yield Workers(connection, files, say.note, wait_seconds)


def _begun(folder: Path, asked: Asked, data: Data, crew: Crew) -> tuple[SearchStudy, tuple[int, int | None]]:
    """Open the study, a new one or one of the same search; returns the bytes and threads of a trial, too."""
    study, facts = SearchStudy(folder, asked), {**asked.facts(), **data.facts()}
    if study.facts:
        changed = [*data.changed(study.facts, facts)]
        refuse_if(f"the search in {folder} was started differently", changed, "choose another workdir")
        if asked.trials < (count := len(study.trials)):
            raise InputError(f"the search in {folder} has {count} trials; it goes on with as many or more")
    given = make_settings(**{name: asked.options.get(name) for name in ("memory", "threads")})
    before_bytes, before_threads = study.share
    is_given = asked.options.get("memory") is not None
    memory_bytes, threads = crew.hire(given.memory_bytes if is_given else before_bytes)
    share = memory_bytes, given.threads or before_threads or threads
    study.begin(facts, share)
    return study, share


def _task(
    asked: Asked, data: Data, study: SearchStudy, share: tuple[int, int | None], number: int, rung: int
) -> Task:
    values, measure = picked(asked.space, study.trials[number].params), asked.measure
    asked.check_schedule(data, values)
    held_out = data.validation and data.validation.spec
    steps, run, source = asked.total_steps(data, values, rung), study.run_of(number), data.dataset.spec
    options = {**asked.fit_options(values), "memory": share[0], "threads": share[1]}
    compared = Measure(measure.metric, held_out, measure.last_steps, data.held_out)
    return Task(number, rung, steps, run, data.model, source, options, compared)
