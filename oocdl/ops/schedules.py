"""Learning rates as functions of the step (from 0): frozen dataclasses, comparable, picklable.

Any callable ``step -> float`` will do; these are the usual ones, equal to
``torch.optim.lr_scheduler``'s of the same meaning when that is stepped every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import cos, inf, isfinite, nan, pi
from typing import Any

from oocdl.errors import InputError

Rate = float | Callable[[int], float]
"""A learning rate: a number, or a schedule."""


def _finite(what: str, value: Any) -> float:
    """Check a finite number, which may be NumPy's or PyTorch's."""
    try:
        number = nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise InputError(f"{what} must be a finite number, got {value!r}")
    return number


class _Schedule:
    """A schedule, whose fields are checked: numbers, of which those of steps are at least 1."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            what = f"{name} of the schedule {type(self).__name__}"
            if name == "milestones":
                if not isinstance(value, tuple):
                    raise InputError(f"{what} must be several numbers of steps, got {value!r}")
                for milestone in value:
                    _finite(what, milestone)
            elif not (callable(value) and name in ("after", "first") or value is None and name == "steps"):
                number = _finite(what, value)
                if name in ("steps", "every", "times") and number < 1:
                    raise InputError(f"{what} must be at least 1, got {value!r}")


@dataclass(frozen=True)
class Constant(_Schedule):
    """A constant rate of ``lr``."""

    lr: float

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Step(_Schedule):
    """``lr * factor ** (step // every)``: ``StepLR``."""

    lr: float
    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return _powered(step, self.lr, self.factor, step // self.every)


@dataclass(frozen=True)
class MultiStep(_Schedule):
    """``lr * factor ** n`` after n of the steps in ``milestones``: ``MultiStepLR``."""

    lr: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        if hasattr(self.milestones, "__iter__"):
            object.__setattr__(self, "milestones", tuple(self.milestones))
        super().__post_init__()

    def __call__(self, step: int) -> float:
        return _powered(step, self.lr, self.factor, sum(step >= one for one in self.milestones))


@dataclass(frozen=True)
class Exponential(_Schedule):
    """``lr * factor ** step``: ``ExponentialLR``."""

    lr: float
    factor: float

    def __call__(self, step: int) -> float:
        return _powered(step, self.lr, self.factor, step)


@dataclass(frozen=True)
class Cosine(_Schedule):
    """Half a cosine from ``lr`` to ``minimum`` in ``steps`` steps: ``CosineAnnealingLR``.

    ``steps`` is by default as long as the run.
    """

    lr: float
    steps: int | None = None
    minimum: float = 0.0

    def __call__(self, step: int) -> float:
        return _blend(self.lr, self.minimum, pi * min(step / _said(self.steps), 1.0))


@dataclass(frozen=True)
class CosineRestarts(_Schedule):
    """Half cosines from ``lr`` to ``minimum``, over and over: ``CosineAnnealingWarmRestarts``.

    The first lasts ``steps`` steps, each of the others ``times`` as long as the one before.
    """

    lr: float
    steps: int
    times: int = 1
    minimum: float = 0.0

    def __call__(self, step: int) -> float:
        length = self.steps
        if self.times == 1:
            step %= length
        while step >= length:
            step, length = step - length, length * self.times
        return _blend(self.lr, self.minimum, pi * step / length)


@dataclass(frozen=True)
class Polynomial(_Schedule):
    """``lr * (1 - step / steps) ** power``: ``PolynomialLR``; nnU-Net uses power 0.9.

    ``steps`` is by default as long as the run.
    """

    lr: float
    steps: int | None = None
    power: float = 0.9

    def __call__(self, step: int) -> float:
        return _powered(step, self.lr, 1 - min(step / _said(self.steps), 1.0), self.power)


@dataclass(frozen=True)
class OneCycle(_Schedule):
    """Half cosines from ``lr / start`` to ``lr`` to ``lr / start / end``: ``OneCycleLR``.

    ``steps`` is by default as long as the run.
    """

    lr: float
    steps: int | None = None
    rising: float = 0.3
    """The share of the steps in which the rate rises."""
    start: float = 25.0
    end: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("start", "end"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} of the schedule OneCycle divides, and must be positive")

    def __call__(self, step: int) -> float:
        low, steps = self.lr / self.start, _said(self.steps)
        peak = self.rising * steps - 1
        if peak > 0 and step <= peak:
            return _blend(low, self.lr, pi * (step / peak))
        part = min((step - peak) / max(steps - 1 - peak, 1e-9), 1.0)
        return _blend(self.lr, low / self.end, pi * part)


@dataclass(frozen=True)
class WarmUp(_Schedule):
    """``after`` times a line from ``start`` to 1 over the first ``steps`` steps: ``LinearLR``."""

    after: Rate
    steps: int
    start: float = 1 / 3

    def __call__(self, step: int) -> float:
        part = min(step / self.steps, 1.0)
        return rate(self.after, step) * (self.start + (1 - self.start) * part)


@dataclass(frozen=True)
class Then(_Schedule):
    """``first`` for ``steps`` steps, then ``after``, which counts from there: ``SequentialLR``.

    It is how a run goes on by another schedule: ``Then(Cosine(0.1, 100), 100, Cosine(0.01))``.
    """

    first: Rate
    steps: int
    after: Rate

    def __call__(self, step: int) -> float:
        return rate(self.first, step) if step < self.steps else rate(self.after, step - self.steps)


Lasting = Cosine | Polynomial | OneCycle
"""The schedules that last as long as a run where they say nothing else."""
Scaling = Constant | Step | MultiStep | Exponential | CosineRestarts | Lasting
"""The schedules that are proportional to a learning rate, but for a ``minimum``."""


def lasting(lr: Rate, steps: int) -> Rate:
    """Return a schedule for a run of so many steps: one that says nothing else lasts as long.

    >>> lasting(WarmUp(Cosine(0.1), 10), 100)
    WarmUp(after=Cosine(lr=0.1, steps=100, minimum=0.0), steps=10, start=0.3333333333333333)
    """
    if isinstance(lr, Lasting) and lr.steps is None:
        return replace(lr, steps=max(steps, 1))
    if isinstance(lr, WarmUp):
        return replace(lr, after=lasting(lr.after, steps))
    if isinstance(lr, Then):
        return replace(lr, first=lasting(lr.first, lr.steps), after=lasting(lr.after, steps - lr.steps))
    return lr


def lasts_a_run(lr: Rate, steps: int) -> bool:
    """Whether a rate is a schedule that falls until the end of a run of so many steps.

    >>> lasts_a_run(WarmUp(Cosine(0.1, 100), 10), 100), lasts_a_run(Cosine(0.1, 50), 100)
    (True, False)
    """
    if isinstance(lr, WarmUp | Then):
        return lasts_a_run(lr.after, steps - lr.steps if isinstance(lr, Then) else steps)
    return isinstance(lr, Lasting) and (lr.steps is None or lr.steps >= steps)


def base_of(lr: Rate) -> float | None:
    """Return the learning rate that a schedule scales; None if it is a function of the user's own.

    >>> base_of(WarmUp(Cosine(0.1), 10))
    0.1
    """
    if isinstance(lr, WarmUp | Then):
        return base_of(lr.after if isinstance(lr, WarmUp) else lr.first)
    if isinstance(lr, Scaling):
        return lr.lr
    return None if callable(lr) else float(lr)


def rebased(lr: Rate, base: float, new: float) -> Rate:
    """Return a schedule that scales ``new`` where it scaled ``base``, as PyTorch's schedulers do in a group.

    >>> rebased(WarmUp(Cosine(0.1, 100), 10), 0.1, 0.01)
    WarmUp(after=Cosine(lr=0.01, steps=100, minimum=0.0), steps=10, start=0.3333333333333333)
    """
    if isinstance(lr, WarmUp):
        return replace(lr, after=rebased(lr.after, base, new))
    if isinstance(lr, Then):
        return replace(lr, first=rebased(lr.first, base, new), after=rebased(lr.after, base, new))
    if isinstance(lr, Scaling):
        return replace(lr, lr=new if lr.lr == base else lr.lr * new / base)
    if callable(lr):
        raise InputError("a schedule that has a function of your own in it cannot be scaled")
    return new if lr == base else lr * new / base


def _said(steps: int | None) -> int:
    if steps is None:
        raise InputError("this schedule lasts as long as a run; for how long outside of one? give steps")
    return steps


def _blend(first: float, second: float, angle: float) -> float:
    """Return a cosine from ``first`` at an angle of 0 to ``second`` at pi."""
    return second + (first - second) * (1 + cos(angle)) / 2


def _powered(step: int, lr: float, base: float, power: float) -> float:
    """Return ``lr * base ** power``, the rate of a step. Raises InputError if that is no finite number."""
    try:
        found = lr * base**power
    except ArithmeticError:  # beyond floats, or zero to a negative power
        found = inf
    return _finite(f"the learning rate of step {step + 1}", found)


def rate(lr: Rate, step: int) -> float:
    """Return the learning rate at a step, counted from 0. Raises InputError if that is no finite number."""
    return _finite(f"the learning rate of step {step + 1}", lr(step) if callable(lr) else lr)
