"""Learning rates as functions of the step (from 0): frozen dataclasses, comparable, picklable.

Any callable ``step -> float`` will do; these are the usual ones, equal to
``torch.optim.lr_scheduler``'s of the same meaning when that is stepped every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

from oocdl.errors import InputError

Rate = float | Callable[[int], float]
"""A learning rate: a number, or a schedule."""


@dataclass(frozen=True)
class Constant:
    """A constant rate of ``lr``."""

    lr: float

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Step:
    """``lr * factor ** (step // every)``: ``StepLR``."""

    lr: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _positive("every", self.every)

    def __call__(self, step: int) -> float:
        return float(self.lr * self.factor ** (step // self.every))


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``lr`` to ``minimum`` in ``steps`` steps: ``CosineAnnealingLR``."""

    lr: float
    steps: int
    minimum: float = 0.0

    def __post_init__(self) -> None:
        _positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        part = min(step / self.steps, 1.0)
        return self.minimum + (self.lr - self.minimum) * (1 + cos(pi * part)) / 2


@dataclass(frozen=True)
class Polynomial:
    """``lr * (1 - step / steps) ** power``: ``PolynomialLR``; nnU-Net uses power 0.9."""

    lr: float
    steps: int
    power: float = 0.9

    def __post_init__(self) -> None:
        _positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        return float(self.lr * (1 - min(step / self.steps, 1.0)) ** self.power)


@dataclass(frozen=True)
class OneCycle:
    """Half cosines from ``lr / start`` to ``lr`` to ``lr / start / end``: ``OneCycleLR``."""

    lr: float
    steps: int
    rising: float = 0.3
    """The share of the steps in which the rate rises."""
    start: float = 25.0
    end: float = 1e4

    def __post_init__(self) -> None:
        _positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        low = self.lr / self.start
        peak = self.rising * self.steps - 1
        if peak > 0 and step <= peak:
            return _blend(low, self.lr, step / peak)
        part = min((step - peak) / max(self.steps - 1 - peak, 1e-9), 1.0)
        return _blend(self.lr, low / self.end, part)


@dataclass(frozen=True)
class WarmUp:
    """``after`` times a line from ``start`` to 1 over the first ``steps`` steps: ``LinearLR``."""

    after: Rate
    steps: int
    start: float = 1 / 3

    def __post_init__(self) -> None:
        _positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        part = min(step / self.steps, 1.0)
        return rate(self.after, step) * (self.start + (1 - self.start) * part)


def _positive(name: str, count: int) -> None:
    if count < 1:
        raise InputError(f"{name} of a learning-rate schedule must be at least 1, not {count}")


def _blend(first: float, second: float, part: float) -> float:
    """Return half a cosine from ``first`` at 0 to ``second`` at 1."""
    return second + (first - second) * (1 + cos(pi * part)) / 2


def rate(lr: Rate, step: int) -> float:
    """Return the learning rate at a step, counted from 0."""
    return float(lr(step)) if callable(lr) else float(lr)
