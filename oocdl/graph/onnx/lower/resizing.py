"""Lowers Resize and Upsample to a linear map along each axis, and GridSample to sums of gathered elements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import floor, prod
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.constant_folding import ints
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.lower.structure import slice_axis

_MODES = ("nearest", "linear", "cubic")
_COORDINATES = (
    "half_pixel",
    "pytorch_half_pixel",
    "half_pixel_symmetric",
    "asymmetric",
    "align_corners",
    "tf_crop_and_resize",
)
_EXTREMES = {"not_larger": min, "not_smaller": max}
"""Policies that keep the ratio of the axes -> which of their scales is that of all."""


def _resize(ctx: Context) -> Sequence[Operand]:
    attrs, coordinates = _attributes(ctx), _coordinates(ctx)
    x = ctx.value(0)
    for axis, size, scale in _sizes(ctx):
        if coordinates == "tf_crop_and_resize":
            _need_all_of_it(ctx, axis, size)
        if (size, scale) != (ctx.build.shape(x)[axis], 1.0):
            where = "align_corners" if coordinates == "tf_crop_and_resize" else coordinates
            x = ctx.make(
                "Resample", x, axis=axis, size=size, coordinates=where, scale=scale, transposed=False, **attrs
            )
    return [x]


def _is_old(ctx: Context) -> bool:
    """Whether scales are the second input, and coordinates ``asymmetric``."""
    return ctx.node.op == "Upsample" or ctx.opset < 11


def _coordinates(ctx: Context) -> str:
    found = "asymmetric" if _is_old(ctx) else ctx.attr("coordinate_transformation_mode", "half_pixel")
    if found not in _COORDINATES:
        ctx.refuse(f"coordinates {found}")
    return str(found)


def _attributes(ctx: Context) -> dict[str, Any]:
    """Return what a Resample is told of its mode; options that change nothing are left out."""
    mode = ctx.attr("mode", "nearest")
    antialias, exclude_outside = (bool(ctx.attr(name, 0)) for name in ("antialias", "exclude_outside"))
    if mode not in _MODES:
        ctx.refuse(f"mode {mode}")
    if mode == "nearest" and (antialias or exclude_outside):
        ctx.refuse("antialias or exclude_outside in mode nearest")
    attrs = {
        "mode": mode,
        "nearest_mode": "floor" if _is_old(ctx) else ctx.attr("nearest_mode", "round_prefer_floor"),
    }
    if mode == "cubic" or antialias:  # linear has two weights: without one of them it is the other
        attrs.update(antialias=antialias, exclude_outside=exclude_outside)
    if mode == "cubic":
        attrs["cubic_coeff_a"] = float(ctx.attr("cubic_coeff_a", -0.75))
    return attrs


def _need_all_of_it(ctx: Context, axis: int, size: int) -> None:
    """Refuse a region of interest that is not the whole axis; that is mapped corner to corner."""
    roi, rank = ctx.constants("a region", 1)[1], len(ctx.shape(0))
    axes = [place % rank for place in ctx.attr("axes", range(rank))]
    if roi is None or roi.size != 2 * len(axes):
        raise ModelError("tf_crop_and_resize needs a region: two numbers for each axis")
    start, end = roi.reshape(2, -1)[:, axes.index(axis)]
    if (start, end) != (0, 1) or size == 1 < ctx.shape(0)[axis]:
        ctx.refuse(f"tf_crop_and_resize of {start} to {end} along axis {axis} to {size}")


def _sizes(ctx: Context) -> list[tuple[int, int, float]]:
    """Return (axis, size, scale) for the axes of a Resize, from its scales or its sizes."""
    shape = ctx.shape(0)
    place = 1 if _is_old(ctx) else 2
    inputs = ctx.constants("scales or sizes", place, 3)
    scales = inputs[place] if len(inputs) > place else None
    if scales is None and "scales" in ctx.node.attrs:
        scales = np.asarray(ctx.attr("scales"))
    axes = tuple(axis % len(shape) for axis in ctx.attr("axes", range(len(shape))))
    if scales is not None and scales.size:
        factors = [float(str(scale)) for scale in scales.reshape(-1)]
        return [(axis, floor(shape[axis] * f), f) for axis, f in zip(axes, factors, strict=True)]
    sizes = _given_sizes(ctx, inputs, axes)
    policy = ctx.attr("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return [(axis, size, size / shape[axis]) for axis, size in sizes]
    if policy not in _EXTREMES:
        ctx.refuse(f"keep_aspect_ratio_policy {policy}")
    scale = _EXTREMES[policy](size / shape[axis] for axis, size in sizes)
    return [(axis, floor(scale * shape[axis] + 0.5), scale) for axis in axes]


def _given_sizes(ctx: Context, inputs: Sequence[Array | None], axes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (axis, size) as they are written; those of a traced file grow with its extents."""
    shape, before = ctx.shape(0), ctx.was(0)
    sizes = ints(ctx.node, inputs, "", 3)
    if not sizes:
        raise ModelError("neither scales nor sizes are given")
    result = []
    for axis, size in zip(axes, sizes, strict=True):
        if before is not None and not ctx.is_sized(3) and before[axis] != shape[axis]:
            if size * shape[axis] % before[axis]:
                raise ModelError(
                    f"its fixed size {size} was made for an extent of {before[axis]}, not {shape[axis]}"
                )
            size = size * shape[axis] // before[axis]
        result.append((axis, size))
    return result


def _grid_sample(ctx: Context) -> Sequence[Operand]:
    """Sum weighted elements of ``[N, C, *extents]`` around the places of a grid ``[N, *result, axes]``."""
    mode, padding = ctx.attr("mode", "linear"), ctx.attr("padding_mode", "zeros")
    if mode not in ("linear", "bilinear", "nearest"):
        ctx.refuse(f"mode {mode}")
    if padding not in ("zeros", "border"):
        ctx.refuse(f"padding_mode {padding}")
    shape, grid = ctx.shape(0), ctx.shape(1)
    if len(shape) < 3 or len(grid) != len(shape) or (grid[0], grid[-1]) != (shape[0], len(shape) - 2):
        raise ModelError(f"a grid {list(grid)} does not fit an input of shape {list(shape)}")
    (batch, channels, *extents), (*_, rank), result = shape, grid, grid[1:-1]
    x = ctx.make("Transpose", ctx.value(0), perm=(0, *range(2, rank + 2), 1))
    table = ctx.reshape(x, (batch, prod(extents), channels))
    near = []
    for axis, extent in enumerate(extents):
        last = rank - 1 - axis  # grids have the last axis first
        place = slice_axis(ctx, ctx.value(1), len(result) + 1, last, last + 1)
        near.append(_neighbours(ctx, ctx.reshape(place, (batch, prod(result))), extent))
    terms = []
    for corner in product(*near):
        ids, weight = corner[0]
        for extent, (index, other) in zip(extents[1:], corner[1:], strict=True):
            ids = ctx.make("Add", ctx.make("Mul", ids, ctx.number(extent, ids)), index)
            weight = ctx.make("Mul", weight, other)
        rows = ctx.make("Gather", table, ids, batch=1)
        terms.append(ctx.make("Mul", rows, ctx.reshape(weight, (batch, prod(result), 1))))
    total = reduce(lambda a, b: ctx.make("Add", a, b), terms)
    total = ctx.reshape(total, (batch, *result, channels))
    return [ctx.make("Transpose", total, perm=(0, len(result) + 1, *range(1, len(result) + 1)))]


def _neighbours(ctx: Context, grid: str, extent: int) -> list[tuple[str, str]]:
    """Return (index, weight) of the elements of an axis that places from -1 to 1 lie at or between."""

    def calc(op: str, a: str, b: float | str) -> str:
        return ctx.make(op, a, b if isinstance(b, str) else ctx.number(b, a))

    def inner(a: str) -> str:
        return calc("Min", calc("Max", a, 0.0), extent - 1.0)

    if ctx.attr("align_corners", 0):
        at = calc("Mul", calc("Add", grid, 1.0), (extent - 1) / 2)
    else:
        at = calc("Div", calc("Sub", calc("Mul", calc("Add", grid, 1.0), float(extent)), 1.0), 2.0)
    if ctx.attr("padding_mode", "zeros") == "border":
        at = inner(at)
    if ctx.attr("mode", "linear") == "nearest":
        low = ctx.make("Round", at)
        found = [(low, "")]
    else:
        low = ctx.make("Floor", at)
        part = calc("Sub", at, low)
        found = [(low, calc("Add", ctx.make("Neg", part), 1.0)), (calc("Add", low, 1.0), part)]
    result = []
    for place, weight in found:
        index = inner(place)
        inside = ctx.make("Cast", calc("Equal", index, place), to=ctx.build.dtype(at))
        weight = calc("Mul", weight, inside) if weight else inside
        result.append((ctx.make("Cast", index, to="int64"), weight))
    return result


RESIZING: dict[str, Lower] = {"Resize": _resize, "Upsample": _resize, "GridSample": _grid_sample}
"""Lowerings of what interpolates along axes."""
