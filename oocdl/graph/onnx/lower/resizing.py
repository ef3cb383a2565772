"""Lowers Resize and Upsample to one linear map along each axis: all of ONNX's modes are separable."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.constant_folding import ints
from oocdl.graph.onnx.context import Context, Lower, Operand

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


RESIZING: dict[str, Lower] = {"Resize": _resize, "Upsample": _resize}
"""Lowerings of what interpolates along axes."""
