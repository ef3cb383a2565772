"""Lowers Resize and Upsample to a linear map along each axis, and GridSample to sums of gathered elements."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from math import floor, prod
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.structure import slice_axis

_MOST_PARTS = 100
"""Largest denominator of a scale that is taken for a ratio, where its decimals do not end."""
_DIGITS = 7
_MODES = ("nearest", "linear", "cubic")
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners")
_A = -0.75
_NEAREST: dict[int, tuple[float, ...]] = {0: (1.0,)}
_LINEAR: dict[int, tuple[float, ...]] = {0: (-1.0, 1.0), 1: (1.0, 0.0)}
_CUBIC: dict[int, tuple[float, ...]] = {
    -1: (_A, -2 * _A, _A, 0.0),
    0: (_A + 2, -(_A + 3), 0.0, 1.0),
    1: (-(_A + 2), 2 * _A + 3, -_A, 0.0),
    2: (-_A, _A, 0.0, 0.0),
}
_WEIGHTS: dict[str, dict[int, tuple[float, ...]]] = {
    "nearest": _NEAREST,
    **dict.fromkeys(("linear", "bilinear"), _LINEAR),
    **dict.fromkeys(("cubic", "bicubic"), _CUBIC),
}
"""Mode of GridSample -> its neighbours, from the element at or below a place -> their weights, as the factors
of a polynomial of the distance to that element, the highest power first."""


@lowers("Resize", "Upsample")
def _resize(ctx: Context) -> Sequence[Operand]:
    attrs, x = _attributes(ctx), ctx.value(0)
    for axis, size, scale in _sizes(ctx):
        if (size, scale) != (ctx.build.shape(x)[axis], 1.0):
            x = ctx.make("Resample", x, axis=axis, size=size, scale=scale, transposed=False, **attrs)
    return [x]


def _is_old(ctx: Context) -> bool:
    """Whether scales are the second input, and coordinates ``asymmetric``."""
    return ctx.node.op == "Upsample" or ctx.opset < 11


def _attributes(ctx: Context) -> dict[str, Any]:
    """Return what a Resample is told of its mode; options that change nothing are left out."""
    mode = ctx.attr("mode", "nearest")
    found = "asymmetric" if _is_old(ctx) else ctx.attr("coordinate_transformation_mode", "half_pixel")
    if found not in _COORDINATES:
        ctx.refuse(f"coordinates {found}")
    antialias, exclude_outside = (bool(ctx.attr(name, 0)) for name in ("antialias", "exclude_outside"))
    if mode not in _MODES:
        ctx.refuse(f"mode {mode}")
    if mode == "nearest" and (antialias or exclude_outside):
        ctx.refuse("antialias or exclude_outside in mode nearest")
    attrs = {
        "coordinates": found,
        "mode": mode,
        "nearest_mode": "floor" if _is_old(ctx) else ctx.attr("nearest_mode", "round_prefer_floor"),
    }
    if mode == "cubic" or antialias:  # linear has two weights: without one of them it is the other
        attrs.update(antialias=antialias, exclude_outside=exclude_outside)
    if mode == "cubic":
        attrs["cubic_coeff_a"] = float(ctx.attr("cubic_coeff_a", -0.75))
    return attrs


def _sizes(ctx: Context) -> list[tuple[int, int, float]]:
    """Return (axis, size, scale) for the axes of a Resize, from its scales or its sizes."""
    shape = ctx.shape(0)
    place = 1 if _is_old(ctx) else 2
    ctx.constants("scales or sizes", place, 3)
    scales = ctx.known(place)
    if scales is None and "scales" in ctx.node.attrs:
        scales = np.asarray(ctx.attr("scales"))
    axes = tuple(axis % len(shape) for axis in ctx.attr("axes", range(len(shape))))
    if scales is not None and scales.size:
        factors = [_exact(ctx, scale) for scale in scales.reshape(-1)]
        return [(axis, floor(shape[axis] * f), f) for axis, f in zip(axes, factors, strict=True)]
    sizes = ctx.ints("scales or sizes", "", 3)
    if not sizes:
        raise ModelError("neither scales nor sizes are given")
    policy = ctx.attr("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        ctx.refuse(f"keep_aspect_ratio_policy {policy}")
    return [(axis, size, size / shape[axis]) for axis, size in zip(axes, sizes, strict=True)]


def _exact(ctx: Context, scale: Any) -> float:
    """Return a scale as the code has it, which a file rounds to float32: 0.4, or 5/3."""
    # It decides of a size: twelve times 1.6666666 are not yet twenty.
    known = float(scale) if ctx.exact is None else ctx.exact.number(float(scale))
    if known != scale or not 0 < known < float("inf"):
        return known
    ratio = Fraction(known).limit_denominator(_MOST_PARTS)
    decimal = float(str(scale))
    is_ratio = np.float32(float(ratio)) == np.float32(scale) and len(str(scale)) > _DIGITS
    return float(ratio) if is_ratio else decimal


@lowers("GridSample")
def _grid_sample(ctx: Context) -> Sequence[Operand]:
    """Sum weighted elements of ``[N, C, *extents]`` around the places of a grid ``[N, *result, axes]``."""
    mode, padding = ctx.attr("mode", "linear"), ctx.attr("padding_mode", "zeros")
    shape, grid = ctx.shape(0), ctx.shape(1)
    if mode not in _WEIGHTS:
        ctx.refuse(f"mode {mode}")
    if padding not in ("zeros", "border", "reflection"):
        ctx.refuse(f"padding_mode {padding}")
    if len(shape) < 3 or len(grid) != len(shape) or (grid[0], grid[-1]) != (shape[0], len(shape) - 2):
        raise ModelError(f"a grid {list(grid)} does not fit an input of shape {list(shape)}")
    if _WEIGHTS[mode] is _CUBIC and len(shape) != 4:
        ctx.refuse(f"mode {mode} along {len(shape) - 2} axes, not 2")
    (batch, channels, *extents), (*_, rank), result = shape, grid, grid[1:-1]
    x = ctx.make("Transpose", ctx.value(0), perm=(0, *range(2, rank + 2), 1))
    table, points = ctx.reshape(x, (batch, prod(extents), channels)), (batch, prod(result))
    found: list[tuple[str, str]] = []
    for axis, extent in enumerate(extents):
        last = rank - 1 - axis  # grids have the last axis first
        place = slice_axis(ctx, ctx.value(1), len(result) + 1, last, last + 1)
        near = _neighbours(ctx, ctx.reshape(place, (*points, 1)), extent)
        found = [_together(ctx, found[0], near, extent) if found else near]
    ((ids, weights),) = found
    rows = ctx.make("Gather", table, ids, batch=1)
    rows = ctx.make("Mul", rows, ctx.reshape(weights, (*ctx.build.shape(ids), 1)))
    total = ctx.reshape(ctx.make("ReduceSum", rows, axes=(2,)), (batch, *result, channels))
    return [ctx.make("Transpose", total, perm=(0, len(result) + 1, *range(1, len(result) + 1)))]


def _together(ctx: Context, first: tuple[str, str], second: tuple[str, str], extent: int) -> tuple[str, str]:
    """Return (index, weight) of each pair of neighbours, the second of them on an axis of ``extent``."""
    *points, many = ctx.build.shape(first[0])
    few = ctx.build.shape(second[0])[-1]
    ids, weights = (ctx.reshape(value, (*points, many, 1)) for value in first)
    others = [ctx.reshape(value, (*points, 1, few)) for value in second]
    ids = ctx.make("Add", _calc(ctx, "Mul", ids, extent), others[0])
    weights = ctx.make("Mul", weights, others[1])
    return ctx.reshape(ids, (*points, many * few)), ctx.reshape(weights, (*points, many * few))


def _calc(ctx: Context, op: str, a: str, b: float | str) -> str:
    """Add a node of two operands, of which the second may be a number."""
    return ctx.make(op, a, b if isinstance(b, str) else ctx.number(b, a))


def _neighbours(ctx: Context, grid: str, extent: int) -> tuple[str, str]:
    """Return (index, weight) ``[.., neighbours]`` of what places ``[.., 1]`` from -1 to 1 lie between."""
    calc, neighbours = partial(_calc, ctx), _WEIGHTS[ctx.attr("mode", "linear")]
    if ctx.attr("align_corners", 0):
        at = calc("Mul", calc("Add", grid, 1.0), (extent - 1) / 2)
    else:
        at = calc("Div", calc("Sub", calc("Mul", calc("Add", grid, 1.0), float(extent)), 1.0), 2.0)
    if neighbours is not _CUBIC:
        at = _padded(ctx, at, extent)
    low = ctx.make("Round" if neighbours is _NEAREST else "Floor", at)
    part = calc("Sub", at, low)
    place = calc("Add", low, ctx.store(np.array([[list(neighbours)]], float)))
    if neighbours is _CUBIC:
        place = _padded(ctx, place, extent)
    index = calc("Min", calc("Max", place, 0.0), extent - 1.0)
    first, *factors = (ctx.store(np.array([[power]])) for power in zip(*neighbours.values(), strict=True))
    weights = first
    for factor in factors:
        weights = calc("Add", calc("Mul", weights, part), factor)
    inside = ctx.make("Cast", calc("Equal", index, place), to=ctx.build.dtype(at))
    return ctx.make("Cast", index, to="int64"), calc("Mul", inside, weights)


def _padded(ctx: Context, at: str, extent: int) -> str:
    """Return where places outside of an axis are read, if that is not padded by zeros."""
    # As in PyTorch a place at the border has no gradient.
    calc, last, padding = partial(_calc, ctx), extent - 1.0, ctx.attr("padding_mode", "zeros")
    if padding == "zeros":
        return at
    least = 0.0 if ctx.attr("align_corners", 0) else -0.5
    span = last - 2 * least
    if padding == "reflection" and span:
        far = ctx.make("Abs", calc("Sub", at, least))
        flips = ctx.make("Floor", calc("Div", far, span))
        odd = calc("Sub", flips, calc("Mul", ctx.make("Floor", calc("Div", flips, 2.0)), 2.0))
        rest = calc("Sub", far, calc("Mul", flips, span))
        back = calc("Mul", odd, calc("Add", calc("Mul", rest, -2.0), span))
        at = calc("Add", calc("Add", rest, back), least)
    for op, bound in (("Greater", 0.0), ("Less", last)):
        at = ctx.make("Where", calc(op, at, bound), at, ctx.number(bound, at))
    return at
