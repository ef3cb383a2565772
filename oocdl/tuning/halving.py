"""Successive halving: which trials train on (Jamieson & Talwalkar 2016, arXiv:1502.07943).

Pure functions of results, so that a search that goes on decides as it did before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What has become of a trial in a rung."""

    trial: int
    rung: int
    steps: int
    """The total of steps that the rung trains to."""
    metric: float | None
    """None if the trial has failed."""
    error: str | None = None
    final: bool = True
    """Whether it would be the same again; an error of the surroundings, such as a full disk, is not final."""
    seconds: float = 0.0
    """Seconds of training and measuring in this rung."""
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()
    """What a user should know of the dataset, as in ``RunStarted``."""
    remarks: tuple[str, ...] = ()
    """What looks wrong in the model."""


def ranked(results: Mapping[int, Result], mode: str) -> list[int]:
    """Return trials of one rung that have a metric, best first; of equal ones the lower number first."""
    sign = 1 if mode == "min" else -1
    good = [(sign * found.metric, trial) for trial, found in results.items() if found.metric is not None]
    return [trial for _, trial in sorted(good)]


def survivors(entered: Sequence[int], results: Mapping[int, Result], eta: int, mode: str) -> list[int]:
    """Return the trials that go on from a rung, by number.

    They are the best 1/eta of all that entered it, at least one; those without a metric never go on.

    >>> results = {n: Result(n, 0, 10, metric) for n, metric in enumerate((0.3, 0.1, None, 0.1))}
    >>> survivors(range(4), results, 2, "min"), survivors(range(4), results, 4, "min")
    ([1, 3], [1])
    """
    return sorted(ranked(results, mode)[: max(1, len(entered) // eta)])
