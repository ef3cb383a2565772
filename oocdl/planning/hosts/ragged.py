"""Keeps lists of numbers in one array, one after another: thousands are picked, or counted, at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def runs(firsts: Ints, counts: Ints) -> Ints:
    """Return numbers that follow each other from each of ``firsts``, as many as ``counts`` says.

    >>> runs(np.array([5, 2]), np.array([2, 3]))
    array([5, 6, 2, 3, 4])
    """
    some = counts > 0
    firsts, ends = firsts[some], np.cumsum(counts[some])
    found = np.ones(int(ends[-1]) if len(ends) else 0, np.int64)
    found[:1] = firsts[:1]
    found[ends[:-1]] = firsts[1:] - (firsts[:-1] + np.diff(ends, prepend=0)[:-1] - 1)
    return np.cumsum(found, out=found)


def counts_of(lists: Sequence[Sized]) -> Ints:
    """Return the length of each list."""
    return np.fromiter(map(len, lists), np.int64, len(lists))


def starts_of(counts: Ints) -> Ints:
    """Return the place where each of consecutive lists of these lengths begins, and the end of the last."""
    return np.concatenate(([0], np.cumsum(counts)))


def small(numbers: Ints) -> npt.NDArray[Any]:
    """Return the same numbers in as few bytes as hold each of them.

    >>> small(np.array([3, 700])).dtype
    dtype('uint16')
    """
    ends = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    return numbers.astype(np.result_type(*map(np.min_scalar_type, ends)))


class Ragged(NamedTuple):
    """Lists of numbers, one after another in one array.

    >>> list(ragged([[5, 6], [], [7]]).take(np.array([2, 0])).lists())
    [[7], [5, 6]]
    """

    first: Ints
    """Place in ``values`` at which each list begins, and the end of the last."""
    values: Ints

    def take(self, some: Ints) -> Ragged:
        """Return some of the lists."""
        firsts = self.first[some]
        counts = self.first[some + 1] - firsts
        return Ragged(starts_of(counts), self.values[runs(firsts, counts)])

    def small(self) -> Ragged:
        """Return the same lists in as few bytes as hold the numbers."""
        return Ragged(small(self.first), small(self.values))

    def lists(self) -> Iterator[list[int]]:
        """Return an iterator over the lists."""
        values = self.values.tolist()
        return (values[begin:end] for begin, end in pairwise(self.first.tolist()))


def ragged(lists: Sequence[Sequence[int]]) -> Ragged:
    """Return the lists in one array."""
    counts = counts_of(lists)
    values = np.fromiter(chain.from_iterable(lists), np.int64, int(counts.sum()))
    return Ragged(starts_of(counts), values)
