"""Lowers convolutions, norms, dropout and pooling.

Sums of windows are separable, so pooling is one Resample for each spatial axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role, Shape
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.roles import trains_by_origin


def _affine(ctx: Context, y: str, scale: int, channels: bool) -> str:
    """Multiply by an operand and add the third, along channels or last axes; ones and zeros are left out."""
    rank = len(ctx.build.shape(y))
    for index, op, neutral in ((scale, "Mul", 1.0), (2, "Add", 0.0)):
        known = ctx.known(index)
        if ctx.has(index) and (known is None or (known != neutral).any()):
            vector = ctx.value(index)
            y = ctx.make(op, y, ctx.per_channel(vector, rank) if channels else vector)
    return y


def window(ctx: Context, spatial: Shape, kernel: Shape) -> tuple[Shape, Shape, Shape]:
    """Return strides, pads and dilations of a sliding window, with ``auto_pad`` resolved."""
    rank = len(kernel)
    strides = tuple(ctx.attr("strides", (1,) * rank))
    dilations = tuple(ctx.attr("dilations", (1,) * rank))
    mode = ctx.attr("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        none = (0,) * 2 * rank
        return strides, none if mode == "VALID" else tuple(ctx.attr("pads", none)), dilations
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise ModelError(f"auto_pad {mode!r} is none of NOTSET, VALID, SAME_UPPER and SAME_LOWER")
    axes = zip(spatial, kernel, strides, dilations, strict=True)
    totals = [max((-(-extent // s) - 1) * s + d * (k - 1) + 1 - extent, 0) for extent, k, s, d in axes]
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return strides, (*large, *small) if mode == "SAME_LOWER" else (*small, *large), dilations


def _kernel(ctx: Context) -> Shape:
    """Return the spatial shape of the weight; refuses groups that do not divide channels, and other ranks."""
    ctx.need_floats(0, 1)
    groups, ranks = int(ctx.attr("group", 1)), (len(ctx.shape(0)), len(ctx.shape(1)))
    if groups < 1 or ctx.shape(0)[1] % groups or ctx.shape(1)[0] % groups:
        raise ModelError(f"group {groups} does not divide the channels of {list(ctx.shape(0))}")
    if ranks[0] != ranks[1] or not 3 <= ranks[0] <= 5:
        shapes = f"input {list(ctx.shape(0))} and weight {list(ctx.shape(1))}"
        raise ModelError(f"{shapes} are not of 1 to 3 spatial axes")
    return ctx.shape(1)[2:]


def _convolution(ctx: Context, op: str, **attrs: Any) -> Sequence[Operand]:
    """Add a convolution and its bias; groups become an axis of its operands."""
    x, w, groups = ctx.value(0), ctx.value(1), int(ctx.attr("group", 1))
    if groups == 1:
        y = ctx.make(op, x, w, **attrs)
    else:
        (batch, channels, *space), (first, *others) = ctx.shape(0), ctx.shape(1)
        x = ctx.reshape(x, (batch, groups, channels // groups, *space))
        w = ctx.reshape(w, (groups, first // groups, *others))
        made = ctx.make(op, x, w, grouped=True, **attrs)
        shape = ctx.build.shape(made)
        y = ctx.reshape(made, (batch, groups * shape[2], *shape[3:]))
    return [_affine(ctx, y, len(ctx.node.inputs), channels=True)]


@lowers("Conv")
def _conv(ctx: Context) -> Sequence[Operand]:
    strides, pads, dilations = window(ctx, ctx.shape(0)[2:], _kernel(ctx))
    return _convolution(ctx, "Conv", strides=strides, pads=pads, dilations=dilations)


@lowers("ConvTranspose")
def _conv_transpose(ctx: Context) -> Sequence[Operand]:
    kernel, spatial = _kernel(ctx), ctx.shape(0)[2:]
    rank, mode = len(kernel), ctx.attr("auto_pad", "NOTSET")
    strides, (*pads,), dilations = window(ctx, spatial, kernel)
    extra = ctx.attr("output_padding", (0,) * rank)
    wanted = ctx.attr("output_shape")
    if wanted is None and mode.startswith("SAME"):
        wanted = [extent * stride for extent, stride in zip(spatial, strides, strict=True)]
    out = []
    for axis in range(rank):
        full = strides[axis] * (spatial[axis] - 1) + extra[axis] + dilations[axis] * (kernel[axis] - 1) + 1
        if wanted is not None:
            total = full - wanted[len(wanted) - rank + axis]
            if total <= -strides[axis]:
                ctx.refuse(f"output_shape {list(wanted)} a stride or more beyond what the input reaches")
            full, total = full + max(-total, 0), max(total, 0)  # what nothing reaches is at the end
            small, large = total // 2, total - total // 2
            pads[axis], pads[rank + axis] = (small, large) if mode == "SAME_UPPER" else (large, small)
        out.append(full - pads[axis] - pads[rank + axis])
    return _convolution(
        ctx, "ConvTranspose", strides=strides, pads=tuple(pads), dilations=dilations, spatial=tuple(out)
    )


def _normalize(ctx: Context, x: str, axes: Sequence[int], eps: float) -> tuple[str, str, str]:
    """Normalize ``x`` over ``axes``; returns the result, the mean and the variance."""
    axes = tuple(axes)
    mean, var = ctx.many("Moments", x, axes=axes)
    return ctx.make("Normalize", x, mean, var, axes=axes, eps=eps), mean, var


@lowers("InstanceNormalization")
def _instance_norm(ctx: Context) -> Sequence[Operand]:
    """Lower InstanceNormalization, alone or inside the two Reshapes of an exported GroupNorm."""
    # The latter merges channels of a group with all of space. Normalizing over the axes as they were before
    # is the same, and leaves them free to be cut.
    x, shape, eps = ctx.value(0), ctx.shape(0), ctx.attr("epsilon", 1e-5)
    source = ctx.unreshaped(x)
    before = ctx.build.shape(source)
    merged = source != x and len(shape) == 3 and len(before) > 3
    if merged and before[0] == shape[0] and before[1] % shape[1] == 0:
        split = (before[1] // shape[1],) if before[1] != shape[1] else ()
        x = ctx.reshape(source, (*shape[:2], *split, *before[2:]))
    y, _, _ = _normalize(ctx, x, range(2, len(ctx.build.shape(x))), eps)
    return [ctx.reshape(_affine(ctx, y, 1, channels=True), shape)]


@lowers("GroupNormalization")
def _group_norm(ctx: Context) -> Sequence[Operand]:
    shape, groups = ctx.shape(0), ctx.attr("num_groups")
    if shape[1] % groups:
        raise ModelError(f"{shape[1]} channels are not divisible into {groups} groups")
    x = ctx.reshape(ctx.value(0), (shape[0], groups, shape[1] // groups, *shape[2:]))
    y, _, _ = _normalize(ctx, x, range(2, len(shape) + 1), ctx.attr("epsilon", 1e-5))
    if ctx.opset < 21 and ctx.shape(1) == (groups,):  # scale and bias: one a group, later one a channel
        return [ctx.reshape(_affine(ctx, y, 1, channels=True), shape)]
    return [_affine(ctx, ctx.reshape(y, shape), 1, channels=True)]


@lowers("LayerNormalization")
def _layer_norm(ctx: Context) -> Sequence[Operand]:
    axes, eps = range(ctx.axis(-1), len(ctx.shape(0))), ctx.attr("epsilon", 1e-5)
    y, mean, var = _normalize(ctx, ctx.value(0), axes, eps)
    results: list[Operand] = [_affine(ctx, y, 1, channels=False), mean]
    if len(ctx.node.outputs) > 2:
        deviation = ctx.make("Sqrt", ctx.make("Add", var, ctx.number(eps, var)))
        results.append(ctx.make("Reciprocal", deviation))
    return results[: len(ctx.node.outputs)]


@lowers("BatchNormalization")
def _batch_norm(ctx: Context) -> Sequence[Operand]:
    """Lower BatchNormalization, by the statistics of the batch in training, else by those that it is given.

    Statistics that are computed in the graph, or numbers of the model's code, belong to a norm that keeps
    none: it takes them unless it says ``training_mode=1``, and then normalizes by the batch always.
    """
    x, shape, eps = ctx.value(0), ctx.shape(0), ctx.attr("epsilon", 1e-5)
    rank = len(shape)
    stats = [ctx.value(3), ctx.value(4)]
    if any(name in ctx.read for name in ctx.node.outputs[1:] if name):
        ctx.refuse("running statistics used elsewhere")
    roles = {ctx.build.values[value].role for value in stats}
    trains = ctx.training and trains_by_origin(ctx.node) and ctx.node.outputs[0] not in ctx.evaluated
    if Role.WEIGHT in roles or (trains and Role.CONSTANT in roles):
        ctx.refuse("running statistics that are trained, or read elsewhere")
    if Role.STATE in roles:
        given = not ctx.training or any(map(ctx.frozen, stats)) or ctx.node.outputs[0] in ctx.evaluated
    else:
        given = not ctx.attr("training_mode", 0)
    if given:
        mean, var = (ctx.per_channel(value, rank) for value in stats)
        deviation = ctx.make("Sqrt", ctx.make("Add", var, ctx.number(eps, var)))
        y = ctx.make("Mul", ctx.make("Sub", x, mean), ctx.make("Reciprocal", deviation))
    else:
        y, *batch = _normalize(ctx, x, (0, *range(2, rank)), eps)
        if Role.STATE in roles:
            _update(ctx, stats, batch, shape)
    results: list[Operand] = [_affine(ctx, y, 1, channels=True), *stats]
    return results[: len(ctx.node.outputs)]


def _update(ctx: Context, stats: Sequence[str], batch: Sequence[str], shape: Shape) -> None:
    """Update the running statistics by those of the batch.

    PyTorch takes the unbiased variance; ONNX's definition, Keras, Flax and Paddle the biased one.
    """
    count, keep = prod(shape) // shape[1], float(ctx.attr("momentum", 0.9))
    if count < 2:
        raise ModelError(f"one value per channel in {list(shape)}: no batch statistics; use a larger batch")
    factors = 1.0, count / (count - 1) if ctx.is_of_pytorch else 1.0
    for name, value, factor in zip(stats, batch, factors, strict=True):
        if ctx.build.values[name].role != Role.STATE:
            ctx.refuse("running statistics that are no initializers")
        if ctx.build.shape(name) != (shape[1],):
            raise ModelError(f"running statistics {list(ctx.build.shape(name))} for {shape[1]} channels")
        now = ctx.build.updates.get(name, name)
        fresh = ctx.reshape(value, (shape[1],))
        fresh = ctx.make("Mul", fresh, ctx.number(factor * (1 - keep), fresh))
        ctx.build.updates[name] = ctx.make("Add", ctx.make("Mul", now, ctx.number(keep, now)), fresh)


@lowers("Dropout")
def _dropout(ctx: Context) -> Sequence[Operand]:
    """Lower Dropout, which is active in training whatever the file says."""
    x = ctx.value(0)
    ctx.constants("a ratio", 1)
    given = ctx.known(1)
    ratio = float(ctx.attr("ratio", 0.5)) if given is None else float(str(given.reshape(-1)[0]))
    if not 0 <= ratio <= 1:
        raise ModelError(f"a dropout ratio has to be between 0 and 1, not {ratio}")
    masked = any(name in ctx.read for name in ctx.node.outputs[1:])
    if ctx.training and ratio == 1 and not masked:
        return [ctx.make("Mul", x, ctx.number(0.0, x))]
    if ctx.training and ratio:
        name = ctx.build.unique(f"{ctx.build.scope}uniform")
        uniform = ctx.build.value(name, ctx.shape(0), ctx.build.dtype(x), Role.RANDOM)
        y = ctx.make("Dropout", x, uniform, ratio=ratio)
        return [y, ctx.make("Not", ctx.make("Less", uniform, ctx.number(ratio, uniform)))] if masked else [y]
    return [x, ctx.make("Expand", ctx.build.constant(True, "bool"), shape=ctx.shape(0))] if masked else [x]


def _windows(ctx: Context) -> tuple[Shape, Shape, Shape, Shape, Shape]:
    """Return kernel, strides, pads, dilations and the number of windows along each axis."""
    # With ``ceil_mode`` a last window may hang over the padded operand, if it starts before its end padding.
    kernel, spatial = tuple(ctx.attr("kernel_shape")), ctx.shape(0)[2:]
    if len(kernel) != len(spatial):
        ctx.refuse(f"a kernel of {len(kernel)} axes on a value of shape {list(ctx.shape(0))}")
    strides, pads, dilations = window(ctx, spatial, kernel)
    counts = []
    for axis, (extent, k, s, d) in enumerate(zip(spatial, kernel, strides, dilations, strict=True)):
        before, after, reach = pads[axis], pads[len(kernel) + axis], d * (k - 1) + 1
        room = extent + before + after - reach
        if room < 0:
            raise ModelError(f"its window does not fit into spatial shape {list(spatial)}")
        count = room // s + 1
        if room % s and ctx.attr("ceil_mode", 0):
            if ctx.attr("auto_pad", "NOTSET") == "VALID":
                ctx.refuse("ceil_mode and auto_pad VALID, of which ONNX says that nothing is rounded up")
            if max(before, after) >= reach:
                ctx.refuse("ceil_mode and pads as large as its window")
            count += count * s < extent + before
        counts.append(count)
    return kernel, strides, pads, dilations, tuple(counts)


@lowers("MaxPool")
def _max_pool(ctx: Context) -> Sequence[Operand]:
    if len(ctx.node.outputs) > 1 and ctx.node.outputs[1]:
        ctx.refuse("indices")
    x, spatial = ctx.value(0), ctx.shape(0)[2:]
    kernel, strides, pads, dilations, counts = _windows(ctx)
    rank, filled = len(kernel), list(pads)
    for axis, count in enumerate(counts):
        span = (count - 1) * strides[axis] + dilations[axis] * (kernel[axis] - 1) + 1
        filled[rank + axis] = max(pads[rank + axis], span - spatial[axis] - pads[axis])
    slides = {"strides": strides, "pads": tuple(filled), "dilations": dilations}
    if (dtype := ctx.build.dtype(x)) == "int64":  # bytes, says ONNX: as floating-point numbers they are exact
        made = ctx.make("MaxPool", ctx.make("Cast", x, to=ctx.precision), kernel_shape=kernel, **slides)
        return [ctx.make("Cast", made, to=dtype)]
    return [ctx.make("MaxPool", x, kernel_shape=kernel, **slides)]


@lowers("AveragePool")
def _average_pool(ctx: Context) -> Sequence[Operand]:
    """Lower to a pooling of one axis after the other."""
    x, counts_pads = ctx.value(0), bool(ctx.attr("count_include_pad", 0))
    kernel, strides, pads, dilations, counts = _windows(ctx)
    for axis, geometry in enumerate(zip(kernel, strides, dilations, pads, pads[len(kernel) :], strict=False)):
        kept, _, _, *padding = geometry
        if (kept, counts[axis], *padding) != (1, ctx.build.shape(x)[2 + axis], 0, 0):
            where = {"axis": 2 + axis, "size": counts[axis], "window": geometry, "transposed": False}
            x = ctx.make("Resample", x, **where, mode="average", count_include_pad=counts_pads)
    return [x]


@lowers("GlobalAveragePool", op="ReduceSum")
@lowers("GlobalMaxPool", op="ReduceMax")
def _global_pool(ctx: Context, op: str) -> Sequence[Operand]:
    shape = ctx.shape(0)
    y = ctx.make(op, ctx.value(0), axes=tuple(range(2, len(shape))))
    return [y if op == "ReduceMax" else ctx.make("Mul", y, ctx.number(1 / prod(shape[2:]), y))]
