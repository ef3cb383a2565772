"""Keeps lists of numbers in one array, one after another: thousands are picked, or counted, at once."""

from __future__ import annotations

from collections.abc import Sequence, Sized

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
