"""``CSV``: the history of a run as a file that any table program reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from oocdl.callbacks.committed_rows import CommittedRows, Row
from oocdl.errors import InputError
from oocdl.events import RunStarted
from oocdl.host.paths import path_of
from oocdl.storage.files import reporting, write_text

FIRST_COLUMNS = "step,epoch,loss"
"""First columns of a file; one that begins otherwise is never overwritten."""


class CSV(CommittedRows):
    """Writes a line for each committed step.

    A run that goes on continues the file, which then has the rows of the run's history. Raises InputError if
    ``path`` is a file of another kind, StoreError if it cannot be written.

    >>> run = oocdl.fit("unet.onnx", "brain.zarr", callbacks=[CSV("losses.csv")])  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = path_of("path", path)
        self._columns: list[str] = []

    def begin(self, event: RunStarted, earlier: Sequence[Row]) -> int:
        """Write the rows that are committed anew."""
        if self.path.exists():
            with reporting(self.path), self.path.open("rb") as stream:
                start = stream.read(len(FIRST_COLUMNS))
            if start not in (b"", FIRST_COLUMNS.encode()):
                raise InputError(f"{self.path} is no history of a run; give CSV another path")
        self._columns = []
        with reporting(self.path):
            write_text(self.path, self._lines(earlier, head=True))
        return event.done

    def write(self, rows: Sequence[Row]) -> None:
        """Add lines. A column that is new, as after the first validation, is added to all of the file."""
        new = {name: None for row in rows for name in row.values if name not in self._columns}
        if new and self._columns:
            with reporting(self.path), self.path.open(newline="") as stream:
                earlier = [Row(values, 0.0) for values in csv.DictReader(stream)]
            self._columns += new
            with reporting(self.path):
                write_text(self.path, self._lines(earlier, head=True))
        with reporting(self.path), self.path.open("a", newline="") as stream:
            stream.write(self._lines(rows, head=not self._columns))

    def _lines(self, rows: Sequence[Row], head: bool) -> str:
        if head:
            self._columns = list({name: None for row in rows for name in (*self._columns, *row.values)})
        out = io.StringIO()
        writer = csv.DictWriter(out, self._columns, extrasaction="ignore", lineterminator="\n")
        if head and rows:
            writer.writeheader()
        writer.writerows(row.values for row in rows)
        return out.getvalue()
