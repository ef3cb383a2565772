"""The history of a run: one row of plain data for each step, as lines of JSON.

Each line ends with the crc32c of its row, so that what is damaged can be told from what is not.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.files import content_of, regular, reporting, write_bytes
from oocdl.storage.run.manifest import HistorySeal

Row = dict[str, Any]
BLOCK_BYTES = 1 << 20  # bytes of the file that are read at once


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

    def rows(self) -> Iterator[Row]:
        """Yield the rows that the seal covers, one at a time; first CorruptError, which names the damage."""
        if not self._is_whole():
            raise CorruptError(
                f"{self.path} is damaged: {self._sound()[1]}; going on with the run, or 'oocdl repair', "
                "leaves that out"
            )
        return ({k: v for k, v in json.loads(line).items() if k != "crc"} for line in self._sealed_lines())

    def start(self) -> str:
        """Cut what was not committed, for a writer; returns what is damaged, and left out from now on."""
        lost = ""
        if self._is_whole():
            if self.path.exists() and self.path.stat().st_size != self.seal.nbytes:
                with reporting(self.path):
                    os.truncate(self.path, self.seal.nbytes)
        else:
            lines, lost = self._sound()
            data = b"".join(line + b"\n" for line in lines)
            with reporting(self.path), suppress(FileNotFoundError):
                self.path.replace(self.path.with_name("steps-damaged.jsonl"))
            self.seal = HistorySeal(len(lines), len(data), int(google_crc32c.value(data)))
            write_bytes(self.path, data)
        last = deque(self._sealed_lines(), maxlen=1)
        self._last_step = json.loads(last[0])["step"] if last else -1
        return lost

    def _is_whole(self) -> bool:
        """Whether the file begins with what the seal covers."""
        left, crc = self.seal.nbytes, 0
        with suppress(OSError), open(self.path, "rb", opener=regular) as file:
            while data := file.read(min(left, BLOCK_BYTES)):
                left, crc = left - len(data), int(google_crc32c.extend(crc, data))
        return left == 0 and crc == self.seal.crc

    def _sealed_lines(self) -> Iterator[bytes]:
        if left := self.seal.nbytes:
            with open(self.path, "rb", opener=regular) as file:
                while left > 0 and (line := file.readline()):
                    left -= len(line)
                    yield line

    def _sound(self) -> tuple[list[bytes], str]:
        """Return the lines of a damaged file that are sound, and in words what is lost."""
        lines, wrong, last_step = list[bytes](), list[int](), -math.inf
        content = content_of(self.path) or b""
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
