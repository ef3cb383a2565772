"""Files of lines and columns of numbers that grow, and few points that look like many."""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.storage.files import regular

Column = npt.NDArray[np.float64]


class Watched:
    """A file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = (-1, -1)
        """Inode, and time of the last change in ns."""

    def news(self) -> bytes | None:
        """Return what is in it; None if that is not new, or there is no file."""
        data = None
        with suppress(FileNotFoundError), open(self.path, "rb", opener=regular) as stream:
            found = os.fstat(stream.fileno())
            mark = found.st_ino, found.st_mtime_ns
            data = stream.read() if mark != self._mark else None
            self._mark = mark
        return data


class Growing:
    """A file that is written on at its end. One that is shorter, another or gone begins anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode = path, -1
        self.at = self.end = 0
        """Where the last ``news`` begin in the file, and end."""
        self.again = False
        """Whether they began anew: what was read before them is no longer so."""

    def news(self, most: int = -1) -> bytes:
        """Return the bytes that have come since the last call, at most so many."""
        self.at, data = 0, b""
        with suppress(FileNotFoundError), open(self._path, "rb", opener=regular) as stream:
            found = os.fstat(stream.fileno())
            self.at = self.end if found.st_ino == self._inode and found.st_size >= self.end else 0
            stream.seek(self.at)
            data = stream.read(most)
            self._inode = found.st_ino
        self.again, self.end = self.at < self.end, self.at + len(data)
        return data


class Tail(Growing):
    """The lines of JSON of a file that grows."""

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come since the last call. One that is not whole yet comes later.

        A line that is no JSON is left out: a writer that was killed may have left part of one.
        """
        data = self.news()
        whole = data[: data.rfind(b"\n") + 1]
        self.end = self.at + len(whole)
        rows = []
        for line in whole.splitlines():
            with suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]


class Table:
    """Rows of numbers by name. A number that a row lacks is NaN; what is no number is left out."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        """In the order in which their names came."""
        self.rows = 0

    def __len__(self) -> int:
        return self.rows

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            for name, value in row.items():
                if isinstance(value, int | float):
                    if name not in self.columns:
                        self.columns[name] = array("d", [np.nan]) * self.rows
                    self.columns[name].append(value)
            self.rows += 1
            for column in self.columns.values():
                if len(column) < self.rows:
                    column.append(np.nan)

    def cut(self, rows: int) -> None:
        """Forget all rows but the first so many."""
        for column in self.columns.values():
            del column[rows:]
        self.rows = min(rows, self.rows)

    def recent(self, rows: int) -> Callable[[str], float]:
        """Return what says how much a total has grown over so many last rows; 0 where it is not known."""
        return lambda name: float(np.nan_to_num(np.ptp(self[name][-rows:]))) if len(self) else 0.0

    def __getitem__(self, name: str) -> Column:
        """A column; all NaN if no row has it."""
        column = self.columns.get(name)
        # Of a copy: an array that NumPy looks at cannot grow, and another thread may add rows.
        return np.full(self.rows, np.nan) if column is None else np.array(column[:])


def put(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all, and as another one."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb", opener=regular) as out:
        out.write(data)
    partial.replace(path)


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
