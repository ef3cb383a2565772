"""The base of listeners that write the rows of a history elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from oocdl.events import Committed, Event, RunFinished, RunStarted, RunStopped, StepDone, WorkersChanged
from oocdl.storage.run.run_store import RunStore


class Row(NamedTuple):
    """A row of ``Run.history``, and when its step was done."""

    values: Mapping[str, Any]
    unix_seconds: float

    @property
    def step(self) -> int:
        """The number of the step, from 1."""
        return int(self.values["step"])

    def numbers(self) -> dict[str, float]:
        """Return the numbers of a row that make curves: all but the step itself."""
        return {
            name: float(value)
            for name, value in self.values.items()
            if name != "step" and isinstance(value, int | float)
        }


class CommittedRows(ABC):
    """Passes on each row once, when its step is committed: what is rolled back is never passed on.

    When a run starts, rows of earlier calls of ``fit`` are passed on that are not there: those of a process
    that was killed, or was run without this listener.
    """

    def __init__(self) -> None:
        self._waiting: list[Row] = []
        self._last = 0

    @abstractmethod
    def begin(self, event: RunStarted, earlier: Sequence[Row]) -> int:
        """Take up a run, of which ``earlier`` rows are committed; return the last step that needs no row."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Write further rows."""

    def end(self, event: RunFinished | RunStopped) -> None:  # noqa: B027
        """The run is over, or has stopped: all of its committed rows are written."""

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted():
                rows = RunStore.open(event.workdir).history() if event.done else []
                earlier = [Row(values, time.time()) for values in rows if values["step"] <= event.done]
                self._waiting, self._last = [], self.begin(event, earlier)
                self._pass_on(earlier)
            case StepDone(values):
                self._waiting.append(Row(dict(values), time.time()))
            case Committed(step):
                ready = [row for row in self._waiting if row.step <= step]
                self._waiting = [row for row in self._waiting if row.step > step]
                self._pass_on(ready)
            case WorkersChanged():
                self._waiting = []
            case RunFinished() | RunStopped():
                self.end(event)

    def _pass_on(self, rows: Sequence[Row]) -> None:
        new = [row for row in rows if row.step > self._last]
        if new:
            self._last = new[-1].step
            self.write(new)
