"""Which chunks of an array are stored, with what tells each from another: its size, and a time or a checksum.

Chunks have numbers, in C order of the grid. The list is as long as what is stored, never as what is declared.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MOST_CHUNKS = 2**62
"""A grid of more chunks than this is a damaged one: their numbers would not be int64."""


@dataclass(frozen=True, eq=False)
class ChunkList:
    """The stored chunks of one array, ordered by number."""

    grid: tuple[int, ...]
    """Chunks along each axis, stored or not."""
    numbers: Integers
    sizes: Integers
    """Bytes as they are stored."""
    marks: Integers
    """Times of change in nanoseconds, or checksums, as the source has them."""
    missing: int
    """Chunks that are not stored."""

    @property
    def first_missing(self) -> int:
        """The number of the first chunk that is not stored; the number of all chunks if there is none."""
        gaps = self.numbers != np.arange(len(self.numbers))
        return int(np.argmax(gaps)) if gaps.any() else len(self.numbers)

    def index(self, number: int) -> tuple[int, ...]:
        """The index in the grid of the chunk of a number."""
        return tuple(int(at) for at in np.unravel_index(number, self.grid))

    def place(self, number: int) -> int | None:
        """Return the place of a chunk in the list; None if it was not stored."""
        place = number if not self.missing else int(np.searchsorted(self.numbers, number))
        return place if place < len(self.numbers) and self.numbers[place] == number else None

    def find(self, number: int) -> tuple[int, int] | None:
        """Size and mark of a chunk; None if it was not stored."""
        place = self.place(number)
        return None if place is None else (int(self.sizes[place]), int(self.marks[place]))


def listed(grid: tuple[int, ...], entries: array[int]) -> ChunkList:
    """Make a list of entries in any order: number, size and mark of one chunk after the other, as int64."""
    table = np.frombuffer(entries, np.int64).reshape(-1, 3)
    table = table[np.argsort(table[:, 0], kind="stable")]
    columns = (np.ascontiguousarray(column) for column in table.T)
    return ChunkList(grid, *columns, prod(grid) - len(table))


@dataclass(frozen=True)
class ChunkKeys:
    """How the chunks of a Zarr array are called: ``c/0/1`` or ``0.1``, below the array's own path."""

    grid: tuple[int, ...]
    lead: str
    """What stands before the first index: ``c/``, ``c.`` or nothing."""
    separator: str

    def key(self, number: int) -> str:
        """The name of a chunk.

        >>> ChunkKeys((2, 3), "c/", "/").key(5)
        'c/1/2'
        """
        return self.key_at(tuple(int(at) for at in np.unravel_index(number, self.grid)))

    def key_at(self, index: tuple[int, ...]) -> str:
        """The name of the chunk at an index of the grid."""
        return self.lead + self.separator.join(map(str, index))

    def number(self, key: str) -> int | None:
        """The number of the chunk that has this name; None if no chunk has it.

        >>> keys = ChunkKeys((2, 3), "", ".")
        >>> keys.number("1.2"), keys.number("2.0"), keys.number("01.2"), keys.number(".zarray")
        (5, None, None, None)
        """
        match = self._pattern.fullmatch(key)
        index = tuple(map(int, match.groups())) if match else ()
        if match is None or any(at >= extent for at, extent in zip(index, self.grid, strict=True)):
            return None
        return number_of(index, self.grid)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        numbers = [r"(0|[1-9][0-9]{0,18})"] * len(self.grid)  # without sign or leading zeros
        return re.compile(re.escape(self.lead) + re.escape(self.separator).join(numbers))


def number_of(index: tuple[int, ...], grid: tuple[int, ...]) -> int:
    """The number of a chunk.

    >>> number_of((1, 2), (2, 3))
    5
    """
    return int(np.ravel_multi_index(index, grid))


def row_ranges(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` into at most so many ranges of about equal length, half open.

    >>> list(row_ranges(5, 2))
    [(0, 2), (2, 5)]
    """
    count = min(rows, most)
    edges = [rows * part // count for part in range(count + 1)] if count else []
    yield from zip(edges, edges[1:], strict=False)
