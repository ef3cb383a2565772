"""One trial in one rung: trains its run on to the rung's total of steps, and measures it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oocdl import errors
from oocdl.errors import InputError, ModelWarning, NonFiniteError, StoreError
from oocdl.events import Event, RunStarted, StepDone
from oocdl.storage.dataset.data_array import one_line
from oocdl.storage.run.run_store import RunStore
from oocdl.training.prediction.evaluation import evaluated
from oocdl.training.prediction.inference import Inference
from oocdl.training.run import Run
from oocdl.training.trainer import fit
from oocdl.training.versions import version_of

IN_USE_SECONDS = 600.0
"""Maximum seconds to wait for a process that still writes the run: one that was given up on ends a step."""
LOOK_SECONDS = 0.5

Metric = str | Callable[[Run], float]


@dataclass(frozen=True)
class Measure:
    """The measure by which trials are compared."""

    metric: Metric
    validation: Any
    """Argument of ``open_dataset``; None: the losses of training count."""
    last_steps: int
    samples: int = 0


@dataclass(frozen=True)
class Task:
    """All that a process needs to know of a trial in a rung."""

    trial: int
    rung: int
    steps: int
    run: Path
    model: Path
    dataset: Any
    options: Mapping[str, Any]
    measure: Measure


@dataclass(frozen=True)
class Result:
    """The outcome of a trial in a rung."""

    trial: int
    rung: int
    steps: int
    """Total of steps that the rung trains to; of a trial that has failed, those that its run has."""
    metric: float | None = None
    error: str | None = None
    final: bool = True
    """Whether it would be the same again; an error of the surroundings, such as a full disk, is not final."""
    seconds: float = 0.0
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()
    """Notes on the dataset for the user, as in ``RunStarted``."""
    remarks: tuple[str, ...] = ()


class Unwanted(Exception):
    """Nobody waits for this trial here any more; what is done is committed."""


def run_trial(task: Task, check: Callable[[], None] = lambda: None) -> Result:
    """Train and measure; an error is a result, too. ``check`` stops the trial between steps: it raises."""
    result = Result(task.trial, task.rung, task.steps)
    said: dict[str, Any] = {}

    def listen(event: Event) -> None:
        if isinstance(event, RunStarted):
            said["notes"] = event.notes
            said["remarks"] = tuple(f"{remark.text}: {remark.cure}" for remark in event.plan.trained.remarks)
        elif isinstance(event, StepDone):
            check()

    try:
        run = _trained(task, listen, check)
        result = replace(result, metric=_measured(task, run), **_spent(run, task.steps))
    except Unwanted:
        raise
    except Exception as error:  # a full disk, a refused budget, a metric of the user's: another try may do
        check()  # that another process has its run is no error of a trial that was given up
        final = isinstance(error, NonFiniteError | InputError) and not isinstance(error, errors.DatasetError)
        result = failure(task, one_line(error), final=final)
    return replace(result, **said)


def failure(task: Task, error: str, *, final: bool = False) -> Result:
    """Return the outcome of a trial that has failed, with the steps that its run has."""
    try:
        run = Run(task.run)
        steps, spent = run.steps, _spent(run, run.steps)
    except (errors.OocdlError, OSError):  # it has not begun, or cannot be read
        steps, spent = 0, {}
    return Result(task.trial, task.rung, steps, error=error, final=final, **spent)


def _spent(run: Run, steps: int) -> dict[str, Any]:
    rows = [row for row in run.history if row["step"] <= steps]
    peak_bytes = max((row["process_bytes"] for row in rows), default=0)
    return {"seconds": sum(row["seconds"] for row in rows), "peak_bytes": peak_bytes}


def _trained(task: Task, listen: Callable[[Event], None], check: Callable[[], None]) -> Run:
    """The run of the trial, trained on; waits for a process that still writes it."""
    until = time.monotonic() + IN_USE_SECONDS
    given = {**task.options, "workdir": task.run, "steps": task.steps, "callbacks": [listen]}
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ModelWarning)  # it is among the remarks, for all trials once
                return fit(task.model, task.dataset, **given, progress=False)
        except errors.InUseError:
            if time.monotonic() > until:
                raise
        check()
        time.sleep(LOOK_SECONDS)


def _measured(task: Task, run: Run) -> float:
    measure, metric = task.measure, task.measure.metric
    if run.steps > task.steps and (callable(metric) or measure.validation is not None):
        raise StoreError(
            f"the run in {task.run} has {run.steps} steps, and its metric after {task.steps} is lost; delete "
            "its folder to have it trained again"
        )
    if callable(metric):
        value = float(metric(run))
    elif measure.validation is not None:
        given: dict[str, Any] = {name: task.options.get(name) for name in ("memory", "spill", "threads")}
        given["batch_size"] = min(task.options.get("batch_size", 1), measure.samples)
        stores = [version_of(RunStore.open(task.run))]
        inference = Inference(stores, measure.validation, inputs=None, with_targets=True, **given)
        value = evaluated(inference, None, None)[metric]
    else:
        rows = [row for row in run.history if row["step"] <= task.steps][-measure.last_steps :]
        value = sum(row[metric] for row in rows) / len(rows)
    if not math.isfinite(value):
        raise NonFiniteError(f"the metric after {task.steps} steps is {value}")
    return value
