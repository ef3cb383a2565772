"""The history of a run: one row of plain data for each step, as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oocdl.errors import StoreError
from oocdl.storage.files import io_error, write_text


class History:
    """Reads and appends to ``history/steps.jsonl``. Rows have a ``step``, which only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows in one write; they are durable with the next commit."""
        if any("step" not in row for row in rows):
            raise StoreError("a row of the history needs a step")
        text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
        try:
            with self.path.open("a") as stream:
                stream.write(text)
        except OSError as error:
            raise io_error(error, self.path, len(text)) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows; a last line that a crash cut short is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def cut(self, step: int) -> None:
        """Remove rows after ``step``, and a last line that was cut short."""
        if not self.path.exists():
            return
        kept = [row for row in self.rows() if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
