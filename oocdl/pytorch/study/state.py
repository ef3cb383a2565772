"""The state of a module besides its weights: attributes, kept tensors, generators of random numbers."""

from __future__ import annotations

import functools
import gc
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH = 4
"""Depth to which objects inside of objects are looked at."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch gives to every module; parameters, buffers and submodules are among them."""
_LOOKED_AT = ("training", "_forward_hooks", "_forward_pre_hooks")
"""Those of them that hold a state of their own."""
_SLOTS: dict[type, tuple[str, ...]] = {
    FunctionType: ("__defaults__", "__kwdefaults__"),
    MethodType: ("__self__", "__func__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.partial: ("func", "args", "keywords"),
}
"""What is inside of a function and does not stand in its ``vars``."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_COUNTS = (int, float, dict, list, set, deque)
"""Types of the globals that are looked at where a function names them."""


def cell_of(tensor: Tensor) -> int:
    """Tell a tensor and its views from all others that live."""
    return int(tensor.untyped_storage()._cdata)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Return what every attribute of a module and its parts is now, by path; equal things compare equal."""
    state: dict[str, Any] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        for title, value in vars(part).items():
            if title not in _OF_MODULES or title in _LOOKED_AT:
                state.update(_leaves(f"{prefix}{title}", value, _DEPTH))
        for title, tensor in part._buffers.items():
            state[f"{prefix}{title}"] = None if tensor is None else ("buffer", cell_of(tensor))
        for title, parameter in part._parameters.items():
            state[f"{prefix}{title}"] = None if parameter is None else ("parameter", cell_of(parameter))
    for owner, cls in classes_of(module).items():
        for title, value in vars(cls).items():
            if not title.startswith("__"):
                state.update(_leaves(f"{owner}.{title}", value, _DEPTH))
    return state


def classes_of(module: nn.Module) -> dict[str, type]:
    """Return the classes of a module and its parts by name, but for PyTorch's; equal names are numbered."""
    classes = dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__[:-1])
    found = dict[str, type]()
    for cls in classes:
        if not _is_of_torch(cls):
            found[f"{cls.__name__} ({len(found)})" if cls.__name__ in found else cls.__name__] = cls
    return found


def _is_of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "torch"


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
    elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        yield path, ("iterator", tuple(_leaves("", _reduced(value), _DEPTH)))
    elif (
        isinstance(value, nn.Module | torch.Generator | ModuleType | type)
        or (callable(value) and _is_of_torch(value))
        or not depth
    ):
        yield path, ("object", id(value))
    elif isinstance(value, Mapping):
        yield path, ("mapping", len(value))
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield path, ("sequence", len(value))
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item, depth - 1)
    else:
        yield path, ("object", id(value) if isinstance(value, FunctionType) else type(value).__name__)
        for title, item in _inside(value):
            yield from _leaves(f"{path}.{title}", item, depth - 1)
        if isinstance(value, FunctionType):
            for title in value.__code__.co_names:
                if isinstance(item := value.__globals__.get(title), _COUNTS):
                    yield from _leaves(f"{value.__module__}.{title}", item, depth - 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    given = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    slots = [slot for one in given for slot in ((one,) if isinstance(one, str) else one)]
    for title in (*_SLOTS.get(type(value), ()), *(slot for slot in slots if not slot.startswith("__"))):
        if hasattr(value, title):
            yield title, getattr(value, title)
    if isinstance(value, FunctionType):
        for title, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield title, cell.cell_contents
            except ValueError:
                continue  # it is not set yet
    yield from vars(value).items() if hasattr(value, "__dict__") else ()


def _reduced(iterator: Any) -> Any:
    """Return what an iterator would be made of again, which tells where it is."""
    try:
        return iterator.__reduce__()
    except TypeError:
        return repr(iterator)


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


def generators() -> Callable[[], list[tuple[str, Any]]]:
    """Return a function that tells the states of Python's and NumPy's generators that are nobody's own."""
    is_frozen = gc.get_freeze_count() > 0  # as in a copy of a process, where nobody frees what is older
    gc.unfreeze()  # what is frozen would not be among the objects
    objects, kinds = gc.get_objects(), [np.random.Generator]
    if is_frozen:
        gc.freeze()
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    others = [one for kind in kinds for one in objects if type(one) is kind]

    def states() -> list[tuple[str, Any]]:
        own = [("Python's random", random.getstate()), ("NumPy's random", repr(np.random.get_state()))]
        return own + [("a Generator of NumPy's", _generator_state(one)) for one in others]

    return states


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


def counter(value: int, uses: list[str]) -> Counter:
    """Return a whole number that notes its uses."""
    made = Counter(value)
    made.uses = uses
    return made


def _noting(name: str) -> Callable[..., Any]:
    def call(self: Counter, *others: Any) -> Any:
        result = getattr(int, name)(self, *others)
        if name not in _SUMS:
            self.uses.append(name)
        elif result is not NotImplemented:
            return counter(result, self.uses)
        return result

    return call


_SUMS = ("__add__", "__radd__", "__sub__")
_SILENT = ("__new__", "__getattribute__", "__getnewargs__", "__doc__")
for _title in vars(int):
    if _title.startswith("__") and _title not in _SILENT:
        setattr(Counter, _title, _noting(_title))
