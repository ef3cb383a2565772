"""Calls of a module: its inputs by name or position, the tensors in them, and the place in its code."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Shape
from oocdl.pytorch.module_tensors import norm_buffers

Tensors = Mapping[str, Tensor]
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Signature:
    """The inputs of a call by name, in order."""

    names: tuple[str, ...]
    positional: int
    """Number of inputs, the first ones, that are given by position; the others are given by name."""

    def split(self, inputs: Tensors) -> tuple[list[Tensor], dict[str, Tensor]]:
        first, others = self.names[: self.positional], self.names[self.positional :]
        return [inputs[name] for name in first], {name: inputs[name] for name in others}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of a module's parameters, by the first of them."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def tensors_in(held: Any) -> list[Tensor]:
    """Return the tensors of arguments or results, however they are nested."""
    return [x for x in tree_leaves(held) if isinstance(x, Tensor)]


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of ``forward``, also of a module that ``torch.compile`` has wrapped."""
    return [*inspect.signature(getattr(module, "_orig_mod", module).forward).parameters.values()]


def _slots(module: nn.Module) -> list[str]:
    """Return the arguments of ``forward`` that take a position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters_of(module) if p.kind in kinds]


def signature_of(module: nn.Module, names: tuple[str, ...]) -> Signature:
    """Return how inputs are given that are named after the arguments of ``forward``."""
    slots = _slots(module)
    if not slots and any(p.kind is p.VAR_POSITIONAL for p in parameters_of(module)):
        return Signature(names, len(names))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(names, slots, strict=False))
    return Signature(names, len([*same]))


def inputs_of(module: nn.Module, given: Any) -> tuple[Signature, dict[str, Tensor]]:
    """Return example inputs by the names of forward's arguments, on the processor. Raises InputError."""
    if isinstance(given, Mapping):
        signature, values = signature_of(module, tuple(map(str, given))), list(given.values())
    else:
        values = [given] if isinstance(given, Tensor) else list(given)
        slots = _slots(module)
        names = [*slots[: len(values)], *(f"input_{n}" for n in range(len(slots), len(values)))]
        signature = Signature(tuple(names), len(names))
    for name, x in zip(signature.names, values, strict=True):
        if not isinstance(x, Tensor):
            given = f"the example of input '{name}' is {type(x).__name__}"
            raise InputError(f"{given}; inputs have to be tensors")
    if not values:
        ways = "give a tensor, several, or a mapping by forward's arguments"
        raise InputError(f"example_inputs is empty: {ways}")
    return signature, {name: x.detach().cpu() for name, x in zip(signature.names, values, strict=True)}


def without_contents(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a module whose tensors have no contents, but for numbers that stay."""
    held = [value for part in module.modules() for value in vars(part).values()]
    # A generator of random numbers cannot be copied in that mode.
    memo: dict[int, Any] = {id(one): one.clone_state() for one in held if isinstance(one, Generator)}
    with FakeCopyMode(mode):
        double = copy.deepcopy(module, memo)
    statistics = norm_buffers(module)
    both = [[*one.named_buffers(), *one.named_parameters()] for one in (module, double)]
    for (name, x), (_, fake) in zip(*both, strict=True):
        if x.numel() == 1 and not x.requires_grad and name not in statistics:
            fake.constant = x.clone()  # until it is written to
            mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return double


class OneStep(TorchFunctionMode):
    """Has recurrent layers run one step of a sequence, and repeat it; no layer is dropped at a rate of 0."""

    # Without contents PyTorch unrolls recurrent layers: that takes milliseconds a step, and fixes the length
    # of a sequence. Code that drops layers asks whether a number drawn from [0, 1) is below the rate.

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand:
            self.drawn.append(func(*args, **(kwargs or {})))
            return self.drawn[-1]
        below = func is Tensor.lt and isinstance(args[1], int | float) and args[1] <= 0
        if below and args[0].dim() == 0 and any(args[0] is x for x in self.drawn):
            return torch.tensor(False)
        # Of a packed sequence the fourth argument holds weights; of a plain one it is ``has_biases``.
        if getattr(func, "__name__", "") not in _RECURRENT or not isinstance(args[3], bool):
            return func(*args, **(kwargs or {}))
        x, *rest = args
        time = 1 if rest[-1] else 0
        step, *states = func(x.narrow(time, 0, 1), *rest)
        shape = list(step.shape)
        shape[time] = x.shape[time]
        return (step.expand(shape), *states)


def shapes_of_call(module: nn.Module, inputs: Tensors) -> list[Shape]:
    """Return the shapes of what ``module`` returns for ``inputs``; raises what it raises.

    Without contents, but where a shape depends on them, as where a constant mask chooses.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    signature = signature_of(module, tuple(inputs))
    try:
        double = without_contents(module, mode)
        args, kwargs = signature.split({name: mode.from_tensor(x) for name, x in inputs.items()})
        with mode, OneStep():
            return [tuple(x.shape) for x in tensors_in(double(*args, **kwargs))]
    except (DynamicOutputShapeException, DataDependentOutputException):
        args, kwargs = signature.split(inputs)
        with torch.no_grad():
            return [tuple(x.shape) for x in tensors_in(copy.deepcopy(module)(*args, **kwargs))]


_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Beginnings of the files whose lines say nothing of the module's code."""


class Places:
    """The parts of a module, and their names."""

    def __init__(self, module: nn.Module) -> None:
        self.title = type(module).__name__
        self._names = {id(part): name or self.title for name, part in module.named_modules()}

    def here(self) -> str:
        """Say which part of the module runs now, and which line of its code."""
        part, line = "", ""
        frame = sys._getframe(1)
        while frame is not None and not (part and line):
            file = frame.f_code.co_filename
            if not line and is_of_user(file):
                line = f"{Path(file).name}:{frame.f_lineno}"
            owner = self._names.get(id(frame.f_locals.get("self")), "")
            if owner == self.title and frame.f_code.co_name == "_call_impl":
                break  # what calls the module is no code of its own
            part = part or owner
            frame = frame.f_back  # type: ignore[assignment]
        return f"in '{part or self.title}'" + (f" ({line})" if line else "")


def is_of_user(file: str) -> bool:
    """Whether a file of code is neither PyTorch's nor ours."""
    return not file.startswith(_NOT_THE_USERS)
