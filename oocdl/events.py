"""What happens in a run, as frozen data. Whoever wants to know listens; nobody prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """The plan stands, the weights are loaded, the first step comes next."""

    plan: Any
    """The ``Plan``."""
    workdir: str
    steps: int
    """Steps of the whole run."""
    done: int
    """Of these, already committed by an earlier process."""


@dataclass(frozen=True)
class StepDone:
    """One optimizer update."""

    row: Mapping[str, Any]
    """The row of ``Run.history``."""


@dataclass(frozen=True)
class Committed:
    """Everything up to a step is durable."""

    step: int


@dataclass(frozen=True)
class RunFinished:
    """No step is left."""

    steps: int
    seconds: float


Event = RunStarted | StepDone | Committed | RunFinished
Listener = Callable[[Event], None]
