"""The history of a run: one row of plain data for each step, as lines of JSON.

Each line ends with the crc32c of its row, so that what is damaged can be told from what is not; the manifest
of a version has the length and the crc32c of all lines that were committed with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.files import content_of, regular, reporting, write_bytes
from oocdl.storage.run.manifest import HistorySeal

Row = dict[str, Any]


class History:
    """Reads and appends to ``history/steps.jsonl`` of a run. Rows have a ``step``, which only grows.

    ``seal`` says what the file's sound part is: that of the committed version at first.
    """

    def __init__(self, root: Path, seal: HistorySeal) -> None:
        self.path = root / "history" / "steps.jsonl"
        self.seal = seal
        self._last_step = -1

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows in one write; they are durable with the next commit. Rows that are there are left out."""
        if any("step" not in row for row in rows):
            raise StoreError("a row of the history needs a step")
        new = [row for row in rows if row["step"] > self._last_step]
        data = b"".join(line_of(row) for row in new)
        with (
            reporting(self.path),
            open(self.path, "r+b" if self.path.exists() else "w+b", opener=regular) as stream,
        ):
            stream.seek(self.seal.nbytes)
            stream.write(data)
            stream.truncate()
        if new:
            self._last_step = new[-1]["step"]
        crc = int(google_crc32c.extend(self.seal.crc, data))
        self.seal = HistorySeal(self.seal.rows + len(new), self.seal.nbytes + len(data), crc)

    def rows(self) -> list[Row]:
        """Return all rows that the seal covers. Raises CorruptError, which names what is damaged."""
        lines, lost = self._lines()
        if lost:
            raise CorruptError(
                f"{self.path} is damaged: {lost}; going on with the run, or 'oocdl repair', leaves that out"
            )
        return [{k: v for k, v in json.loads(line).items() if k != "crc"} for line in lines]

    def start(self) -> str:
        """Cut what was not committed, for a writer; returns what is damaged, and left out from now on."""
        lines, lost = self._lines()
        data = b"".join(line + b"\n" for line in lines)
        if lost:
            if self.path.exists():
                with reporting(self.path):
                    self.path.replace(self.path.with_name("steps-damaged.jsonl"))
            self.seal = HistorySeal(len(lines), len(data), int(google_crc32c.value(data)))
        if lost or (self.path.exists() and self.path.stat().st_size != len(data)):
            write_bytes(self.path, data)
        self._last_step = json.loads(lines[-1])["step"] if lines else -1
        return lost

    def _lines(self) -> tuple[list[bytes], str]:
        """Return the lines that the seal covers and that are sound, and in words what is lost."""
        content = content_of(self.path) or b""
        data = content[: self.seal.nbytes]
        if len(data) == self.seal.nbytes and google_crc32c.value(data) == self.seal.crc:
            return data.splitlines(), ""
        lines, wrong, last_step = list[bytes](), list[int](), -math.inf
        for number, line in enumerate(content.split(b"\n")[: self.seal.rows], 1):
            row = row_of(line)
            if row is None or row["step"] <= last_step:
                wrong.append(number)
            else:
                lines.append(line)
                last_step = row["step"]
        lost = f"{self.seal.rows - len(lines)} of {self.seal.rows} rows are lost"
        if wrong:
            lost += f" (line {', '.join(map(str, wrong[:8]))}{', ..' if len(wrong) > 8 else ''})"
        return lines, lost


def line_of(row: Mapping[str, Any]) -> bytes:
    """Write a row as a line that ends with its crc32c."""
    text = json.dumps({name: value for name, value in row.items() if name != "crc"})
    crc = int(google_crc32c.value(text.encode()))
    return f'{text[:-1]}, "crc": "{crc:08x}"}}\n'.encode()


def row_of(line: bytes) -> Row | None:
    """Return the row of a line; None if it is not what was written."""
    head, _, tail = line.rpartition(b', "crc": "')
    if tail != b'%08x"}' % google_crc32c.value(head + b"}"):
        return None
    found: Row = json.loads(head + b"}")
    return found
