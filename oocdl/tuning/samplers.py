"""Which values trials have: every combination of a grid, or drawn by a seed.

A trial's values depend on the seed and its number alone, so that a search can go on with more trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np

from oocdl.errors import InputError
from oocdl.space import Distribution, IntUniform
from oocdl.tuning.values import Picks, pick_at

DEFAULT_TRIALS = 16
"""Trials that are drawn if the caller does not say."""


def combinations(space: Mapping[str, tuple[Any, ...] | Distribution]) -> int | None:
    """Return how many combinations a space has; None if they cannot be counted."""
    sizes = [_size(dimension) for dimension in space.values()]
    return prod(size for size in sizes if size) if all(sizes) else None


def _size(dimension: tuple[Any, ...] | Distribution) -> int | None:
    if isinstance(dimension, IntUniform):
        return int(dimension.high - dimension.low + 1)
    return len(dimension) if isinstance(dimension, tuple) else None


def trial_count(sampler: str, space: Mapping[str, tuple[Any, ...] | Distribution], trials: int | None) -> int:
    """Return how many trials a search has. InputError if the space does not have as many."""
    size = combinations(space)
    if sampler == "grid":
        apart = [name for name, found in space.items() if not isinstance(found, tuple)]
        if apart or size is None:
            raise InputError(
                f"sampler='grid' takes lists of values, and '{apart[0]}' is a distribution; give a list, or "
                "sampler='random'"
            )
        if trials not in (None, size):
            raise InputError(
                f"a grid has all {size} combinations, got trials={trials}; leave it out, or draw some with "
                "sampler='random'"
            )
        return size
    if trials is None:
        return DEFAULT_TRIALS if size is None else min(DEFAULT_TRIALS, size)
    if sampler == "random" and size is not None and trials > size:
        raise InputError(
            f"the space has {size} combinations, fewer than trials={trials}; use sampler='grid' for all"
        )
    return trials


def grid(space: Mapping[str, tuple[Any, ...] | Distribution]) -> list[Picks]:
    """Return every combination of lists, in their order: the last varies fastest."""
    sizes = [range(len(dimension)) for dimension in space.values() if isinstance(dimension, tuple)]
    return [dict(zip(space, places, strict=True)) for places in product(*sizes)]


def drawn(space: Mapping[str, tuple[Any, ...] | Distribution], trials: int, seed: int) -> list[Picks]:
    """Draw ``trials`` different combinations; the first of them are the same however many there are.

    >>> space = {"lr": (0.1, 0.2, 0.3), "batch_size": (1, 2)}
    >>> drawn(space, 6, 0)[:3] == drawn(space, 3, 0)
    True
    """
    names, found, attempt = sorted(space), dict[tuple[int | float, ...], Picks](), 0
    while len(found) < trials:
        shares = np.random.default_rng([seed, attempt]).random(len(names))
        picks = {name: pick_at(space[name], float(share)) for name, share in zip(names, shares, strict=True)}
        found.setdefault(tuple(picks.values()), {name: picks[name] for name in space})
        attempt += 1
    return list(found.values())
