"""Trains trials in this process, one after the other; ``trial_workers.py`` has a Dask client's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from oocdl.errors import StoreError
from oocdl.host.limits import default_budget_bytes
from oocdl.training.run import Run
from oocdl.tuning.halving import Result
from oocdl.tuning.trial import Task, run_trial


class Crew(Protocol):
    """Trains trials, each within its budget."""

    def share(self) -> tuple[int, int | None]:
        """Return the bytes and the compute threads (None: one for each core) that a trial may have here."""

    def check(self, memory_bytes: int) -> None:
        """Raise BudgetError if nobody has so much for a trial."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Train these trials, in any order, and yield each result as soon as it is there."""


class ThisProcess:
    """Trains one trial after the other, here."""

    def share(self) -> tuple[int, int | None]:
        """Return the default budget of a process."""
        return default_budget_bytes(), None

    def check(self, memory_bytes: int) -> None:
        """Leave it to ``fit``, which compares the budget with what the process may have."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Train these trials in their order."""
        yield from map(run_trial, tasks)


def committed_steps(folder: Path) -> int:
    """Return the committed steps of the run in a folder; 0 if there is none."""
    try:
        return Run(folder).steps
    except StoreError:
        return 0
