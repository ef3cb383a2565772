"""Lowers pooling: sums of windows are separable, so they are one Resample for each spatial axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.lower.lower_layers import window
from oocdl.graph.onnx.lower.lower_reductions import root


def _windows(ctx: Context) -> tuple[Shape, Shape, Shape, Shape, Shape]:
    """Return kernel, strides, pads, dilations and the number of windows along each axis.

    With ``ceil_mode`` a last window may hang over the padded operand, if it starts before its end padding.
    """
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


def _along_axes(ctx: Context, x: str, **attrs: Any) -> str:
    """Pool one axis after the other."""
    kernel, strides, pads, dilations, counts = _windows(ctx)
    for axis, geometry in enumerate(zip(kernel, strides, dilations, pads, pads[len(kernel) :], strict=False)):
        kept, _, _, *padding = geometry
        if (kept, counts[axis], *padding) != (1, ctx.build.shape(x)[2 + axis], 0, 0):
            x = ctx.make(
                "Resample",
                x,
                axis=2 + axis,
                size=counts[axis],
                window=geometry,
                transposed=False,
                **attrs,
            )
    return x


def _average_pool(ctx: Context) -> Sequence[Operand]:
    counts_pads = bool(ctx.attr("count_include_pad", 0))
    return [_along_axes(ctx, ctx.value(0), mode="average", count_include_pad=counts_pads)]


def _power(ctx: Context, x: str) -> tuple[str, float]:
    """Return ``|x|^p`` and p."""
    p = float(ctx.attr("p", 2))
    if p < 1:
        ctx.refuse(f"p {p}")
    if p == 2:
        return ctx.make("Mul", x, x), p
    size = ctx.make("Abs", x)
    return (size if p == 1 else ctx.make("Pow", size, ctx.number(p, size))), p


def _root(ctx: Context, total: str, p: float) -> str:
    """Return the p-th root, whose gradient is 0 where it is 0, as that of norms in PyTorch is."""
    if p in (1, 2):
        return root(ctx, total) if p == 2 else total
    none = ctx.make("Equal", total, ctx.number(0.0, total))
    safe = ctx.make("Where", none, ctx.number(1.0, total), total)
    power = ctx.make("Pow", safe, ctx.number(1 / p, safe))
    return ctx.make("Where", none, ctx.number(0.0, power), power)


def _lp_pool(ctx: Context) -> Sequence[Operand]:
    powers, p = _power(ctx, ctx.value(0))
    return [_root(ctx, _along_axes(ctx, powers, mode="sum"), p)]


def _space(ctx: Context) -> tuple[int, ...]:
    """Return the spatial axes."""
    return tuple(range(2, len(ctx.shape(0))))


def _global_average(ctx: Context) -> Sequence[Operand]:
    x, shape = ctx.value(0), ctx.shape(0)
    total = ctx.make("ReduceSum", x, axes=_space(ctx))
    return [ctx.make("Mul", total, ctx.number(1 / prod(shape[2:]), total))]


def _global_max(ctx: Context) -> Sequence[Operand]:
    return [ctx.make("ReduceMax", ctx.value(0), axes=_space(ctx))]


def _global_lp_pool(ctx: Context) -> Sequence[Operand]:
    powers, p = _power(ctx, ctx.value(0))
    return [_root(ctx, ctx.make("ReduceSum", powers, axes=_space(ctx)), p)]


POOLING: dict[str, Lower] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalMaxPool": _global_max,
    "GlobalAveragePool": _global_average,
    "GlobalLpPool": _global_lp_pool,
}
"""Lowerings of pooling."""
