"""Lowers reductions and scans of ONNX, and norms that are formulas of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import numpy as np

from oocdl.graph.ir.graph import Array, normalize_axes
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.folding.constant_folding import ints
from oocdl.graph.onnx.lower.structure import slice_axis


def _squeezed(ctx: Context, y: str, axes: Sequence[int]) -> str:
    """Leave out the reduced axes, if the node does not keep them."""
    if ctx.attr("keepdims", 1):
        return y
    return ctx.reshape(y, [extent for axis, extent in enumerate(ctx.build.shape(y)) if axis not in axes])


def _axes(ctx: Context) -> tuple[int, ...]:
    """Return the axes that are reduced; none, if the node then does nothing."""
    rank = len(ctx.shape(0))
    given = ints(ctx.node, ctx.constants("axes", 1), "axes", 1)
    if not given and ctx.attr("noop_with_empty_axes", 0):
        return ()
    return normalize_axes(given or range(rank), rank)


def _filled_axes(ctx: Context) -> tuple[int, ...]:
    """Return the axes that are reduced; refuses a value without elements."""
    if not prod(ctx.shape(0)):
        ctx.refuse("an operand without elements")
    return _axes(ctx)


def root(ctx: Context, square: str) -> str:
    """Return the square root, whose gradient is 0 where it is 0, as that of norms in PyTorch is."""
    none = ctx.make("Equal", square, ctx.number(0.0, square))
    safe = ctx.make("Where", none, ctx.number(1.0, square), square)
    return ctx.make("Where", none, ctx.number(0.0, square), ctx.make("Sqrt", safe))


def products(ctx: Context, x: str, axis: int) -> str:
    """Multiply along an axis in pairs: its gradient is exact where there are zeros."""
    rest: list[str] = []
    while (extent := ctx.build.shape(x)[axis]) > 1:
        half = extent // 2
        if extent % 2:
            rest.append(slice_axis(ctx, x, axis, extent - 1, extent, 1))
        halves = (slice_axis(ctx, x, axis, first, first + half, 1) for first in (0, half))
        x = ctx.make("Mul", *halves)
    return reduce(lambda a, b: ctx.make("Mul", a, b), rest, x)


def maxima(ctx: Context, x: str, axes: Sequence[int]) -> str:
    """Return the largest elements along axes; the gradient goes to all that are it, alike."""
    return ctx.make("ReduceMax", x, axes=tuple(axes))


def minima(ctx: Context, x: str, axes: Sequence[int]) -> str:
    """Return the smallest elements along axes, with the gradient of ``maxima``."""
    return ctx.make("Neg", maxima(ctx, ctx.make("Neg", x), axes))


def _extreme(smallest: bool) -> Lower:
    def run(ctx: Context) -> Sequence[Operand]:
        x, axes = ctx.value(0), _filled_axes(ctx)
        flags = ctx.build.dtype(x) == "bool"
        source = ctx.make("Cast", x, to="int64") if flags else x
        y = (minima if smallest else maxima)(ctx, source, axes) if axes else source
        return [_squeezed(ctx, ctx.make("Cast", y, to="bool") if flags else y, axes)]

    return run


def _reduce_product(ctx: Context) -> Sequence[Operand]:
    x, axes = ctx.value(0), _filled_axes(ctx)
    shape = ctx.build.shape(x)
    if len(axes) == len(shape) and prod(shape) > 1:
        # The gradient of halves of a pair pads a single number, which has no axis to do so: of two alike.
        twins = ctx.make("Expand", x, shape=(2, *shape))
        both = reduce(lambda y, axis: products(ctx, y, axis + 1), axes, twins)
        return [_squeezed(ctx, ctx.reshape(maxima(ctx, both, (0,)), (1,) * len(shape)), axes)]
    return [_squeezed(ctx, reduce(lambda y, axis: products(ctx, y, axis), axes, x), axes)]


def _reduce(op: str) -> Lower:
    """Build ReduceSum, ReduceMean and the like from ReduceSum and elementwise nodes."""

    def run(ctx: Context) -> Sequence[Operand]:
        x, axes = ctx.value(0), _axes(ctx)
        if not axes and ctx.attr("noop_with_empty_axes", 0):
            return [x]
        shape = ctx.build.shape(x)
        source = (
            ctx.make("Mul", x, x) if op in ("SumSquare", "L2") else ctx.make("Abs", x) if op == "L1" else x
        )
        y = ctx.make("LogSumExp" if op == "LogSumExp" else "ReduceSum", source, axes=axes)
        if op == "Mean":
            y = ctx.make("Mul", y, ctx.number(1 / prod(shape[axis] for axis in axes), y))
        elif op == "L2":
            y = root(ctx, y)
        elif op == "LogSum":
            y = ctx.make("Log", y)
        return [_squeezed(ctx, y, axes)]

    return run


def _along(axis: int, extent: int, rank: int) -> Array:
    """Return 0, 1, .. along an axis, of shape one elsewhere."""
    return numbered(extent).reshape([extent if place == axis else 1 for place in range(rank)])


def _place(ctx: Context, x: str, axis: int, smallest: bool, last: bool) -> str:
    """Return the first or last index of the extreme along ``axis``, or of what is no number."""
    shape = ctx.build.shape(x)
    extent, best = shape[axis], (minima if smallest else maxima)(ctx, x, (axis,))
    found = ctx.make("Or", ctx.make("Equal", x, best), ctx.make("Not", ctx.make("Equal", x, x)))
    index = _along(axis, extent, len(shape))
    marks = ctx.build.constant(index + 1 if last else extent - index, "int64")
    most = maxima(ctx, ctx.make("Where", found, marks, ctx.number(0, marks)), (axis,))
    if last:
        return ctx.make("Sub", most, ctx.number(1, most))
    return ctx.make("Sub", ctx.number(extent, most), most)


def _arg(smallest: bool) -> Lower:
    def run(ctx: Context) -> Sequence[Operand]:
        axis = ctx.attr("axis", 0) % len(ctx.shape(0))
        last = bool(ctx.attr("select_last_index", 0))
        return [_squeezed(ctx, _place(ctx, ctx.value(0), axis, smallest, last), (axis,))]

    return run


def _softmax(ctx: Context) -> Sequence[Operand]:
    """Lower Softmax, LogSoftmax and Hardmax; before opset 13 all axes from ``axis`` on were one."""
    x, shape = ctx.value(0), ctx.shape(0)
    axis = ctx.attr("axis", -1 if ctx.opset >= 13 else 1) % len(shape)
    flat = ctx.opset < 13 and axis != len(shape) - 1
    if flat:
        x, axis = ctx.reshape(x, (prod(shape[:axis]), prod(shape[axis:]))), 1
    if ctx.node.op == "Hardmax":
        extent, rank = ctx.build.shape(x)[axis], len(ctx.build.shape(x))
        index = ctx.build.constant(_along(axis, extent, rank), "int64")
        chosen = ctx.make("Equal", index, _place(ctx, x, axis, smallest=False, last=False))
        y = ctx.make("Cast", chosen, to=ctx.build.dtype(x))
    else:
        y = ctx.make(ctx.node.op, x, axis=axis)
    return [ctx.reshape(y, shape) if flat else y]


def _scan(op: str, neutral: int) -> Lower:
    """Lower CumSum and CumProd: after the step of distance k each element combines the last 2 k."""

    def run(ctx: Context) -> Sequence[Operand]:
        known, given = ctx.constants("an axis", 1)[:2]
        shape = ctx.shape(0)
        axis = (0 if given is None else int(given.reshape(-1)[0])) % len(shape)
        extent, backwards = shape[axis], bool(ctx.attr("reverse", 0))
        if known is not None and known.dtype.kind in "iu" and not ctx.attr("exclusive", 0):
            ctx.sized.update(ctx.node.outputs if ctx.is_sized(0) else ())
            turned = np.flip(known, axis) if backwards else known
            made = (np.cumsum if op == "Add" else np.cumprod)(turned, axis, dtype=known.dtype)
            return [np.flip(made, axis) if backwards else made]
        x = ctx.value(0)

        def moved(y: str, by: int) -> str:
            """Move along the axis by some places, and fill up with what changes nothing."""
            filler = ctx.make(
                "Expand", ctx.number(neutral, y), shape=(*shape[:axis], min(by, extent), *shape[axis + 1 :])
            )
            if by >= extent:
                return filler
            kept = slice_axis(ctx, y, axis, *((by, extent) if backwards else (0, extent - by)), 1)
            return ctx.make("Concat", *((kept, filler) if backwards else (filler, kept)), axis=axis)

        y = moved(x, 1) if ctx.attr("exclusive", 0) else x
        distance = 1
        while distance < extent:
            y = ctx.make(op, y, moved(y, distance))
            distance *= 2
        return [y]

    return run


def _lp_normalization(ctx: Context) -> Sequence[Operand]:
    """Divide by the norm along an axis; what is 0 everywhere stays so."""
    x, power = ctx.value(0), ctx.attr("p", 2)
    axis = ctx.attr("axis", -1) % len(ctx.shape(0))
    if power not in (1, 2):
        ctx.refuse(f"p {power}")
    parts = ctx.make("Mul", x, x) if power == 2 else ctx.make("Abs", x)
    total = ctx.make("ReduceSum", parts, axes=(axis,))
    none = ctx.make("Equal", total, ctx.number(0.0, total))
    total = ctx.make("Where", none, ctx.number(1.0, total), total)
    return [ctx.make("Div", x, ctx.make("Sqrt", total) if power == 2 else total)]


def _mean_variance(ctx: Context) -> Sequence[Operand]:
    """``(x - mean) / (deviation + 1e-9)``."""
    x = ctx.value(0)
    axes = normalize_axes(ctx.attr("axes", (0, 2, 3)), len(ctx.shape(0)))
    mean, variance = ctx.many("Moments", x, axes=axes)
    deviation = ctx.make("Add", root(ctx, variance), ctx.number(1e-9, x))
    return [ctx.make("Div", ctx.make("Sub", x, mean), deviation)]


def _rms_normalization(ctx: Context) -> Sequence[Operand]:
    """``x / sqrt(mean of squares + epsilon) scale``, over the last axes."""
    x, shape = ctx.value(0), ctx.shape(0)
    axes = tuple(range(ctx.attr("axis", -1) % len(shape), len(shape)))
    total = ctx.make("ReduceSum", ctx.make("Mul", x, x), axes=axes)
    mean = ctx.make("Mul", total, ctx.number(1 / prod(shape[axis] for axis in axes), total))
    deviation = ctx.make("Sqrt", ctx.make("Add", mean, ctx.number(ctx.attr("epsilon", 1e-5), mean)))
    return [ctx.make("Mul", ctx.make("Mul", x, ctx.make("Reciprocal", deviation)), ctx.value(1))]


def _lrn(ctx: Context) -> Sequence[Operand]:
    """``x / (bias + alpha / size * sum of squares of neighbouring channels)^beta``."""
    x, size = ctx.value(0), int(ctx.attr("size"))
    channels = ctx.build.shape(x)[1]
    padded = ctx.make("Mul", x, x)
    before, after = (min(side, channels - 1) for side in ((size - 1) // 2, size // 2))
    if before or after:
        padded = ctx.make("Pad", padded, axis=1, before=before, after=after)
    parts = (slice_axis(ctx, padded, 1, first, first + channels, 1) for first in range(before + after + 1))
    total = reduce(lambda a, b: ctx.make("Add", a, b), parts)
    scaled = ctx.make("Mul", total, ctx.number(ctx.attr("alpha", 0.0001) / size, total))
    base = ctx.make("Add", scaled, ctx.number(ctx.attr("bias", 1.0), total))
    return [ctx.make("Mul", x, ctx.make("Pow", base, ctx.number(-ctx.attr("beta", 0.75), base)))]


REDUCTIONS: dict[str, Lower] = {
    "ReduceMax": _extreme(smallest=False),
    "ReduceMin": _extreme(smallest=True),
    "ReduceProd": _reduce_product,
    "ReduceMean": _reduce("Mean"),
    "ReduceSum": _reduce("Sum"),
    "ReduceL1": _reduce("L1"),
    "ReduceL2": _reduce("L2"),
    "ReduceSumSquare": _reduce("SumSquare"),
    "ReduceLogSum": _reduce("LogSum"),
    "ReduceLogSumExp": _reduce("LogSumExp"),
    "ArgMax": _arg(smallest=False),
    "ArgMin": _arg(smallest=True),
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Hardmax": _softmax,
    "CumSum": _scan("Add", 0),
    "CumProd": _scan("Mul", 1),
    "LpNormalization": _lp_normalization,
    "MeanVarianceNormalization": _mean_variance,
    "RMSNormalization": _rms_normalization,
    "LRN": _lrn,
}
"""Lowerings of reductions, of scans, and of norms without layers."""
