"""Distributions of an option, for the space of ``oocdl.search``; a list of values needs none of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from oocdl.errors import InputError


@dataclass(frozen=True)
class Uniform:
    """A number between ``low`` and ``high``, all equally likely.

    >>> Uniform(0.0, 0.5).at(0.25)
    0.125
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check(self, Real, -math.inf)

    def at(self, share: float) -> float:
        """Return the number below which ``share`` (of 0 to 1) of all drawn numbers are."""
        return min(self.low + share * (self.high - self.low), float(self.high))


@dataclass(frozen=True)
class LogUniform:
    """A positive number whose logarithm is uniform: each power of ten is equally likely. For learning rates.

    >>> round(LogUniform(1e-4, 1e-2).at(0.5), 12)
    0.001
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check(self, Real, 0)

    def at(self, share: float) -> float:
        """Return the number below which ``share`` (of 0 to 1) of all drawn numbers are."""
        number = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return min(max(number, float(self.low)), float(self.high))


@dataclass(frozen=True)
class IntUniform:
    """A whole number from ``low`` to ``high``, both included, all equally likely.

    >>> [IntUniform(1, 4).at(share) for share in (0.0, 0.5, 1.0)]
    [1, 3, 4]
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        _check(self, Integral, -math.inf)

    def at(self, share: float) -> int:
        """Return the number at ``share`` (of 0 to 1) of the way."""
        return min(int(self.low) + int(share * (self.high - self.low + 1)), int(self.high))


Distribution = Uniform | LogUniform | IntUniform


def _check(of: Any, kind: Any, above: float) -> None:
    for end in (of.low, of.high):
        if not isinstance(end, kind) or isinstance(end, bool) or not math.isfinite(end) or end <= above:
            what = "whole numbers" if kind is Integral else "finite numbers"
            raise InputError(
                f"{type(of).__name__} takes {what}{' above 0' if above == 0 else ''}, got {end!r}"
            )
    if of.low >= of.high:
        raise InputError(f"{type(of).__name__} needs low < high, got {of.low!r} and {of.high!r}")
