"""Lowers reductions and scans of ONNX, and norms and losses that are formulas of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import is_float, normalize_axis
from oocdl.graph.onnx.bodies import softmax_axes
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.structure import expanded, slice_axis
from oocdl.graph.onnx.whole_numbers import WIDE, kind_of, kind_of_sums, typed


def _squeezed(ctx: Context, y: str, axes: Sequence[int]) -> str:
    """Leave out the reduced axes, if the node does not keep them."""
    if ctx.attr("keepdims", 1):
        return y
    return ctx.reshape(y, [extent for axis, extent in enumerate(ctx.build.shape(y)) if axis not in axes])


def _axes(ctx: Context, filled: bool = False) -> tuple[int, ...]:
    """Return the axes that are reduced, none if each element is by itself; ``filled``: there are elements."""
    if filled and not prod(ctx.shape(0)):
        ctx.refuse("an operand without elements")
    rank = len(ctx.shape(0))
    given = ctx.ints("axes", "axes", 1)
    if not given and ctx.attr("noop_with_empty_axes", 0):
        return ()
    return tuple(sorted(normalize_axis(axis, rank) for axis in given or range(rank)))


def root(ctx: Context, square: str) -> str:
    """Return the square root, whose gradient is 0 where it is 0, as that of norms in PyTorch is."""
    none = ctx.make("Equal", square, ctx.number(0.0, square))
    safe = ctx.make("Where", none, ctx.number(1.0, square), square)
    return ctx.make("Where", none, ctx.number(0.0, square), ctx.make("Sqrt", safe))


def products(ctx: Context, x: str, axes: Sequence[int]) -> str:
    """Multiply along axes in pairs: the gradient is exact where there are zeros."""
    return reduce(lambda y, axis: _product(ctx, y, axis), axes, x)


def _product(ctx: Context, x: str, axis: int) -> str:
    rest: list[str] = []
    while (extent := ctx.build.shape(x)[axis]) > 1:
        half = extent // 2
        if extent % 2:
            rest.append(slice_axis(ctx, x, axis, extent - 1, extent, 1))
        halves = (slice_axis(ctx, x, axis, first, first + half, 1) for first in (0, half))
        x = ctx.make("Mul", *halves)
    return reduce(lambda a, b: ctx.make("Mul", a, b), rest, x)


Extreme = Callable[[Context, str, Sequence[int]], str]


def maxima(ctx: Context, x: str, axes: Sequence[int]) -> str:
    """Return the largest elements along axes; the gradient goes to all that are it, alike."""
    return ctx.make("ReduceMax", x, axes=tuple(axes))


def minima(ctx: Context, x: str, axes: Sequence[int]) -> str:
    """Return the smallest elements along axes, with the gradient of ``maxima``."""
    return _turned(ctx, maxima(ctx, _turned(ctx, x), axes))


def _turned(ctx: Context, x: str) -> str:
    """Turn the order of numbers round: ``-x``, or ``-1 - x`` for whole ones, whose least has no negative."""
    if is_float(ctx.build.dtype(x)):
        return ctx.make("Neg", x)
    return ctx.make("Sub", ctx.number(-1, x), x)


@lowers("ReduceMax", extreme=maxima)
@lowers("ReduceMin", extreme=minima)
def _extreme(ctx: Context, extreme: Extreme) -> Sequence[Operand]:
    y, axes = ctx.value(0), _axes(ctx, filled=True)
    flags = ctx.build.dtype(y) == "bool"
    y = ctx.make("Cast", y, to="int64") if flags else y
    y = extreme(ctx, y, axes) if axes else y
    return [_squeezed(ctx, ctx.make("Cast", y, to="bool") if flags else y, axes)]


@lowers("ReduceProd")
def _reduce_product(ctx: Context) -> Sequence[Operand]:
    axes = _axes(ctx, filled=True)
    return [_squeezed(ctx, products(ctx, ctx.value(0), axes), axes)]


@lowers(
    "ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"
)
def _reduce(ctx: Context) -> Sequence[Operand]:
    x, axes, op = ctx.value(0), _axes(ctx), ctx.node.op.removeprefix("Reduce")
    shape, whole = ctx.build.shape(x), not is_float(ctx.build.dtype(x))
    if whole and op in ("L2", "LogSum", "LogSumExp"):
        ctx.refuse("whole numbers; cast them to float before it")
    source = ctx.make("Mul", x, x) if op in ("SumSquare", "L2") else ctx.make("Abs", x) if op == "L1" else x
    # Over no axes each element is by itself; what is done to it before and after the sum stays.
    y = ctx.make("LogSumExp" if op == "LogSumExp" else "ReduceSum", source, axes=axes) if axes else source
    if op == "Mean" and axes:
        count = prod(shape[axis] for axis in axes)
        y = ctx.make(*(("Div", y, ctx.number(count, y)) if whole else ("Mul", y, ctx.number(1 / count, y))))
    elif op == "L2":
        y = root(ctx, y)
    elif op == "LogSum":
        y = ctx.make("Log", y)
    return [_squeezed(ctx, y, axes)]


@lowers("ArgMax", extreme=maxima)
@lowers("ArgMin", extreme=minima)
def _arg(ctx: Context, extreme: Extreme) -> Sequence[Operand]:
    """Lower to the first or last index of the extreme along an axis, or of what is no number."""
    x, shape, axis, last = ctx.value(0), ctx.shape(0), ctx.axis(0), ctx.attr("select_last_index", 0)
    extent, best = shape[axis], extreme(ctx, x, (axis,))
    found = ctx.make("Or", ctx.make("Equal", x, best), ctx.make("Not", ctx.make("Equal", x, x)))
    index = numbered(extent).reshape(-1, *(1,) * (len(shape) - 1 - axis))
    marks = ctx.build.constant(index + 1 if last else extent - index, "int64")
    most = maxima(ctx, ctx.make("Where", found, marks, ctx.number(0, marks)), (axis,))
    ends = (most, ctx.number(1, most)) if last else (ctx.number(extent, most), most)
    return [_squeezed(ctx, ctx.make("Sub", *ends), (axis,))]


@lowers("Softmax", "LogSoftmax")
def _softmax(ctx: Context) -> Sequence[Operand]:
    """Lower Softmax and LogSoftmax; before opset 13 all axes from ``axis`` on were one."""
    x, shape = ctx.value(0), ctx.shape(0)
    axis, *others = softmax_axes(ctx.node, ctx.opset, len(shape))
    if others:
        # Not ``ctx.reshape``, which may read past ``x``: losses take that where it is the logits.
        x, axis = ctx.make("Reshape", x, shape=(prod(shape[:axis]), prod(shape[axis:]))), 1
    y = ctx.make(ctx.node.op, x, axis=axis)
    return [ctx.reshape(y, shape) if others else y]


@lowers("CumSum", op="Add", neutral=0)
@lowers("CumProd", op="Mul", neutral=1)
def _scan(ctx: Context, op: str, neutral: int) -> Sequence[Operand]:
    """Lower CumSum and CumProd: after the step of distance k each element combines the last 2 k."""
    known, shape = ctx.known(0), ctx.shape(0)
    axis = normalize_axis(int(ctx.scalar("an axis", 1)), len(shape))
    extent, backwards = shape[axis], bool(ctx.attr("reverse", 0))
    kind = kind_of_sums(ctx, kind_of(ctx, ctx.entry(0)))
    if known is not None and kind.kind in "iu" and not ctx.attr("exclusive", 0):
        turned = np.flip(known, axis) if backwards else known
        total = np.add if op == "Add" else np.multiply
        made = total.accumulate(turned, axis, dtype=kind)
        return [np.flip(made, axis) if backwards else made]
    x = ctx.value(0) if kind_of(ctx, ctx.entry(0)).kind != "b" else ctx.make("Cast", ctx.value(0), to="int64")

    def moved(y: str, by: int) -> str:
        """Move along the axis by some places, and fill up with what changes nothing."""
        filler = expanded(ctx, ctx.number(neutral, y), y, axis, min(by, extent))
        if by >= extent:
            return filler
        kept = slice_axis(ctx, y, axis, *((by, extent) if backwards else (0, extent - by)), 1)
        return ctx.make("Concat", *((kept, filler) if backwards else (filler, kept)), axis=axis)

    y = moved(x, 1) if ctx.attr("exclusive", 0) else x
    distance = 1
    while distance < extent:
        y = ctx.make(op, y, moved(y, distance))
        distance *= 2
    return [typed(y, kind) if kind == WIDE else y]


@lowers("RMSNormalization")
def _rms_normalization(ctx: Context) -> Sequence[Operand]:
    """``x / sqrt(mean of squares + epsilon) scale``, over the last axes."""
    x, shape = ctx.value(0), ctx.shape(0)
    axes = tuple(range(ctx.axis(-1), len(shape)))
    total = ctx.make("ReduceSum", ctx.make("Mul", x, x), axes=axes)
    mean = ctx.make("Mul", total, ctx.number(1 / prod(shape[axis] for axis in axes), total))
    deviation = ctx.make("Sqrt", ctx.make("Add", mean, ctx.number(ctx.attr("epsilon", 1e-5), mean)))
    return [ctx.make("Mul", ctx.make("Mul", x, ctx.make("Reciprocal", deviation)), ctx.value(1))]


@lowers("LRN")
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


def _negative_log_likelihood(ctx: Context, chances: str) -> Operand:
    """``-w_y chances_y`` of the label y of each place, or its sum, or its mean over the weights that count.

    As in PyTorch: a place whose label is ``ignore_index`` counts nowhere, a mean over none is NaN. A label
    outside the classes gives NaN.
    """
    build, shape = ctx.build, ctx.build.shape(chances)
    if len(shape) < 2 or ctx.shape(1) != (shape[0], *shape[2:]):
        raise ModelError(f"labels {list(ctx.shape(1))} are not those of scores {list(shape)}")
    labels = ctx.reshape(ctx.value(1), (shape[0], 1, *shape[2:]))
    classes = build.constant(numbered(shape[1]).reshape(-1, *(1,) * (len(shape) - 2)), "int64")
    here, zero = ctx.make("Equal", labels, classes), ctx.number(0.0, chances)

    def at_label(values: str) -> str:  # Where, not Mul: what is not chosen may be infinite
        return ctx.make("ReduceSum", ctx.make("Where", here, values, zero), axes=(1,))

    outside = ctx.make("Less", labels, ctx.number(0, labels))
    outside = ctx.make("Or", outside, ctx.make("Greater", labels, ctx.number(shape[1] - 1, labels)))
    nan = ctx.number(float("nan"), chances)
    loss = ctx.make("Where", outside, nan, ctx.make("Neg", at_label(chances)))
    counts: str | None = None
    if ctx.has(2):
        counts = at_label(ctx.per_channel(ctx.value(2), len(shape)))
        loss = ctx.make("Mul", loss, counts)
    if (ignored := ctx.attr("ignore_index")) is not None:
        skipped = ctx.make("Equal", labels, ctx.number(int(ignored), labels))
        loss = ctx.make("Where", skipped, zero, loss)
        given = ctx.number(1.0, chances) if counts is None else counts
        counts = ctx.make("Where", skipped, zero, given)
    return _reduced(ctx, loss, counts)


def _reduced(ctx: Context, loss: str, counts: str | None) -> str:
    shape, reduction = ctx.build.shape(loss), ctx.attr("reduction", "mean")
    if reduction == "none":
        return ctx.reshape(loss, (shape[0], *shape[2:]))
    if reduction not in ("sum", "mean"):
        raise ModelError(f"reduction '{reduction}' is not none, sum or mean")
    axes = tuple(range(len(shape)))
    total = ctx.make("ReduceSum", loss, axes=axes)
    if reduction == "mean":
        number = ctx.number(float(prod(shape)), total)
        total = ctx.make("Div", total, ctx.make("ReduceSum", counts, axes=axes) if counts else number)
    return ctx.reshape(total, ())


@lowers("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(ctx: Context) -> Sequence[Operand]:
    """Return the loss, and the logarithms of probabilities that it is of."""
    scores = ctx.value(0)
    chances = ctx.make("LogSoftmax", scores, axis=1) if ctx.node.op.startswith("Softmax") else scores
    return [_negative_log_likelihood(ctx, chances), chances][: len(ctx.node.outputs)]
