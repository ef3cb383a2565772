"""Runs beside each other and beside PyTorch's own loop, and runs that a listener breaks off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.errors import OocdlError
from oocdl.events import Event, StepDone
from oocdl.runtime.session import Session
from tests.kit.nets import files_of


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleared up, and nothing more is said."""


def losses_of(run: oocdl.Run) -> list[float]:
    return [row["loss"] for row in run.history]


def same(run: oocdl.Run, other: oocdl.Run) -> None:
    """Equal bits of weights and state, and equal losses."""
    assert files_of(run) == files_of(other)
    assert losses_of(run) == losses_of(other)


def trained_as(run: oocdl.Run, module: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Weights and running statistics are those of a module; its count of batches is in no file."""
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(run.weights[name][...], tensor.numpy(), rtol, atol, err_msg=name)


def refused(kind: type[OocdlError], match: str, call: Callable[[], object]) -> str:
    """It raises just this kind of error (any, if it is ``OocdlError``) in one line, which is returned."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind or kind is OocdlError
    assert "\n" not in str(caught.value) and caught.value.exit_code in (2, 3, 4)
    return str(caught.value)


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


def passes_of(patch: pytest.MonkeyPatch, killed_after: int | None = None) -> list[tuple[int, ...]]:
    """Rows of the passes that are run from now on; the process ends in the one after so many.

    Its outputs are written then, and nothing tells so yet.
    """
    seen, real = list[tuple[int, ...]](), Session.run_pass

    def run_pass(self: Session, plan_id: str, info: Any) -> dict[str, float]:
        found = real(self, plan_id, info)
        if len(seen) == killed_after:
            raise Killed
        seen.append(info.indices)
        return found

    patch.setattr(Session, "run_pass", run_pass)
    return seen


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
