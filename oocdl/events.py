"""Events of a run and of a search, as frozen data.

``fit`` and ``search`` call every listener with each of their events, and print nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """The run is planned, and its first step comes next."""

    plan: Any
    """The ``Plan``."""
    workdir: str
    steps: int
    """Steps of the whole run."""
    done: int
    """Steps that an earlier process has committed."""
    notes: tuple[str, ...] = ()
    """What a user should know before the first step, such as chunks of the dataset that are not stored."""


@dataclass(frozen=True)
class StepDone:
    """A step (one optimizer update) is done."""

    row: Mapping[str, Any]
    """The row of ``Run.history``."""


@dataclass(frozen=True)
class Committed:
    """Everything up to ``step`` is durable."""

    step: int


@dataclass(frozen=True)
class RunFinished:
    """No step is left; ``seconds`` are those of this call of ``fit``."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class RunStopped:
    """Something has stopped the run from outside; what was done is committed."""

    reason: str
    """The signal, such as "SIGTERM", or the exception."""
    workdir: str
    done: int
    """Steps that are committed."""


@dataclass(frozen=True)
class TrialDone:
    """A trial of a search has trained to the total of a rung, or has failed."""

    row: Mapping[str, Any]
    """The row of ``Search.table``."""
    done: int
    """Trials of this rung that are done, those of earlier calls included."""
    of: int
    """Trials of this rung."""


@dataclass(frozen=True)
class RungDone:
    """All trials of a rung are done."""

    rung: int
    rungs: int
    going_on: tuple[int, ...]
    """Trials that the next rung trains on; none after the last rung."""


@dataclass(frozen=True)
class Notice:
    """A line for the user: workers are awaited, one is silent, some are lost."""

    text: str


@dataclass(frozen=True)
class WorkersChanged:
    """Workers of a cluster were lost, or have come: the run goes on with others, from its last commit."""

    reason: str
    members: int
    """Workers that take part from now on."""
    done: int
    """Steps that are committed; ``StepDone`` of later ones comes again."""


Event = RunStarted | StepDone | Committed | RunFinished | RunStopped | Notice | WorkersChanged
Listener = Callable[[Event], None]

SearchEvent = TrialDone | RungDone | Notice
SearchListener = Callable[[SearchEvent], None]
