"""One trial in one rung: trains its run on to the rung's total of steps, measures it, writes the result."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oocdl.errors import DatasetError, InputError, InUseError, ModelWarning, NonFiniteError, StoreError
from oocdl.events import Event, RunStarted, StepDone
from oocdl.training.run import Run
from oocdl.training.trainer import fit
from oocdl.tuning.halving import Result
from oocdl.tuning.search_record import write_result

IN_USE_SECONDS = 600.0
"""So long a trial waits for a process that still writes its run: one that was given up on ends a step."""
LOOK_SECONDS = 0.5

Metric = str | Callable[[Run], float]


@dataclass(frozen=True)
class Measure:
    """By what trials are compared."""

    metric: Metric
    validation: Any
    """What ``open_dataset`` takes; None: the losses of training count."""
    last_steps: int


@dataclass(frozen=True)
class Task:
    """All that a process needs to know of a trial in a rung."""

    trial: int
    rung: int
    steps: int
    """Total of steps that the rung trains to."""
    steps_before: int
    """Total of the rung before it."""
    folder: Path
    """Folder of the search."""
    run: Path
    model: Path
    dataset: Any
    options: Mapping[str, Any]
    """Options of ``fit``, without ``steps``."""
    measure: Measure


class Unwanted(Exception):
    """Nobody waits for this trial here any more; what is done is committed."""


def run_trial(task: Task, check: Callable[[], None] = lambda: None) -> Result:
    """Train, measure, and write the result; an error is a result, too.

    ``check`` is called after each step, and before an error is told, and stops the trial by what it raises.
    """
    failed = Result(task.trial, task.rung, task.steps, None)
    said: dict[str, Any] = {}

    def listen(event: Event) -> None:
        if isinstance(event, RunStarted):
            said["notes"] = event.notes
            said["remarks"] = tuple(f"{one.text}: {one.cure}" for one in event.plan.trained.remarks)
        elif isinstance(event, StepDone):
            check()

    try:
        metric, run = _measured(task, _trained(task, listen, check))
        rows = [row for row in run.history if task.steps_before < row["step"] <= task.steps]
        result = replace(
            failed,
            metric=metric,
            seconds=sum(row["seconds"] for row in rows),
            peak_bytes=max((row["process_bytes"] for row in rows), default=0),
        )
    except Unwanted:
        raise
    except (NonFiniteError, DatasetError, InputError) as error:
        result = replace(failed, error=_text(error), final=not isinstance(error, DatasetError))
    except (
        Exception
    ) as error:  # a full disk, a refused budget, a metric of the user's: another try may succeed
        result = replace(failed, error=_text(error), final=False)
    if result.error is not None:  # that another process has its run is no error of a trial that was given up
        check()
    result = replace(result, **said)
    write_result(task.folder, result)
    return result


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _trained(task: Task, listen: Callable[[Event], None], check: Callable[[], None]) -> Run:
    """The run of the trial, trained on; waits for a process that still writes it."""
    until = time.monotonic() + IN_USE_SECONDS
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ModelWarning)  # it is among the remarks, for all trials once
                return fit(
                    task.model,
                    task.dataset,
                    workdir=task.run,
                    steps=task.steps,
                    callbacks=[listen],
                    progress=False,
                    **task.options,
                )
        except InUseError:
            if time.monotonic() > until:
                raise
        check()
        time.sleep(LOOK_SECONDS)


def _measured(task: Task, run: Run) -> tuple[float, Run]:
    """What the run is compared by. Raises NonFiniteError if that is no number."""
    measure, metric = task.measure, task.measure.metric
    if run.steps > task.steps and (callable(metric) or measure.validation is not None):
        raise StoreError(
            f"the run in {task.run} has {run.steps} steps, and its result after {task.steps} is lost; delete "
            "its folder to have it trained again"
        )
    if callable(metric):
        found = float(metric(run))
    elif measure.validation is not None:
        memory, size = task.options["memory"], task.options.get("batch_size", 1)
        found = _named(metric, run.evaluate(measure.validation, memory=memory, batch_size=size))
    else:
        rows = [row for row in run.history if row["step"] <= task.steps][-measure.last_steps :]
        found = sum(_named(metric, row) for row in rows) / len(rows)
    if not math.isfinite(found):
        raise NonFiniteError(f"the metric after {task.steps} steps is {found}")
    return found, run


def _named(metric: str, losses: Mapping[str, float]) -> float:
    if metric not in losses:
        known = ", ".join(name for name in losses if name.startswith("loss"))
        raise InputError(f"there is no metric '{metric}'; there are {known}, or give a function of the run")
    return losses[metric]
