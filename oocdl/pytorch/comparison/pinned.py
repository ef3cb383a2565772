"""Random layers with given numbers: a module and its file drop the same elements, and can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Graph, Role


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
        if name not in _MADE:
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
        drawn = _MADE[name](self, name, shape, bound).to(wanted)
        return x.copy_(drawn) if isinstance(x, Tensor) and name.endswith("_") else drawn

    def check_all_drawn(self) -> None:
        """Raise UnsupportedError if the file draws more than the module did."""
        if self.left:
            draw = self.left[0]
            drawn = f"random numbers ({draw.kind}) of shape {list(draw.shape)}"
            raise UnsupportedError(f"the file draws {drawn}, the module does not")

    def _draw(self, name: str, shape: Sequence[int], chance: float | Tensor | None = None) -> Tensor:
        """Return what the file draws next, if its shape is this; with ``chance``, ones and zeros."""
        draw = self.left.pop(0) if self.left else None
        if draw is None or draw.shape != tuple(shape):
            there = "nothing more" if draw is None else f"{draw.kind} of shape {list(draw.shape)}"
            raise UnsupportedError(
                f"the module draws random numbers ({name}) of shape {list(shape)}, its file {there}"
            )
        uniform = [torch.rand(draw.shape, generator=self.generator, dtype=torch.float64) for _ in draw.values]
        self.random |= {value: u.to(self.dtype) for value, u in zip(draw.values, uniform, strict=True)}
        first = self.random[draw.values[0]]
        if chance is not None:
            return first >= 1 - chance if draw.kind == "dropout" else first < chance
        if draw.kind == "normal":
            return _normal(first, self.random[draw.values[1]])
        return first


def _normal(first: Tensor, second: Tensor) -> Tensor:
    """Box and Muller's, as ``graph/onnx/lower/random`` has them."""
    return torch.sqrt(-2 * torch.log(1 - first)) * torch.cos(2 * math.pi * second)


def _scaled(low: float, high: float) -> Callable[[Tensor], Tensor]:
    return lambda uniform: uniform * (high - low) + low


def _bernoulli(pinned: Pinned, name: str, shape: Sequence[int], bound: Mapping[str, Any]) -> Tensor:
    chance = bound.get("p", bound["self"] if name == "bernoulli" else 0.5)
    return pinned._draw(name, shape, chance)


def _uniform(pinned: Pinned, name: str, shape: Sequence[int], bound: Mapping[str, Any]) -> Tensor:
    return _scaled(bound.get("from", 0.0), bound.get("to", 1.0))(pinned._draw(name, shape))


def _gaussian(pinned: Pinned, name: str, shape: Sequence[int], bound: Mapping[str, Any]) -> Tensor:
    drawn: Tensor = pinned._draw(name, shape) * bound.get("std", 1.0) + bound.get("mean", 0.0)
    return drawn


_MADE: Mapping[str, Callable[[Pinned, str, Sequence[int], Mapping[str, Any]], Tensor]] = {
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    **dict.fromkeys(("rand", "rand_like", "uniform_"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal_", "normal"), _gaussian),
}
"""PyTorch's operators that draw numbers -> what they make of the file's."""
