"""Files of lines and columns of numbers that grow, and few points that look like many."""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.storage.files import regular

Column = npt.NDArray[np.float64]


class Watched:
    """A file that is written on at its end or, where it does not grow, replaced as a whole."""

    def __init__(self, path: Path, grows: bool) -> None:
        self.path, self.grows = path, grows
        self.at = 0
        """Bytes that were read."""
        self._mark = (-1, -1)
        """Inode, and time of the last change in ns."""

    def news(self, most: int = -1) -> tuple[int, bytes] | None:
        """Return where new bytes begin, and at most so many of them; None if there are none, or no file.

        A file that has become shorter, or is another, begins anew at 0.
        """
        try:
            with open(self.path, "rb", opener=regular) as stream:
                found = os.fstat(stream.fileno())
                mark, before = (found.st_ino, found.st_mtime_ns), self._mark
                if mark == before and (self.at == found.st_size or not self.grows):
                    return None
                goes_on = self.grows and before[0] == mark[0] and self.at <= found.st_size
                start = self.at if goes_on else 0
                stream.seek(start)
                data = stream.read(most)
        except FileNotFoundError:
            return None
        self._mark, self.at = mark, start + len(data)
        return start, data


class Tail(Watched):
    """The lines of JSON of a file that grows. One that has become shorter, or is another, is read anew."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, True)
        self.again = False
        """Whether the last ``read`` began anew: what was read before it is no longer so."""

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come since the last call. One that is not whole yet comes later.

        A line that is no JSON is left out: a writer that was killed may have left part of one.
        """
        if not self.path.exists():
            self.again, self.at = self.at > 0, 0
            return []
        before = self.at
        start, data = self.news() or (before, b"")
        self.again = start < before
        whole = data[: data.rfind(b"\n") + 1]
        self.at = start + len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Table:
    """Rows of numbers by name. A number that a row lacks is NaN; what is no number is left out."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self.rows = 0

    def __len__(self) -> int:
        return self.rows

    @property
    def names(self) -> list[str]:
        """The names of all columns, in the order in which they came."""
        return list(self._columns)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            for name, value in row.items():
                if isinstance(value, int | float):
                    if name not in self._columns:
                        self._columns[name] = array("d", [np.nan]) * self.rows
                    self._columns[name].append(value)
            self.rows += 1
            for column in self._columns.values():
                if len(column) < self.rows:
                    column.append(np.nan)

    def cut(self, rows: int) -> None:
        """Forget all rows but the first so many."""
        for column in self._columns.values():
            del column[rows:]
        self.rows = min(rows, self.rows)

    def recent(self, rows: int) -> Callable[[str], float]:
        """Return what says how much a total has grown over so many last rows; 0 where it is not known."""
        return lambda name: float(np.nan_to_num(np.ptp(self[name][-rows:]))) if len(self) else 0.0

    def __getitem__(self, name: str) -> Column:
        """A column; all NaN if no row has it."""
        column = self._columns.get(name)
        # Of a copy: an array that NumPy looks at cannot grow, and another thread may add rows.
        return np.full(self.rows, np.nan) if column is None else np.array(column[:])


def packed(**arrays: Any) -> bytes:
    """Return arrays as an npz file."""
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def thinned(count: int, most: int) -> npt.NDArray[np.intp]:
    """Indexes of at most ``most`` of so many points, evenly apart, with the first and the last.

    >>> thinned(5, 10).tolist(), thinned(100, 4).tolist()
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).round().astype(np.intp)
