"""Lowers ONNX operators to those of ``ops``: convolutions, norms, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role, Shape
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.lower.arithmetic import need_floats
from oocdl.graph.onnx.roles import trains_by_origin


def _filled(ctx: Context, index: int, number: float) -> bool:
    """Whether an optional input is left out, or known and ``number`` everywhere."""
    if not ctx.has(index):
        return True
    found = ctx.known(index)
    return found is not None and bool((found == number).all())


def _affine(ctx: Context, y: str, scale: int, bias: int, channels: bool) -> str:
    """Add ``y * scale + bias`` along the channels or last axes; scales of 1 and biases of 0 are left out."""
    rank = len(ctx.build.shape(y))
    for index, op, neutral in ((scale, "Mul", 1.0), (bias, "Add", 0.0)):
        if not _filled(ctx, index, neutral):
            vector = ctx.value(index)
            y = ctx.make(op, y, ctx.per_channel(vector, rank) if channels else vector)
    return y


def window(ctx: Context, spatial: Shape, kernel: Shape) -> tuple[Shape, Shape, Shape]:
    """Return strides, pads and dilations of a sliding window, with ``auto_pad`` resolved."""
    rank = len(kernel)
    strides = tuple(ctx.attr("strides", (1,) * rank))
    dilations = tuple(ctx.attr("dilations", (1,) * rank))
    mode = ctx.attr("auto_pad", "NOTSET")
    if mode == "NOTSET":
        return strides, tuple(ctx.attr("pads", (0,) * 2 * rank)), dilations
    if mode == "VALID":
        return strides, (0,) * 2 * rank, dilations
    first, last = [], []
    for extent, k, s, d in zip(spatial, kernel, strides, dilations, strict=True):
        total = max((-(-extent // s) - 1) * s + d * (k - 1) + 1 - extent, 0)
        small, large = total // 2, total - total // 2
        first.append(large if mode == "SAME_LOWER" else small)
        last.append(small if mode == "SAME_LOWER" else large)
    return strides, (*first, *last), dilations


def _kernel(ctx: Context) -> Shape:
    """Return the spatial shape of the weight; refuses groups that do not divide channels, and ranks that are
    not supported."""
    need_floats(ctx, 0, 1)
    groups = int(ctx.attr("group", 1))
    if groups < 1 or ctx.shape(0)[1] % groups or ctx.shape(1)[0] % groups:
        raise ModelError(f"group {groups} does not divide the channels of {list(ctx.shape(0))}")
    kernel = ctx.shape(1)[2:]
    if len(ctx.shape(0)) != len(ctx.shape(1)) or not 1 <= len(kernel) <= 3:
        raise ModelError(
            f"input {list(ctx.shape(0))} and weight {list(ctx.shape(1))} are not of 1 to 3 spatial axes"
        )
    return kernel


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
    return [_affine(ctx, y, len(ctx.node.inputs), 2, channels=True)]


def _conv(ctx: Context) -> Sequence[Operand]:
    strides, pads, dilations = window(ctx, ctx.shape(0)[2:], _kernel(ctx))
    return _convolution(ctx, "Conv", strides=strides, pads=pads, dilations=dilations)


def _conv_transpose(ctx: Context) -> Sequence[Operand]:
    kernel, spatial = _kernel(ctx), ctx.shape(0)[2:]
    rank, mode = len(kernel), ctx.attr("auto_pad", "NOTSET")
    strides = tuple(ctx.attr("strides", (1,) * rank))
    dilations = tuple(ctx.attr("dilations", (1,) * rank))
    extra = ctx.attr("output_padding", (0,) * rank)
    pads = list(ctx.attr("pads", (0,) * 2 * rank)) if mode == "NOTSET" else [0] * 2 * rank
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


def _instance_norm(ctx: Context) -> Sequence[Operand]:
    """Lower InstanceNormalization, alone or inside the two Reshapes of an exported GroupNorm.

    The latter merges channels of a group with all of space. Normalizing over
    the axes as they were before is the same, and leaves them free to be cut.
    """
    x, shape, eps = ctx.value(0), ctx.shape(0), ctx.attr("epsilon", 1e-5)
    source = ctx.unreshaped(x)
    before = ctx.build.shape(source)
    if (
        source != x
        and len(shape) == 3
        and len(before) > 3
        and before[0] == shape[0]
        and before[1] % shape[1] == 0
    ):
        split = (before[1] // shape[1],) if before[1] != shape[1] else ()
        x = ctx.reshape(source, (*shape[:2], *split, *before[2:]))
    y, _, _ = _normalize(ctx, x, range(2, len(ctx.build.shape(x))), eps)
    return [ctx.reshape(_affine(ctx, y, 1, 2, channels=True), shape)]


def _group_norm(ctx: Context) -> Sequence[Operand]:
    shape, groups = ctx.shape(0), ctx.attr("num_groups")
    if shape[1] % groups:
        raise ModelError(f"{shape[1]} channels are not divisible into {groups} groups")
    x = ctx.reshape(ctx.value(0), (shape[0], groups, shape[1] // groups, *shape[2:]))
    y, _, _ = _normalize(ctx, x, range(2, len(shape) + 1), ctx.attr("epsilon", 1e-5))
    by_group = (
        ctx.shape(1) == (groups,) and ctx.opset < 21
    )  # scale and bias: one a group, later one a channel
    if by_group:
        return [ctx.reshape(_affine(ctx, y, 1, 2, channels=True), shape)]
    return [_affine(ctx, ctx.reshape(y, shape), 1, 2, channels=True)]


def _layer_norm(ctx: Context) -> Sequence[Operand]:
    x, shape = ctx.value(0), ctx.shape(0)
    axes, eps = range(ctx.attr("axis", -1) % len(shape), len(shape)), ctx.attr("epsilon", 1e-5)
    y, mean, var = _normalize(ctx, x, axes, eps)
    results: list[Operand] = [_affine(ctx, y, 1, 2, channels=False), mean]
    if len(ctx.node.outputs) > 2:
        deviation = ctx.make("Sqrt", ctx.make("Add", var, ctx.number(eps, var)))
        results.append(ctx.make("Reciprocal", deviation))
    return results[: len(ctx.node.outputs)]


def _batch_norm(ctx: Context) -> Sequence[Operand]:
    """Lower BatchNormalization, by the statistics of the batch in training, else by those that it is given.

    Statistics that are computed in the graph, or numbers of the model's code, belong to a norm that keeps
    none: it takes them unless it says ``training_mode=1``, and then normalizes by the batch always.
    """
    x, shape, eps = ctx.value(0), ctx.shape(0), ctx.attr("epsilon", 1e-5)
    rank = len(shape)
    stats = [ctx.value(3), ctx.value(4)]
    if any(ctx.used(name) for name in ctx.node.outputs[1:] if name):
        ctx.refuse("running statistics used elsewhere")
    roles = {ctx.build.values[value].role for value in stats}
    trains = ctx.training and trains_by_origin(ctx.node) and ctx.node.outputs[0] not in ctx.evaluated
    if Role.WEIGHT in roles or (trains and Role.CONSTANT in roles):
        ctx.refuse("running statistics that are trained, or read elsewhere")
    if Role.STATE in roles:
        frozen = any(ctx.frozen(name) for name in ctx.node.inputs[3:5])
        given = not ctx.training or frozen or ctx.node.outputs[0] in ctx.evaluated
        updates = not given
    else:
        given, updates = not ctx.attr("training_mode", 0), False
    if given:
        mean, var = (ctx.per_channel(value, rank) for value in stats)
        deviation = ctx.make("Sqrt", ctx.make("Add", var, ctx.number(eps, var)))
        y = ctx.make("Mul", ctx.make("Sub", x, mean), ctx.make("Reciprocal", deviation))
    else:
        y, *batch = _normalize(ctx, x, (0, *range(2, rank)), eps)
    if updates:
        _update(ctx, batch, shape)
    results: list[Operand] = [_affine(ctx, y, 1, 2, channels=True), *stats]
    return results[: len(ctx.node.outputs)]


def _update(ctx: Context, batch: Sequence[str], shape: Shape) -> None:
    """Update the running statistics by those of the batch, with the unbiased variance, as PyTorch does."""
    count, keep = prod(shape) // shape[1], float(ctx.attr("momentum", 0.9))
    if count < 2:
        raise ModelError(f"one value per channel in {list(shape)}: no batch statistics; use a larger batch")
    for index, value, unbiased in ((3, batch[0], 1.0), (4, batch[1], count / (count - 1))):
        name = ctx.node.inputs[index]
        if name not in ctx.build.values or ctx.build.values[name].role != Role.STATE:
            ctx.refuse("running statistics that are no initializers")
        if ctx.build.shape(name) != (shape[1],):
            raise ModelError(f"running statistics {list(ctx.build.shape(name))} for {shape[1]} channels")
        now = ctx.build.updates.get(name, name)
        fresh = ctx.reshape(value, (shape[1],))
        fresh = ctx.make("Mul", fresh, ctx.number(unbiased * (1 - keep), fresh))
        ctx.build.updates[name] = ctx.make("Add", ctx.make("Mul", now, ctx.number(keep, now)), fresh)


def _dropout(ctx: Context) -> Sequence[Operand]:
    """Lower Dropout, which is active in training whatever the file says."""
    x = ctx.value(0)
    given = ctx.constants("a ratio", 1)[1] if ctx.has(1) else None
    ratio = float(ctx.attr("ratio", 0.5)) if given is None else float(str(given.reshape(-1)[0]))
    if not 0 <= ratio <= 1:
        raise ModelError(f"a dropout ratio has to be between 0 and 1, not {ratio}")
    uniform = None
    if ctx.training and ratio == 1 and not (len(ctx.node.outputs) > 1 and ctx.used(ctx.node.outputs[1])):
        return [ctx.make("Mul", x, ctx.number(0.0, x))]
    if ctx.training and ratio:
        name = ctx.build.unique(f"{ctx.build.scope}uniform")
        uniform = ctx.build.value(name, ctx.shape(0), ctx.build.dtype(x), Role.RANDOM)
    y = ctx.make("Dropout", x, uniform, ratio=ratio) if uniform else x
    if len(ctx.node.outputs) < 2 or not ctx.used(ctx.node.outputs[1]):
        return [y]
    if uniform:
        return [y, ctx.make("Not", ctx.make("Less", uniform, ctx.number(ratio, uniform)))]
    return [y, ctx.make("Expand", ctx.build.constant(True, "bool"), shape=ctx.shape(0))]


LAYERS: dict[str, Lower] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "Dropout": _dropout,
}
"""Lowerings of the operators of neural-network layers."""
