"""Random small graphs, randomly cut: equal to the whole, and gradients equal to PyTorch's autograd."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, assume, given, reject, settings
from hypothesis import strategies as st

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.partition.cut_classes import find_classes
from oocdl.graph.transforms import channels_last
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.testing import run_graph
from tests.kit.interpret import evaluate
from tests.kit.op_cases import AS_CONVOLUTIONS

SEARCH = "OOCDL_EXAMPLES" in os.environ
"""Look for so many, other ones each time; else always the same hundred."""
EXAMPLES = int(os.environ.get("OOCDL_EXAMPLES", "100"))
MOST_ELEMENTS = 1500


@contextmanager
def all_channels_last() -> Iterator[None]:
    """``channels_last`` takes whatever has axes of space, however few channels it has."""
    before = channels_last.LEAST_CHANNELS, channels_last.CHANNELS_MULTIPLE
    channels_last.LEAST_CHANNELS, channels_last.CHANNELS_MULTIPLE = 1, 1
    try:
        yield
    finally:
        channels_last.LEAST_CHANNELS, channels_last.CHANNELS_MULTIPLE = before


@dataclass
class Maker:
    """Grows a random graph; ``draw`` decides, ``random`` fills."""

    draw: Callable[[Any], Any]
    random: np.random.Generator
    build: Builder = field(default_factory=lambda: Builder(RULES))
    pool: list[str] = field(default_factory=list)
    """Values to build on."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def one(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def weight(self, *shape: int) -> str:
        name = self.build.value(f"w{len(self.weights)}", shape, "float64", Role.WEIGHT)
        self.arrays[name] = self.random.normal(size=shape)
        self.weights.append(name)
        return name

    def leaf(self) -> None:
        """A value to begin with: data, a weight, or rows of a table."""
        rank = self.integer(2, 5)
        shape = tuple(self.integer(1, 3 if axis < 2 else 7) for axis in range(rank))
        kind = self.one("input", "input", "weight", "rows")
        if kind == "weight":
            self.pool.append(self.weight(*shape))
            return
        name = f"x{len(self.arrays)}"
        if kind == "rows":
            rows = self.integer(1, 5)
            self.build.value(name, shape[:2], "int64", Role.INPUT)
            self.arrays[name] = self.random.integers(rows, size=shape[:2])
            self.pool.append(self.build("Gather", self.weight(rows, *shape[2:]), name))
            return
        self.build.value(name, shape, "float64", Role.INPUT)
        self.arrays[name] = self.random.normal(size=shape)
        self.pool.append(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.build.shape(name)

    def step(self) -> None:
        """One more operation on a value of the pool, mostly the last."""
        x = self.pool[-1] if self.integer(0, 2) else self.one(*self.pool)
        makers = [
            self.pointwise,
            self.binary,
            self.softmax,
            self.reduce,
            self.move,
            self.reshape,
            self.einsum,
        ]
        makers += [self.norm, self.concat, self.resample]
        if len(self.shape(x)) > 2:
            makers += [self.conv, self.transposed, self.pool_max] * 2
        y = self.one(*makers)(x)
        if y is not None and self.build.values[y].size <= MOST_ELEMENTS:
            self.pool.append(y)

    def pointwise(self, x: str) -> str:
        op = self.one("Neg", "Sigmoid", "Tanh", "Relu", "LeakyRelu", "Gelu", "Softplus", "Identity", "Abs")
        attrs: dict[str, Any] = {}
        if op == "LeakyRelu":
            attrs["alpha"] = 0.1
        if op == "Gelu":
            attrs["approximate"] = self.one("none", "tanh")
        return self.build(op, x, **attrs)

    def binary(self, x: str) -> str:
        shape = self.shape(x)
        same = [name for name in self.pool if self.shape(name) == shape]
        if self.integer(0, 1) and len(same) > 1:
            return self.build(self.one("Add", "Sub", "Mul"), x, self.one(*same))
        thin = tuple(extent if self.integer(0, 1) else 1 for extent in shape)[self.integer(0, len(shape)) :]
        other = self.weight(*thin)
        first, second = (x, other) if self.integer(0, 1) else (other, x)
        return self.build(self.one("Add", "Sub", "Mul", "Max", "Min"), first, second)

    def softmax(self, x: str) -> str:
        return self.build(self.one("Softmax", "LogSoftmax"), x, axis=self.integer(0, len(self.shape(x)) - 1))

    def axes(self, x: str) -> tuple[int, ...]:
        rank = len(self.shape(x))
        return tuple(sorted(self.draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=rank))))

    def reduce(self, x: str) -> str:
        y = self.build(self.one("ReduceSum", "LogSumExp"), x, axes=self.axes(x))
        return self.build(self.one("Add", "Mul"), x, y) if self.integer(0, 1) else y

    def norm(self, x: str) -> str:
        axes = self.axes(x)
        mean, var = self.build.node("Moments", (x,), {"axes": axes})
        return self.build("Normalize", x, mean, var, axes=axes, eps=1e-2)

    def concat(self, x: str) -> str:
        axis = self.integer(0, len(self.shape(x)) - 1)

        def fits(name: str) -> bool:
            shape, mine = self.shape(name), self.shape(x)
            return len(shape) == len(mine) and all(
                a == b for i, (a, b) in enumerate(zip(shape, mine, strict=True)) if i != axis
            )

        parts = [self.one(*filter(fits, self.pool)) for _ in range(self.integer(0, 2))]
        parts.insert(self.integer(0, len(parts)), x)
        return self.build("Concat", *parts, axis=axis)

    def resample(self, x: str) -> str:
        return self.build(
            "Resample",
            x,
            axis=self.integer(0, len(self.shape(x)) - 1),
            size=self.integer(1, 12),
            mode=self.one("nearest", "linear"),
            scale=None,
            nearest_mode="round_prefer_floor",
            transposed=False,
            coordinates=self.one("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"),
        )

    def move(self, x: str) -> str | None:
        shape = self.shape(x)
        axis = self.integer(0, len(shape) - 1)
        kind = self.one("Transpose", "Slice", "Pad", "Split", "Expand")
        if kind == "Transpose":
            return self.build(kind, x, perm=tuple(self.draw(st.permutations(range(len(shape))))))
        if kind == "Slice":
            start = self.integer(0, shape[axis] - 1)
            stop, step = self.integer(start + 1, shape[axis]), self.integer(1, 3)
            return self.build(kind, x, axis=axis, start=start, stop=stop, step=step)
        if kind == "Pad":
            return self.build(kind, x, axis=axis, before=self.integer(0, 3), after=self.integer(0, 3))
        if kind == "Expand":
            wide = tuple(self.integer(1, 4) if extent == 1 else extent for extent in shape)
            return self.build(kind, x, shape=(*(2,) * self.integer(0, 1), *wide))
        if shape[axis] < 2:
            return None
        first = self.integer(1, shape[axis] - 1)
        parts = self.build.node(kind, (x,), {"axis": axis, "sizes": (first, shape[axis] - first)})
        self.pool.append(parts[0])
        return parts[1]

    def reshape(self, x: str) -> str:
        """Merge two neighbours, or split an axis, or add one of extent one."""
        shape = list(self.shape(x))
        axis = self.integer(0, len(shape) - 1)
        kind = self.one("merge", "split", "one", "other")
        if kind == "merge" and len(shape) > 1:
            axis = min(axis, len(shape) - 2)
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        elif kind == "split":
            inner = self.one(*(d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0))
            shape[axis : axis + 1] = [shape[axis] // inner, inner]
        elif kind == "other":
            shape = list(self.draw(st.permutations(shape)))
        else:
            shape.insert(axis, 1)
        assume(len(shape) <= 7)
        return self.build("Reshape", x, shape=tuple(shape))

    def einsum(self, x: str) -> str:
        """Contract an axis with a matrix, or two values of equal shape with each other."""
        shape = self.shape(x)
        mine = ascii_lowercase[: len(shape)]
        axis = self.integer(0, len(shape) - 1)
        same = [name for name in self.pool if self.shape(name) == shape]
        if self.integer(0, 2):
            other, theirs = self.weight(shape[axis], self.integer(1, 4)), mine[axis] + "z"
            out = mine.replace(mine[axis], "z")
        else:
            other, theirs = self.one(*same), mine.replace(mine[axis], "z")
            summed = self.one(*mine)
            out = mine.replace(summed, "") + "z"
        if self.integer(0, 1):
            out = "".join(self.draw(st.permutations(out)))
        return self.build("Einsum", x, other, equation=f"{mine},{theirs}->{out}")

    def window(self, rank: int, most_pad: int) -> dict[str, Any]:
        return {
            "strides": tuple(self.integer(1, 3) for _ in range(rank)),
            "dilations": tuple(self.one(1, 1, 2) for _ in range(rank)),
            "pads": tuple(self.integer(0, most_pad) for _ in range(2 * rank)),
        }

    def conv(self, x: str) -> str | None:
        shape = self.shape(x)
        rank = len(shape) - 2
        if rank > 3:
            return None
        kernel, window = tuple(self.integer(1, 3) for _ in range(rank)), self.window(rank, 2)
        if not _room(shape[2:], kernel, window):
            return None
        y = self.build("Conv", x, self.weight(self.integer(1, 4), shape[1], *kernel), **window)
        return (
            self.build("Add", y, self.weight(1, self.shape(y)[1], *(1,) * rank)) if self.integer(0, 1) else y
        )

    def transposed(self, x: str) -> str | None:
        shape = self.shape(x)
        rank = len(shape) - 2
        if rank > 3:
            return None
        kernel, window = tuple(self.integer(1, 3) for _ in range(rank)), self.window(rank, 1)
        spatial = tuple(
            (extent - 1) * s + d * (k - 1) + 1 - low - high + self.integer(0, s - 1)
            for extent, k, s, d, low, high in zip(
                shape[2:],
                kernel,
                window["strides"],
                window["dilations"],
                window["pads"][:rank],
                window["pads"][rank:],
                strict=True,
            )
        )
        if min(spatial) < 1:
            return None
        w = self.weight(shape[1], self.integer(1, 3), *kernel)
        return self.build("ConvTranspose", x, w, spatial=spatial, **window)

    def pool_max(self, x: str) -> str | None:
        shape = self.shape(x)
        rank = len(shape) - 2
        if rank > 3:
            return None
        kernel, window = tuple(self.integer(1, 3) for _ in range(rank)), self.window(rank, 1)
        pads = tuple(
            0 if k == 1 or e < 3 else p
            for k, e, p in zip(kernel * 2, shape[2:] * 2, window["pads"], strict=True)
        )
        window["pads"] = pads
        if not _room(shape[2:], kernel, window):
            return None
        return self.build("MaxPool", x, kernel_shape=kernel, **window)

    def finish(self) -> tuple[Graph, Graph]:
        """Forward only, and with gradients: the outputs are the last values, the loss, then the gradients."""
        build = self.build
        ends = list(dict.fromkeys(self.pool[-2:]))
        total: str | None = None
        for end in ends:
            factor = build.constant(self.random.normal(size=self.shape(end)))
            axes = tuple(range(len(self.shape(end))))
            part = build("Reshape", build("ReduceSum", build("Mul", end, factor), axes=axes), shape=())
            total = part if total is None else build("Add", total, part)
        assert total is not None
        build.outputs = [*(build("Neg", end) for end in ends), total]
        forward = build.graph()
        build.role = Role.GRADIENT
        grads = differentiate(build, total, self.weights)
        build.outputs += [build("Neg", grads.get(name) or build.zeros_like(name)) for name in self.weights]
        return forward, build.graph()


def _room(extents: tuple[int, ...], kernel: tuple[int, ...], window: dict[str, Any]) -> bool:
    rank = len(extents)
    pads, dilations = window["pads"], window["dilations"]
    return all(
        extents[i] + pads[i] + pads[rank + i] >= dilations[i] * (kernel[i] - 1) + 1 for i in range(rank)
    )


def text(graph: Graph) -> str:
    """The graph, readable, for a failure."""
    lines = [
        f"{v.name}: {v.role} {v.dtype} {v.shape}"
        for v in graph.values.values()
        if v.role not in ("activation", "gradient")
    ]
    lines += [f"{', '.join(n.outputs)} = {n.op}({', '.join(n.inputs)}) {dict(n.attrs)}" for n in graph.nodes]
    return "\n".join(lines)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not SEARCH,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    phases=[Phase.generate] if SEARCH else [Phase.generate, Phase.shrink],
)
@given(st.data())
def test_a_random_graph_cut_is_whole_and_its_gradients_are_autograds(data: st.DataObject) -> None:
    maker = Maker(data.draw, np.random.default_rng(data.draw(st.integers(0, 1000))))
    maker.leaf()
    for _ in range(data.draw(st.sampled_from((3, 4, 5, 6, 2, 1)))):
        maker.step()
    assume(maker.weights)
    forward, graph = maker.finish()
    small = canonicalize(graph, RULES)
    classes = find_classes(factorize(small, RULES))
    roomy = [number for number, extent in classes.extents.items() if extent > 1]
    counts = {number: data.draw(st.sampled_from((2, 3, 1, 4))) for number in roomy}
    cuts = {number: count for number, count in counts.items() if count > 1}
    last = data.draw(st.booleans())
    if os.environ.get("OOCDL_SHOW"):
        print(text(graph), f"\ncuts={cuts}\n")
    given_arrays = maker.arrays
    try:
        whole = run_graph(graph, RULES, given_arrays).outputs
        with all_channels_last():
            cut = run_graph(graph, AS_CONVOLUTIONS, given_arrays, cuts=cuts, channels_last=last).outputs
    except UnsupportedError as error:
        assert "pads a single number" in str(error), text(graph)
        reject()
    tensors = {k: torch.as_tensor(a) for k, a in given_arrays.items()}
    for name in maker.weights:
        tensors[name].requires_grad_()
    found = evaluate(forward, tensors)
    truth = [found[name] for name in forward.outputs]
    truth += [
        -torch.zeros_like(tensors[name]) if grad is None else -grad
        for name, grad in zip(
            maker.weights,
            torch.autograd.grad(truth[-1], [tensors[n] for n in maker.weights], allow_unused=True)
            if truth[-1].requires_grad
            else [None] * len(maker.weights),
            strict=True,
        )
    ]
    largest = max(float(t.detach().abs().max()) for t in truth)
    for title, expected in zip(small.outputs, truth, strict=True):  # equal values have one name there
        wanted = expected.detach().numpy()
        size = max(float(np.abs(wanted).max()), 1e-3 * max(largest, 1.0))  # what goes in is of size one
        for kind, result in (("whole", whole[title]), ("cut", cut[title])):
            error = float(np.abs(result - wanted).max()) / size
            assert error <= 1e-10, f"{kind} '{title}' is off by {error:.1e}; cuts={cuts}\n{text(graph)}"
