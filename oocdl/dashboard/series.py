"""Columns of numbers that grow by a row at a time, and few points that look like many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
FIRST_ROWS = 1024


class Table:
    """Rows of numbers by name. A number that a row lacks is NaN; what is no number is left out."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._room = FIRST_ROWS
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
            if self.rows == self._room:
                self._room *= 2
                self._columns = {name: _grown(column, self._room) for name, column in self._columns.items()}
            for name, value in row.items():
                if isinstance(value, int | float):
                    if name not in self._columns:
                        self._columns[name] = np.full(self._room, np.nan)
                    self._columns[name][self.rows] = value
            self.rows += 1

    def cut(self, rows: int) -> None:
        """Forget all rows but the first so many."""
        for column in self._columns.values():
            column[rows : self.rows] = np.nan
        self.rows = min(rows, self.rows)

    def recent(self, rows: int) -> Callable[[str], float]:
        """Return what says how much a total has grown over so many last rows; 0 where it is not known."""
        return lambda name: float(np.nan_to_num(np.ptp(self[name][-rows:]))) if len(self) else 0.0

    def __getitem__(self, name: str) -> Column:
        """A column; all NaN if no row has it."""
        column = self._columns.get(name)
        return np.full(self.rows, np.nan) if column is None else column[: self.rows]


def _grown(column: Column, room: int) -> Column:
    grown = np.full(room, np.nan)
    grown[: column.size] = column
    return grown


def smoothed(values: Column, weight: float) -> Column:
    """An exponential moving average, without the bias to zero of its first values.

    ``weight`` in [0, 1) is that of the past. NaN counts as nothing. The correction is that of Adam (Kingma
    and Ba, 2015, section 3).
    """
    if weight == 0 or not values.size:
        return values.copy()
    out, total, share = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        if value == value:
            total = weight * total + (1 - weight) * value
            share = weight * share + (1 - weight)
        out[index] = total / share if share else np.nan
    return out


def thinned(count: int, most: int) -> npt.NDArray[np.intp]:
    """Indexes of at most ``most`` of so many points, evenly apart, with the first and the last.

    >>> thinned(5, 10).tolist(), thinned(100, 4).tolist()
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).round().astype(np.intp)
