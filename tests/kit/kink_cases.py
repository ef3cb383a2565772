"""Functions of PyTorch at their bounds, ties and zeros, whose gradients networks of ours must have, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Point = tuple[float, ...]


@dataclass(frozen=True)
class Kink:
    """A function, and for each of its inputs the numbers at which its gradient is taken."""

    function: Callable[..., Tensor]
    points: tuple[Point, ...]
    versions: tuple[tuple[Point, ...], tuple[Point, ...]] | None = None
    """Elementwise slopes of PyTorch 2.13 and of 2.15, where these differ: we follow the newer."""

    torchscript: bool = True
    """Whether the older exporter can write it."""

    def wanted(self, weigh: Callable[[torch.Size], Any] = torch.ones) -> list[Tensor]:
        """The gradients that a network of ours has to have."""
        if self.versions is None:
            return self.slopes(weigh)
        weights = torch.as_tensor(weigh(torch.Size([len(self.points[0])])), dtype=torch.float64)
        return [weights * torch.tensor(slope) for slope in self.versions[1]]

    def slopes(self, weigh: Callable[[torch.Size], Any] = torch.ones) -> list[Tensor]:
        """The gradients that the installed PyTorch gives, of the sum of the results times weights."""
        given = [torch.tensor(point, dtype=torch.float64, requires_grad=True) for point in self.points]
        made = self.function(*given)
        found: Sequence[Tensor | None] = [None] * len(given)
        if made.requires_grad:
            found = torch.autograd.grad(made, given, torch.as_tensor(weigh(made.shape)), allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]


def _at(function: Callable[..., Tensor], *points: float, versions: tuple[Point, Point] | None = None) -> Kink:
    return Kink(function, (points,), versions and ((versions[0],), (versions[1],)))


def _two(function: Callable[..., Tensor], a: Point, b: Point, versions: Any = None) -> Kink:
    return Kink(function, (a, b), versions)


def _loss(function: Callable[..., Tensor]) -> Kink:
    return Kink(lambda x: function(x, torch.zeros_like(x))[None], ((-1, 0, 1),), torchscript=False)


def _rows(function: Callable[..., Tensor], *shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.reshape(1, 1, *shape)).flatten()


ZERO = torch.zeros((), dtype=torch.float64)
TIES = (0.0, 1.0, 2.0), (0.0, 1.0, 3.0)

KINKS: dict[str, Kink] = {
    "relu": _at(F.relu, -1, 0, 1),
    "relu6": _at(F.relu6, 0, 3, 6),
    "hardtanh": _at(F.hardtanh, -1, 0, 1),
    "clamp(-1, 1)": _at(lambda x: x.clamp(-1, 1), -1, 0, 1, versions=((1, 1, 1), (0, 1, 0))),
    "clamp(min=0)": _at(lambda x: x.clamp(min=0), -1, 0, 1, versions=((0, 1, 1), (0, 0, 1))),
    "clamp(max=0)": _at(lambda x: x.clamp(max=0), -1, 0, 1, versions=((1, 1, 0), (1, 0, 0))),
    "clamp(1, 1)": _at(lambda x: x.clamp(1, 1), 0, 1, 2, versions=((0, 1, 0), (0, 0, 0))),
    "clamp(2, 1)": _at(lambda x: x.clamp(2, 1), 0, 1, 1.5, 2, 3),
    "clamp(min=tensor)": _two(
        lambda x, b: x.clamp(min=b), *TIES, versions=(((1, 1, 0), (0, 0, 1)), ((0.5, 0.5, 0), (0.5, 0.5, 1)))
    ),
    "clamp(max=tensor)": _two(
        lambda x, b: x.clamp(max=b), *TIES, versions=(((1, 1, 1), (0, 0, 0)), ((0.5, 0.5, 1), (0.5, 0.5, 0)))
    ),
    "maximum(x, 0)": _at(lambda x: torch.maximum(x, ZERO), -1, 0, 1),
    "minimum(x, 0)": _at(lambda x: torch.minimum(x, ZERO), -1, 0, 1),
    "maximum": _two(torch.maximum, *TIES),
    "minimum": _two(torch.minimum, *TIES),
    "hardsigmoid": _at(F.hardsigmoid, -3, 0, 3),
    "hardswish": _at(F.hardswish, -3, 0, 3),
    "hardshrink": _at(F.hardshrink, -0.5, 0, 0.5, 1),
    "softshrink": _at(F.softshrink, -0.5, 0, 0.5, 1),
    "threshold": _at(lambda x: F.threshold(x, 0.0, 0.0), -1, 0, 1),
    "abs": _at(torch.abs, -1, 0, 1),
    "leaky_relu": _at(lambda x: F.leaky_relu(x, 0.25), -1, 0, 1),
    "prelu": _two(lambda x, w: F.prelu(x[None], w)[0], (-1.0, 0.0, 1.0), (0.25,)),
    "elu": _at(F.elu, -1, 0, 1),
    "elu(2)": _at(lambda x: F.elu(x, 2.0), -1, 0, 1),
    "selu": _at(F.selu, -1, 0, 1),
    "celu(2)": _at(lambda x: F.celu(x, 2.0), -1, 0, 1),
    "softplus": _at(F.softplus, -30, 0, 30),
    "softsign": _at(F.softsign, 0, 1),
    "sign": _at(torch.sign, -1, 0, 1),
    "floor": _at(torch.floor, 0, 1),
    "ceil": _at(torch.ceil, 0, 1),
    "round": _at(torch.round, 0.5, 1),
    "sqrt": _at(torch.sqrt, 0, 1),
    "reciprocal": _at(torch.reciprocal, 0, 1),
    "log": _at(torch.log, 0, 1),
    "x ** 0": _at(lambda x: x**0.0, 0, 1),
    "x ** 0.5": _at(lambda x: x**0.5, 0, 1),
    "x ** 1": _at(lambda x: x**1.0, 0, 1),
    "x ** 2": _at(lambda x: x**2.0, 0, 1),
    "x ** 3": _at(lambda x: x**3.0, -1, 0),
    "pow": _two(torch.pow, (0, 0, 0, 1, 2), (0, 1, 2, 0, 0)),
    "0 ** x": _at(lambda x: torch.pow(ZERO, x), 0, 1, 2),
    "where(x > 0, x x, 3 x)": _at(lambda x: torch.where(x > 0, x * x, 3 * x), 0, 1),
    "where(x > 0, sqrt(x), 0)": _at(lambda x: torch.where(x > 0, x.sqrt(), ZERO), 0, 1),
    "fmod": _two(torch.fmod, (3.0, -3.0, 4.0), (2.0, 2.0, 2.0)),
    "remainder": _two(torch.remainder, (3.0, -3.0, 4.0), (2.0, 2.0, 2.0)),
    "norm(2)": _at(lambda x: x.norm(dim=0, keepdim=True), 0, 0),
    "norm(1)": _at(lambda x: x.norm(p=1, dim=0, keepdim=True), -1, 0, 1),
    "amax": _at(lambda x: x.amax(0, keepdim=True), 0, 1, 1),
    "amin": _at(lambda x: x.amin(0, keepdim=True), 1, 1, 2),
    "max of all": _at(lambda x: x.max()[None], 0, 1, 1),
    "min of all": _at(lambda x: x.min()[None], 1, 1, 2),
    "prod": _at(lambda x: x.prod(0, keepdim=True), 0, 2, 3),
    "prod of two zeros": _at(lambda x: x.prod(0, keepdim=True), 0, 2, 0),
    "logsumexp": _at(lambda x: x.logsumexp(0, keepdim=True), 0, 0, -inf),
    "softmax": _at(lambda x: x.softmax(0)[:2], 0, 0, -inf),
    "max_pool1d": _at(_rows(lambda x: F.max_pool1d(x, 3, 1, 1), 4), 1, 1, 1, 0),
    "max_pool2d": _at(_rows(lambda x: F.max_pool2d(x, 2), 2, 2), 1, 1, 1, 1),
    "max_pool3d": _at(_rows(lambda x: F.max_pool3d(x, 2), 2, 2, 2), *[1] * 8),
    "l1_loss": _loss(F.l1_loss),
    "smooth_l1_loss": _loss(F.smooth_l1_loss),
    "huber_loss": _loss(F.huber_loss),
    "cross_entropy": _at(lambda x: F.cross_entropy(x[None], torch.zeros(1).long())[None], -999, 0, 999),
}
"""By the names of the table in ``docs/explanation/kinks.md``."""


class Several(torch.nn.Module):
    """Several functions, each of its own part of one long input."""

    def __init__(self, kinks: Sequence[Kink]) -> None:
        super().__init__()
        self.kinks = kinks
        self.sizes = [len(point) for kink in kinks for point in kink.points]

    def start(self) -> Tensor:
        """The input."""
        points = [number for kink in self.kinks for point in kink.points for number in point]
        return torch.tensor(points, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The results, in order."""
        parts = iter(x.split(self.sizes))
        return tuple(kink.function(*(next(parts) for _ in kink.points)) for kink in self.kinks)


def table() -> list[str]:
    """The rows of ``docs/explanation/kinks.md``: function, places, our slopes, those of PyTorch 2.13."""

    def shown(points: Any) -> str:
        return "; ".join(", ".join(f"{float(one) + 0:.3g}" for one in point) for point in points)

    return [
        f"| `{name}` | {shown(kink.points)} | {shown(kink.wanted())} | "
        f"{shown(kink.versions[0]) if kink.versions else ''} |"
        for name, kink in KINKS.items()
    ]


if __name__ == "__main__":
    print(*table(), sep="\n")
