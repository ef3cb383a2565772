"""Distributions of an option, for the space of ``oocdl.search``; a list of values needs none of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from oocdl.errors import InputError


@dataclass(frozen=True)
class Uniform:
    """A number between ``low`` and ``high``, all equally likely."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self, Real, -math.inf)


@dataclass(frozen=True)
class LogUniform:
    """A positive number of which each power of ten is equally likely, as for learning rates."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self, Real, 0)


@dataclass(frozen=True)
class IntUniform:
    """A whole number from ``low`` to ``high``, both included, all equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_ends(self, Integral, -math.inf)


Distribution = Uniform | LogUniform | IntUniform


def _check_ends(of: Any, kind: Any, above: float) -> None:
    for end in (of.low, of.high):
        if not isinstance(end, kind) or isinstance(end, bool) or not math.isfinite(end) or end <= above:
            what = "whole numbers" if kind is Integral else "finite numbers"
            raise InputError(
                f"{type(of).__name__} takes {what}{' above 0' if above == 0 else ''}, got {end!r}"
            )
    if of.low >= of.high:
        raise InputError(f"{type(of).__name__} needs low < high, got {of.low!r} and {of.high!r}")
