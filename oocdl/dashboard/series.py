"""Columns of numbers that grow by a row at a time, and few points that look like many."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]


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
        """Add rows."""
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


def thinned(count: int, most: int) -> npt.NDArray[np.intp]:
    """Indexes of at most ``most`` of so many points, evenly apart, with the first and the last.

    >>> thinned(5, 10).tolist(), thinned(100, 4).tolist()
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).round().astype(np.intp)
