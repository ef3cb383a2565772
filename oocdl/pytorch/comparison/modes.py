"""Modes in which a module is called: with the random numbers that its file takes, or in other roundings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Graph, Role
from oocdl.pytorch.module_calls import tensors_in
from oocdl.pytorch.other_words import exponential


@dataclass(frozen=True)
class Draw:
    """Random numbers of a file."""

    kind: str
    """``dropout`` (0 below a ratio), ``below`` (1 below a probability), ``normal`` or ``uniform``."""
    values: tuple[str, ...]
    """The values of uniform numbers that they are made of."""
    shape: tuple[int, ...]


def draws_of(graph: Graph) -> tuple[Draw, ...]:
    """Return the random numbers of a graph in the order in which they are drawn."""
    readers = graph.consumers()
    draws: list[Draw] = []
    values = graph.of_role(Role.RANDOM)
    while values:
        first, *values = values
        ops = {node.op for node in readers.get(first.name, ())}
        kind = "dropout" if "Dropout" in ops else "below" if "Less" in ops else "uniform"
        names: tuple[str, ...] = (first.name,)
        if ops == {"Sub"} and values and values[0].shape == first.shape:  # Box and Muller take two
            kind, names = "normal", (*names, values.pop(0).name)
        draws.append(Draw(kind, names, first.shape))
    return tuple(draws)


_NORMAL = ("randn", "randn_like", "normal", "normal_")
_DRAWING = ("bernoulli", "bernoulli_", "rand", "rand_like", "uniform_", "exponential_", *_NORMAL)
"""PyTorch's operators whose random numbers a file can take the place of."""


class Pinned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a module the random numbers of a file, in order, and notes which the file has to take."""

    def __init__(self, draws: Sequence[Draw], dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left, self.dtype = [*draws], dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.random: dict[str, Tensor] = {}
        """Value of the file -> uniform numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").partition(".")[0]
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name == "native_dropout":
            x, ratio, training = args
            kept = self._draw(name, x.shape, 1 - ratio) if training else torch.ones_like(x)
            return x * kept / max(1 - ratio, 1e-300), kept.bool()
        if name not in _DRAWING:
            if "scaled_dot_product" in name:
                return func(*args, **kwargs)  # without dropout
            raise UnsupportedError(f"random numbers of {name} cannot be compared with those of a file")
        return self._made(name, func, args, kwargs)

    def _made(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        bound = {slot.name: value for slot, value in zip(func._schema.arguments, args, strict=False)}
        bound |= kwargs
        x = bound.get("self")
        if not {"self", "size"} & bound.keys():  # normal(mean, std), which has no gradient
            raise UnsupportedError(f"random numbers of {func} cannot be compared with those of a file")
        shape = tuple(x.shape) if isinstance(x, Tensor) else tuple(bound["size"])
        wanted = bound.get("dtype") or (x.dtype if isinstance(x, Tensor) else torch.get_default_dtype())
        if name.startswith("bernoulli"):
            drawn = self._draw(name, shape, bound.get("p", x if name == "bernoulli" else 0.5))
        elif name in _NORMAL:
            drawn = self._draw(name, shape) * bound.get("std", 1.0) + bound.get("mean", 0.0)
        else:
            low, high = bound.get("from", 0.0), bound.get("to", 1.0)
            drawn = self._draw(name, shape) * (high - low) + low
            if name == "exponential_":
                drawn = exponential(drawn, bound.get("lambd", 1.0))
        drawn = drawn.to(wanted)
        return x.copy_(drawn) if isinstance(x, Tensor) and name.endswith("_") else drawn

    def check_all_drawn(self) -> None:
        """Raise UnsupportedError if the file draws more than the module did."""
        if self.left:
            draw = self.left[0]
            drawn = f"random numbers ({draw.kind}) of shape {list(draw.shape)}"
            raise UnsupportedError(f"the file draws {drawn}, the module does not")

    def _draw(self, name: str, shape: Sequence[int], chance: float | Tensor | None = None) -> Tensor:
        """Return what the file draws next, if its shape is this; with ``chance``, ones and zeros."""
        if not shape and name == "rand" and (not self.left or self.left[0].shape):
            # Code that drops layers draws one at a rate of 0, too; no file does. If used, results differ.
            return torch.rand((), generator=self.generator, dtype=torch.float64)
        draw = self.left.pop(0) if self.left else None
        if draw is None or draw.shape != tuple(shape):
            there = "nothing more" if draw is None else f"{draw.kind} of shape {list(draw.shape)}"
            drawn = f"the module draws random numbers ({name}) of shape {list(shape)}"
            raise UnsupportedError(f"{drawn}, its file {there}")
        uniform = [torch.rand(draw.shape, generator=self.generator, dtype=torch.float64) for _ in draw.values]
        self.random |= {value: u.to(self.dtype) for value, u in zip(draw.values, uniform, strict=True)}
        first = self.random[draw.values[0]]
        if chance is not None:
            return first >= 1 - chance if draw.kind == "dropout" else first < chance
        if draw.kind == "normal":  # Box and Muller's, as ``graph/onnx/lower/arithmetic`` has them
            second = self.random[draw.values[1]]
            return torch.sqrt(-2 * torch.log(1 - first)) * torch.cos(2 * math.pi * second)
        return first


Results = Mapping[str, Tensor]
"""``output NAME``, ``gradient NAME``, ``update NAME`` -> what was computed."""
_SMALL = 1e-3
"""A tensor's own largest number counts for its size, but no less than so much of the largest of its kind."""


def errors(found: Results, wanted: Results) -> dict[str, float]:
    """Return by how much each result is off, relative to its largest number; infinite if one is missing."""
    largest, off = dict[str, float](), dict[str, float]()
    for title, x in wanted.items():
        kind = title.partition(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), _size(x))
    for title in {**wanted, **found}:
        kind = title.partition(" ")[0]
        a, b = found.get(title), wanted.get(title)
        if a is None or b is None:
            there = a if b is None else b
            missing = kind != "gradient" or there is None or bool(there.count_nonzero())
            off[title] = float("inf") if missing else 0.0  # a gradient of zeros is as good as none
            continue
        off[title] = _off(a, b, max(_size(b), _SMALL * largest[kind]))
    return off


def _size(x: Tensor) -> float:
    finite = x.double().nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else x.double()
    return float(finite.abs().max()) if x.numel() else 0.0


def _off(a: Tensor, b: Tensor, size: float) -> float:
    if a.shape == b.shape and not b.numel():
        return 0.0
    if a.shape != b.shape or not b.is_floating_point():
        return 0.0 if torch.equal(a.to(b.dtype), b) else float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    away = torch.where(same, torch.zeros_like(a), (a - b).abs()).nan_to_num(float("inf"))
    worst = float(away.max())
    return worst / size if size else worst and float("inf")


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out roundings to fewer bits that a module's code asks for, as oocdl does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        rounds = func is torch.ops.aten._to_copy.default and wanted is not None and wanted.is_floating_point
        if rounds and args[0].dtype == self.dtype:
            kwargs["dtype"] = self.dtype
        return func(*args, **kwargs)


_LIMITS, _RMS_NORM = torch.finfo, torch.rms_norm


@contextlib.contextmanager
def limits_of(own: torch.dtype, used: torch.dtype) -> Iterator[None]:
    """Give code that asks for the limits of the used type those of the module's own, which its file holds."""

    def limits(dtype: torch.dtype | None = None) -> torch.finfo:
        return _LIMITS(own if dtype == used else dtype or torch.get_default_dtype())

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        least = _LIMITS(own if own == torch.float64 else torch.float32).eps
        return _RMS_NORM(x, shape, weight, least if eps is None else eps)

    with patch("torch.finfo", limits), patch("torch.rms_norm", rms_norm):
        yield


class RightNorms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps gradients of norms right: of one sample, PyTorch's kernel misreads some orders in memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            args = (*(x.contiguous() for x in args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))


class Jitter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves every new result by about its rounding: PyTorch against itself, in another order of sums."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(slot.alias_info is not None for slot in func._schema.returns):
            return out
        for x in tensors_in(out):
            if x.is_floating_point() and x.numel():
                bits = torch.rand(x.shape, generator=self.random, dtype=x.dtype).mul_(2).sub_(1)
                moved = x + bits.mul_(_LIMITS(x.dtype).eps) * x
                x.copy_(moved.where(moved.isfinite(), x))
        return out
