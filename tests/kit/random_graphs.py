"""Random small graphs: a maker that grows them, and their oracle. Seeds decide all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array, Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES

MOST_ELEMENTS, MOST_AXES = 1500, 7


@dataclass
class Maker:
    """Grows a random graph of float64 values; the seed decides and fills."""

    random: np.random.Generator
    build: Builder = field(default_factory=lambda: Builder(RULES))
    pool: list[str] = field(default_factory=list)
    """Values to build on."""
    arrays: dict[str, Array] = field(default_factory=dict)
    """Contents of inputs and weights."""
    weights: list[str] = field(default_factory=list)

    def integer(self, low: int, high: int) -> int:
        """A number, both ends included."""
        return int(self.random.integers(low, high + 1))

    def one(self, *choices: Any) -> Any:
        """One of some."""
        return choices[self.integer(0, len(choices) - 1)]

    def flip(self) -> bool:
        """Yes or no."""
        return bool(self.integer(0, 1))

    def order(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """All of them, in any order."""
        return tuple(items[place] for place in self.random.permutation(len(items)))

    def axis(self, x: str) -> int:
        """Any axis."""
        return self.integer(0, len(self.shape(x)) - 1)

    def axes(self, x: str) -> tuple[int, ...]:
        """One axis or more, sorted."""
        places = self.order(range(len(self.shape(x))))
        return tuple(sorted(places[: self.integer(1, len(places))]))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return self.build.shape(name)

    def same(self, x: str) -> list[str]:
        """What has the shape of ``x``."""
        return [name for name in self.pool if self.shape(name) == self.shape(x)]

    def weight(self, *shape: int) -> str:
        """A new weight."""
        name = self.build.value(f"w{len(self.weights)}", shape, "float64", Role.WEIGHT)
        self.arrays[name] = self.random.normal(size=shape)
        self.weights.append(name)
        return name

    def thin(self, x: str) -> str:
        """A new weight that broadcasts to ``x``."""
        shape = tuple(extent if self.flip() else 1 for extent in self.shape(x))
        return self.weight(*shape[self.integer(0, len(shape)) :])

    def given(self, array: Array, role: Role = Role.STATE) -> str:
        """A new value with this content, which is no weight; samples of a batch have to be inputs."""
        name = f"x{len(self.arrays)}"
        self.arrays[name] = array
        return self.build.value(name, array.shape, array.dtype.name, role)

    def apart(self, x: str) -> str:
        """``x`` plus a constant each, so that no two numbers are equal or whole but for rounding."""
        return self.build("Add", x, self.build.constant(self.random.uniform(0.1, 0.4, self.shape(x))))

    def positive(self, x: str, least: float) -> str:
        """``x² + least``."""
        return self.build("Add", self.build("Mul", x, x), self.build.like(least, x))

    def leaf(self) -> None:
        """A value to begin with: data, a weight, or rows of a table."""
        rank = self.integer(2, 5)
        shape = tuple(self.integer(1, 3 if axis < 2 else 7) for axis in range(rank))
        kind = self.one("input", "input", "weight", "rows")
        if kind == "weight":
            self.pool.append(self.weight(*shape))
        elif kind == "rows":
            rows = self.integer(1, 5)
            ids = self.given(self.random.integers(rows, size=shape[:2]), Role.INPUT)
            self.pool.append(self.build("Gather", self.weight(rows, *shape[2:]), ids))
        else:
            self.pool.append(self.given(self.random.normal(size=shape), Role.INPUT))

    def step(self, makers: Sequence[Step]) -> None:
        """One more operation on a value of the pool, mostly the last; none if it does not fit that value."""
        x = self.pool[-1] if self.integer(0, 2) else self.one(*self.pool)
        y = self.one(*makers)(self, x)
        if y is not None and self.build.values[y].size <= MOST_ELEMENTS and len(self.shape(y)) <= MOST_AXES:
            self.pool.append(y)

    def finish(self) -> tuple[Graph, Graph]:
        """Forward only, and with gradients: the outputs are the last values, the loss, then the gradients."""
        build = self.build
        ends = list(dict.fromkeys(self.pool[-2:]))
        total: str | None = None
        for end in ends:
            factor = build.constant(self.random.normal(size=self.shape(end)))
            product, axes = build("Mul", end, factor), tuple(range(len(self.shape(end))))
            part = build("Reshape", build("ReduceSum", product, axes=axes), shape=()) if axes else product
            total = part if total is None else build("Add", total, part)
        assert total is not None
        build.outputs = [*(build("Neg", end) for end in ends), total]
        forward = build.graph()
        build.role = Role.GRADIENT
        grads = differentiate(build, total, self.weights)
        build.outputs += [build("Neg", grads.get(name) or build.zeros_like(name)) for name in self.weights]
        return forward, build.graph()


Step = Callable[[Maker, str], str | None]
"""Adds nodes to a value; returns what they make, or None if they do not fit it."""


def text(graph: Graph) -> str:
    """The graph, readable, for a failure."""
    lines = [
        f"{v.name}: {v.role} {v.dtype} {v.shape}"
        for v in graph.values.values()
        if v.role not in ("activation", "gradient")
    ]
    lines += [f"{', '.join(n.outputs)} = {n.op}({', '.join(n.inputs)}) {dict(n.attrs)}" for n in graph.nodes]
    return "\n".join(lines)
