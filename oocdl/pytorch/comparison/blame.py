"""Finds the first operation of a module whose result, or whose gradient, is not in its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oocdl.pytorch.module_calls import Places, tensors_in

_EQUAL = 1e-6
"""Relative difference of sums below which two tensors are the same, however they are laid out."""


@dataclass(eq=False)
class Operation:
    """A call of one of PyTorch's functions that made tensors."""

    name: str
    place: str
    read: tuple[int, ...]
    """The operations whose results it took, by number."""
    made: list[tuple[float, ...]]
    gradients: list[tuple[float, ...]]


class Recorder(TorchFunctionMode):
    """Notes every function that a call of a module runs, with marks of results and of their gradients."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.operations: list[Operation] = []
        self.names = set[str]()
        """Names of all functions that have run."""
        self._makers: dict[int, int] = {}
        self._alive: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        self.names.add(name)
        given = tensors_in((args, kwargs))
        read = tuple(self._makers[id(x)] for x in given if id(x) in self._makers)
        out = func(*args, **(kwargs or {}))
        results = [
            x for x in tensors_in(out) if x.is_floating_point() and not isinstance(x, torch.nn.Parameter)
        ]
        if not results:
            return out
        operation = Operation(name, self.places.here(), read, [mark(x) for x in results], [])
        for x in results:
            self._makers[id(x)] = len(self.operations)
            if x.requires_grad:
                x.register_hook(lambda grad, known=operation.gradients: known.append(mark(grad)))  # type: ignore[no-untyped-call]
        self.operations.append(operation)
        self._alive.append((given, results))  # a tensor that is freed would give its id to another
        return out


def mark(x: Tensor) -> tuple[float, ...]:
    """Return sums that tell a tensor from others, in whichever order its elements are."""
    x = x.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(x.numel()), float(x.sum()), float(x.abs().sum()), float(x.square().sum())


def _alike(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    size, square = (max(one[at], other[at], 1e-300) for at in (2, 3))
    pairs = zip(one, other, (1.0, size, size, square), strict=True)
    return all(abs(a - b) <= _EQUAL * scale for a, b, scale in pairs)


def first_difference(operations: Sequence[Operation], known: Sequence[tuple[float, ...]]) -> str:
    """Say which operation is the first whose result, else whose gradient, a file does not have; or ''.

    ``known``: the marks of all values of the file.
    """

    def any_known(marks: Sequence[tuple[float, ...]]) -> bool:
        return any(found[0] == other[0] and _alike(found, other) for found in marks for other in known)

    good = [any_known(operation.made) for operation in operations]
    for number in reversed(range(len(operations))):
        if good[number]:
            for earlier in operations[number].read:
                good[earlier] = True
    for operation, fine in zip(operations, good, strict=True):
        if not fine:
            return f"{operation.name} {operation.place}"
    readers: dict[int, list[int]] = {}
    for number, operation in enumerate(operations):
        for earlier in operation.read:
            readers.setdefault(earlier, []).append(number)
    for number in reversed(range(len(operations))):
        gradients = operations[number].gradients
        if number in readers and gradients and not any_known(gradients):
            reader = operations[readers[number][0]]
            return f"the gradient of {reader.name} {reader.place}"
    return ""
