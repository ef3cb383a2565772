"""Sends code of ``scheduler_side`` to a scheduler that need not have oocdl."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from oocdl.runtime.cluster import scheduler_side

cloudpickle.register_pickle_by_value(scheduler_side)


@cache
def carried(function: Callable[..., Any]) -> Carried:
    """Return the ``Carried`` of a function."""
    return Carried(function)


class Carried:
    """A function of ``scheduler_side``, or an instance of its classes, that is pickled with its code.

    What arrives is the function or the instance itself.
    """

    def __init__(self, carried: Any) -> None:
        self.name = getattr(carried, "name", "")
        self._packed: bytes = cloudpickle.dumps(carried)

    def __call__(self, *arguments: Any) -> Any:
        return pickle.loads(self._packed)(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._packed,)
