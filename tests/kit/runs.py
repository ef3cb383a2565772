"""Runs beside each other and beside PyTorch's own loop, and runs that a listener breaks off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import oocdl
from oocdl.events import Event, StepDone
from tests.kit.nets import files_of


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleared up, and nothing more is said."""


def losses_of(run: oocdl.Run) -> list[float]:
    return [row["loss"] for row in run.history]


def same(run: oocdl.Run, other: oocdl.Run) -> None:
    """Equal bits of weights and state, and equal losses."""
    assert files_of(run) == files_of(other)
    assert losses_of(run) == losses_of(other)


def after(step: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """A listener that acts whenever this step is done."""

    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.row["step"] == step:
            act()

    return listen


def broken_after(step: int, error: type[BaseException] = RuntimeError) -> Callable[[Event], None]:
    """A listener that ends a run once this step is done, before it is committed."""

    def stop() -> None:
        raise error

    return after(step, stop)


def in_torch(optimizer: Any, steps: Iterable[Sequence[Callable[[], Any]]]) -> list[float]:
    """Losses of PyTorch's own loop, in which a step is the mean of its passes."""
    found = []
    for passes in steps:
        optimizer.zero_grad()
        found.append(0.0)
        for make in passes:
            loss = make() / len(passes)
            loss.backward()
            found[-1] += loss.item()
        optimizer.step()
    return found
