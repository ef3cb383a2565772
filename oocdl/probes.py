"""What is measured of a machine: small programs, one operator each, of sizes as units have them.

A probe is a graph of one operator, cut by nothing. One that is bound by memory is measured before a
Neg, and the time of the Neg alone is taken off: what only changes how an array is seen (Transpose,
Slice, ..) costs its time when the next operator reads it, and onnxruntime spends twice as long on an
array that leaves the program as on one that another operator reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oocdl.graph.factorize import factorize
from oocdl.graph.fitting import Layering, Limits
from oocdl.graph.ir import Graph, Role, Shape
from oocdl.graph.layout import channels_last
from oocdl.graph.plan import plan_step
from oocdl.graph.program import Program
from oocdl.graph.rates import LOW, THIN
from oocdl.graph.rounded import PRODUCTS, STORED, WINDOWED
from oocdl.graph.rule import Builder
from oocdl.ops import RULES

CHANNELS = (1, 4, 16, 64, 256)
EXTENTS = (1, 4, 16, 64, 256, 1024)
LOW_CHANNELS, LOW_EXTENTS = (1, 16, 64, 256), (16, 256, 1024)
"""In 16 bits, where few are computed at all."""
ALONE = frozenset({"Neg", "Greater", "Less", "Equal", "And", "Or", "Not"})
"""Operators bound by memory that are measured alone; the others are measured before a Neg."""

Given = tuple[Shape, str]
"""Shape and dtype of an input."""


@dataclass(frozen=True)
class Probe:
    """One operator on arrays of given shapes."""

    op: str
    inputs: tuple[Given, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    chained: bool = False
    """Whether it is measured before a Neg."""

    def program(self, last: Collection[int] = ()) -> Program:
        """The operator alone, or before a Neg; of a convolution what has a rank in ``last`` lies so."""
        return _program(self, last)

    def rest(self) -> Program | None:
        """The Neg alone, where it is part of ``program``."""
        if not self.chained:
            return None
        build = Builder(RULES)
        inputs = [build.value(f"x{i}", *given, Role.INPUT) for i, given in enumerate(self.inputs)]
        made = build(self.op, *inputs, **self.attrs)
        return _program(Probe("Neg", ((build.shape(made), build.dtype(made)),)))


def _program(probe: Probe, last: Collection[int] = ()) -> Program:
    build = Builder(RULES)
    inputs = [build.value(f"x{i}", *given, Role.INPUT) for i, given in enumerate(probe.inputs)]
    made = build.node(probe.op, inputs, dict(probe.attrs))
    if probe.chained:
        made = (build("Neg", made[0]),)
    return _planned(build, *made, last=last)


def _planned(build: Builder, *outputs: str, last: Collection[int] = ()) -> Program:
    """All of a graph as one program."""
    build.outputs = list(outputs)
    factored = factorize(_with_wide_sums(build.graph()), RULES)
    layering = Layering(channels_last(factored, last), RULES)
    plan = plan_step(layering, Limits(1 << 50))
    [unit] = [unit for layer in plan.layers for unit in layer.units]
    return unit.program


def _with_wide_sums(graph: Graph) -> Graph:
    """Products of 16 bits have results of 32 but for convolutions forward, as ``rounded`` has it."""
    made = [name for node in graph.nodes if node.op in PRODUCTS - WINDOWED for name in node.outputs]
    wide = {name: graph.values[name] for name in made if graph.values[name].dtype == STORED}
    sums = {name: replace(value, dtype="float32") for name, value in wide.items()}
    return replace(graph, values={**graph.values, **sums})


Heavy = tuple[str, int, Probe]
"""A kind of heavy operator and its size, as ``heavy_kind`` has them, and the probe for it."""


def in_bfloat16(scale: float) -> Iterator[Heavy]:
    """The products again, on operands of 16 bits; fewer sizes."""
    for kind, size, probe in (*convolutions(scale, LOW_CHANNELS), *products(scale, LOW_EXTENTS)):
        inputs = tuple((shape, "bfloat16") for shape, _ in probe.inputs)
        yield kind + LOW, size, replace(probe, inputs=inputs)


def convolutions(scale: float, counts: Sequence[int] = CHANNELS) -> Iterator[Heavy]:
    """Every kind of convolution; ``scale`` 1 is for measuring, less is for tests."""
    for axes in (2, 3):
        for channels in counts:
            # As networks have them: the more channels, the fewer places; volumes have more than images.
            most = scale * (1 << (21 if axes == 3 else 20)) / max(channels, 16)
            places = max(most / (4 if channels > 64 else 1), 64)
            edge = max(int(places ** (1 / axes)) // 2 * 2, 2)
            for kernel, stride in ((1, 1), (3, 1), (1, 2), (3, 2)):
                what = f"{axes}d {'strided ' * (stride > 1)}{'window' if kernel > 1 else 'point'}"
                for probe in _convolution(axes, channels, max(channels, 16), edge, kernel, stride):
                    yield f"{probe.op} {what}", channels * kernel**axes, probe
            if axes == 3:
                for what, probe in _slab_gradients(channels, places):
                    yield f"ConvWeightGrad 3d {what}", channels * 27, probe


def _convolution(
    axes: int, inside: int, outside: int, edge: int, kernel: int, stride: int
) -> Iterator[Probe]:
    slides = {"strides": (stride,) * axes, "dilations": (1,) * axes, "pads": (kernel // 2,) * (2 * axes)}
    x: Given = ((1, inside, *(edge,) * axes), "float32")
    y: Given = ((1, outside, *((edge + stride - 1) // stride,) * axes), "float32")
    w: Given = ((outside, inside, *(kernel,) * axes), "float32")
    yield Probe("Conv", (x, w), slides)
    yield Probe("ConvTranspose", (y, w), {**slides, "spatial": x[0][2:]})
    if axes == 2 or kernel == 1 or stride > 1:  # else it depends on the slab
        yield Probe("ConvWeightGrad", (x, y), {**slides, "kernel_shape": (kernel,) * axes})


def _slab_gradients(channels: int, places: float) -> Iterator[tuple[str, Probe]]:
    """The gradient of a window's weights from a thin slab, and from one that is not."""
    edge = int((THIN / channels) ** 0.5) + 1
    for what, depth, height in (("thin window", 4, min(edge * edge // 8, 128)), ("window", edge, edge)):
        rows = depth * height
        space: Shape = (depth, height, max(int(places / rows), THIN // (channels * rows) + 1, 4))
        x: Given = ((1, channels, *space), "float32")
        dy: Given = ((1, max(channels, 16), *space), "float32")
        slides = {"strides": (1,) * 3, "dilations": (1,) * 3, "pads": (1,) * 6}
        yield what, Probe("ConvWeightGrad", (x, dy), {**slides, "kernel_shape": (3,) * 3})


def products(scale: float, extents: Sequence[int] = EXTENTS) -> Iterator[Heavy]:
    """Every kind of matrix product."""
    for small in extents:
        # A matrix that meets few rows comes from memory, not from the caches. No powers of two: rows of
        # whole pages fall into the same few sets of a cache, and take up to twice as long.
        wide = max(int((4000 if small < 64 else 2000) * scale), 8)
        rows: Shape = (small, wide)
        yield "Einsum outer", small, _product("ab,bc->ac", rows, (wide, wide))
        yield "Einsum outer", small, _product("ab,cb->ac", rows, (wide, wide))
        yield "Einsum inner", small, _product("ab,ac->bc", rows, rows)
        other = max(int(max(256, small) * scale), 4)
        batch = max(int(64 * scale * min(1, 256 / small) ** 2), 2)
        yield "Einsum batched", small, _product("nab,nbc->nac", (batch, other, other), (batch, other, small))


def _product(equation: str, left: Shape, right: Shape) -> Probe:
    return Probe("Einsum", ((left, "float32"), (right, "float32")), {"equation": equation})


def pools(scale: float) -> Iterator[Heavy]:
    """Pooling and its gradient, windows of two and of three."""
    edge = max(int(64 * scale ** (1 / 3)) // 2 * 2, 4)
    for kernel in (2, 3):
        slides = {"strides": (2,) * 3, "dilations": (1,) * 3, "pads": (kernel // 3,) * 6}
        attrs = {**slides, "kernel_shape": (kernel,) * 3}
        x: Given = ((1, 8, *(edge,) * 3), "float32")
        y: Given = ((1, 8, *(edge // 2,) * 3), "float32")
        yield "MaxPool", kernel**3, Probe("MaxPool", (x,), attrs)
        yield "MaxPoolGrad", kernel**3, Probe("MaxPoolGrad", (x, y), attrs)


def streams(scale: float, low: bool = False) -> Iterator[Probe]:
    """A probe of every operator that is bound by memory; several of one operator are averaged.

    ``low``: arrays of 16 bits, too.
    """
    for probe in _streams(max(int(96 * scale**0.5), 4), low):
        yield probe if probe.op in ALONE else replace(probe, chained=True)


def _streams(edge: int, low: bool) -> Iterator[Probe]:
    shape: Shape = (1, 16, 16, edge, edge)
    x, flag, labels = (shape, "float32"), (shape, "bool"), (shape, "int64")
    channel: Given = ((1, 16, 1, 1, 1), "float32")
    scalar: Given = ((), "float32")
    for op in ("Neg", "Sqrt", "Exp", "Log", "Abs", "Erf", "Reciprocal", "Relu", "Gelu", "Sigmoid", "Tanh"):
        yield Probe(op, (x,))
    yield Probe("Softplus", (x,))
    yield Probe("LeakyRelu", (x,), {"alpha": 0.01})
    for op in ("Add", "Sub", "Mul", "Div"):
        yield Probe(op, (x, x))
        yield Probe(op, (x, channel))
    for op in ("Max", "Min", "ReluGrad", "GeluGrad", "SigmoidGrad", "TanhGrad"):
        yield Probe(op, (x, x))
    yield Probe("LeakyReluGrad", (x, x), {"alpha": 0.01})
    yield Probe("Pow", (x, scalar))
    yield Probe("Dropout", (x, x), {"ratio": 0.1})
    for op in ("Greater", "Less"):
        yield Probe(op, (x, x))
    yield Probe("Equal", (labels, labels))
    for op in ("And", "Or"):
        yield Probe(op, (flag, flag))
    yield Probe("Not", (flag,))
    yield Probe("Where", (((1, 1, *shape[2:]), "bool"), scalar, x))
    yield Probe("Where", (flag, x, scalar))
    yield Probe("Normalize", (x, channel, channel), {"axes": (2, 3, 4), "eps": 1e-5})
    for op in ("Moments", "ReduceSum"):
        yield Probe(op, (x,), {"axes": (2, 3, 4)})
    rows: Given = ((shape[1] * shape[2], edge * edge), "float32")
    for op in ("Moments", "ReduceSum", "ReduceMax", "LogSumExp"):
        yield Probe(op, (rows,), {"axes": (1,)})
    yield Probe("LogSumExp", (x,), {"axes": (1,)})
    yield from _movements(shape, low)


def _movements(shape: Shape, low: bool) -> Iterator[Probe]:
    x: Given = (shape, "float32")
    one, many, deep, *_, last = shape
    yield Probe("Identity", (x,))
    # Extents without a common refinement: every other Reshape is a renaming, and never runs.
    yield Probe(
        "Reshape", (((6 * many * last, last), "float32"),), {"shape": (4 * many * last, last // 2 * 3)}
    )
    yield Probe("Expand", (((one, many, 1, 1, 1), "float32"),), {"shape": shape})
    yield Probe("Transpose", (((many * deep, last * last), "float32"),), {"perm": (1, 0)})
    yield Probe("Transpose", (((many, last, deep, last), "float32"),), {"perm": (0, 2, 1, 3)})
    yield Probe("Slice", (x,), {"axis": 2, "start": 0, "stop": deep // 2, "step": 1})
    yield Probe("Concat", (x, x), {"axis": 1})
    yield Probe("Pad", (x,), {"axis": 3, "before": 1, "after": 1})
    yield Probe("Cast", ((shape, "int64"),), {"to": "float32"})
    if low:
        yield Probe("Cast", (x,), {"to": "bfloat16"})
        yield Probe("Cast", ((shape, "bfloat16"),), {"to": "float32"})
    resize = {"axis": 3, "size": 2 * last, "coordinates": "half_pixel", "nearest_mode": None}
    for mode in ("linear", "nearest"):
        yield Probe("Resample", (x,), {**resize, "mode": mode, "transposed": False})
    ids: Given = ((deep * 64,), "int64")
    yield Probe("Gather", (((8192, 4 * last), "float32"), ids))
    yield Probe("GatherGrad", (ids, ((deep * 64, 4 * last), "float32")), {"rows": 8192})


def overhead(count: int) -> Program:
    """``count`` operators, one after the other, on next to nothing."""
    build = Builder(RULES)
    value = build.value("x", (1,), "float32", Role.INPUT)
    for number in range(count):
        value = build("Neg" if number % 2 else "Abs", value)
    return _planned(build, value)
