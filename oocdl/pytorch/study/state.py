"""The state of a module besides its weights: attributes, kept tensors, generators of random numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH = 4
"""Depth to which objects inside of objects are looked at."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch gives to every module; parameters, buffers and submodules are among them."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def cell_of(tensor: Tensor) -> int:
    """Tell a tensor and its views from all others that live."""
    return int(tensor.untyped_storage()._cdata)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Return what every attribute of a module and its parts is now, by path; equal things compare equal."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        for title, value in vars(part).items():
            if title not in _OF_MODULES or title == "training":
                state.update(_leaves(f"{prefix}{title}", value, _DEPTH))
        for title, tensor in part._buffers.items():
            state[f"{prefix}{title}"] = None if tensor is None else ("buffer", cell_of(tensor))
        for title, parameter in part._parameters.items():
            state[f"{prefix}{title}"] = None if parameter is None else ("parameter", cell_of(parameter))
    return state


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield (path, what it is now) for everything inside a value."""
    if isinstance(value, _PLAIN):
        yield path, value
    elif isinstance(value, Tensor):
        yield path, ("tensor", cell_of(value), id(value))
    elif isinstance(value, np.ndarray):
        yield path, ("array", value.shape, hashlib.blake2b(value.tobytes()).digest())
    elif (state := _generator_state(value)) is not None:
        yield path, ("generator", state)
    elif isinstance(value, nn.Module | torch.Generator) or callable(value) or not depth:
        yield path, ("object", id(value))
    elif isinstance(value, Mapping):
        yield path, ("mapping", len(value))
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        yield path, ("sequence", len(value))
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item, depth - 1)
    else:
        yield path, ("object", type(value).__name__)
        for title, item in vars(value).items() if hasattr(value, "__dict__") else ():
            yield from _leaves(f"{path}.{title}", item, depth - 1)


def _generator_state(value: Any) -> Any:
    """Return the state of a generator of Python's or NumPy's; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        held: Any = getattr(value, "bit_generator", value)
        return repr(held.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return None


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the paths at which two snapshots differ, but for tensors that are kept anew in each call."""
    paths = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    moved = {path for path in paths if not (is_tensor(before.get(path)) and is_tensor(after.get(path)))}
    return {path for path in moved if not any(path.startswith((f"{up}[", f"{up}.")) for up in moved)}


def is_tensor(leaf: Any) -> bool:
    """Whether what a snapshot says of a path is a plain tensor: its cell and its id follow."""
    return isinstance(leaf, tuple) and leaf[0] == "tensor"


def global_generators() -> dict[str, Any]:
    """Return the states of Python's and NumPy's own generators."""
    return {"Python's random": random.getstate(), "NumPy's random": repr(np.random.get_state())}


@contextmanager
def same_generators() -> Iterator[None]:
    """Give PyTorch's, Python's and NumPy's own generators back the states that they have now."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class Counter(int):
    """A whole number that notes in ``uses`` whether anything but a sum with another is made of it."""

    uses: list[str]

    def __new__(cls, value: int, uses: list[str]) -> Counter:
        counter = super().__new__(cls, value)
        counter.uses = uses
        return counter


def _sum(name: str) -> Callable[..., Any]:
    def call(self: Counter, other: Any) -> Any:
        result = getattr(int, name)(self, other)
        return result if result is NotImplemented else Counter(result, self.uses)

    return call


def _use(name: str) -> Callable[..., Any]:
    def call(self: Counter, *others: Any) -> Any:
        self.uses.append(name)
        return getattr(int, name)(self, *others)

    return call


_SUMS = ("__add__", "__radd__", "__sub__")
_SILENT = ("__new__", "__getattribute__", "__getnewargs__", "__doc__")
for _title in vars(int):
    if _title.startswith("__") and _title not in _SILENT:
        setattr(Counter, _title, (_sum if _title in _SUMS else _use)(_title))
