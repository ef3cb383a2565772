"""``CSV``, and the base of all listeners that write the rows of a history elsewhere."""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from oocdl.errors import InputError
from oocdl.events import Committed, Event, RunFinished, RunStarted, RunStopped, StepDone, WorkersChanged
from oocdl.host.paths import path_of
from oocdl.storage.files import reporting, write_text
from oocdl.storage.run.run_store import RunStore

FIRST_COLUMNS = "step,epoch,loss"
"""First columns of a file; one that begins otherwise is never overwritten."""


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


ROWS_AT_ONCE = 1000
"""Rows of earlier calls that are passed on together: a long run has hundreds of thousands."""


def earlier_rows(event: RunStarted) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run that are committed when it starts."""
    rows = RunStore.open(event.workdir).history() if event.done else iter(())
    return (row for row in rows if row["step"] <= event.done)


class CommittedRows(ABC):
    """Passes on each row once, when its step is committed: what is rolled back is never passed on.

    When a run starts, rows of earlier calls of ``fit`` are passed on that are not there: those of a process
    that was killed, or was run without this listener.
    """

    def __init__(self) -> None:
        self._waiting: list[Row] = []
        self._last = 0

    @abstractmethod
    def begin(self, event: RunStarted) -> int:
        """Take up a run; return the last step that needs no row."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Write further rows."""

    def end(self, event: RunFinished | RunStopped) -> None:  # noqa: B027
        """The run is over, or has stopped: all of its committed rows are written."""

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted():
                self._waiting, self._last = [], self.begin(event)
                earlier = (Row(values, time.time()) for values in earlier_rows(event))
                while rows := list(islice(earlier, ROWS_AT_ONCE)):
                    self._pass_on(rows)
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


class CSV(CommittedRows):
    """Writes a line for each committed step.

    A run that goes on continues the file, which then has the rows of the run's history. Raises InputError if
    ``path`` is a file of another kind, StoreError if it cannot be written.

    >>> run = oocdl.fit("unet.onnx", "brain.zarr", callbacks=[CSV("losses.csv")])  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = path_of("path", path).absolute()
        self._columns: list[str] = []

    def begin(self, event: RunStarted) -> int:
        """Empty the file: the rows that are committed are written anew."""
        if self.path.exists():
            with reporting(self.path), self.path.open("rb") as stream:
                start = stream.read(len(FIRST_COLUMNS))
            if start not in (b"", FIRST_COLUMNS.encode()):
                raise InputError(f"{self.path} is no history of a run; give CSV another path")
        self._columns = []
        with reporting(self.path):
            write_text(self.path, "")
        return 0

    def write(self, rows: Sequence[Row]) -> None:
        """Add lines. A column that is new, as after the first validation, is added to all of the file."""
        new = {name: None for row in rows for name in row.values if name not in self._columns}
        self._columns += new
        with reporting(self.path):
            if new:
                self._widen()
            with self.path.open("a", newline="") as stream:
                self._writer(stream).writerows(row.values for row in rows)

    def _widen(self) -> None:
        """Write the file anew with the columns that there are now."""
        wider = self.path.with_name(f"{self.path.name}.partial")
        with self.path.open(newline="") as stream, wider.open("w", newline="") as made:
            writer = self._writer(made)
            writer.writeheader()
            writer.writerows(csv.DictReader(stream))
        wider.replace(self.path)

    def _writer(self, stream: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(stream, self._columns, extrasaction="ignore", lineterminator="\n")
