"""The order of samples is a keyed permutation, which depends on (seed, epoch) alone; so do held-out ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def permutation(seed: int, epoch: int, n: int) -> Indices:
    """Return ``range(n)`` (int64) in an order given by (seed, epoch); the same on every machine and version.

    Sorting raw counter-based numbers gives the same order where NumPy's own shuffling may change.
    """
    key = np.array([seed % 2**64, epoch % 2**64], np.uint64)
    raw = np.random.Philox(key=key).random_raw(n)
    return np.argsort(raw, kind="stable").astype(np.int64)


def held_out(n: int, share: float, seed: int) -> Indices:
    """Return the held-out ones of ``n`` samples (int64, ascending): a share of them, and at least one."""
    return np.sort(permutation(seed, -1, n)[: max(round(share * n), 1)])  # by an epoch that no run has
