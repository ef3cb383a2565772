"""Lowers ONNX operators that put elements elsewhere by a pattern to Reshape, Transpose, Expand and Where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.onnx.constant_folding import allow, numpy_type
from oocdl.graph.onnx.context import Context, Lower, Operand


def _tile(ctx: Context) -> Sequence[Operand]:
    x, shape = ctx.value(0), ctx.shape(0)
    array = ctx.constants("repeats", 1)[1]
    repeats = [] if array is None else [int(count) for count in array.reshape(-1)]
    if len(repeats) != len(shape) or min(repeats, default=1) < 1:
        raise ModelError(f"repeats {repeats} are not a positive number for each axis of {list(shape)}")
    batched = ctx.batch is not None and not ctx.is_sized(1) and shape[:1] == (1,)
    if batched and ctx.batch is not None and 1 < repeats[0] == ctx.batch[0]:
        repeats[0] = ctx.batch[1]  # something that is the same for all samples, traced with a batch
    apart = [(count, extent) for count, extent in zip(repeats, shape, strict=True)]
    before = [n for count, extent in apart for n in ((1, extent) if count > 1 else (extent,))]
    after = [n for count, extent in apart for n in ((count, extent) if count > 1 else (extent,))]
    if before == after:
        return [x]
    wide = ctx.make("Expand", ctx.reshape(x, before), shape=tuple(after))
    return [ctx.reshape(wide, [count * extent for count, extent in apart])]


def _moved(ctx: Context, split: Sequence[int], perm: Sequence[int], result: Sequence[int]) -> list[Operand]:
    """Reshape to ``split``, transpose, and reshape to the result."""
    parts = ctx.make("Transpose", ctx.reshape(ctx.value(0), split), perm=tuple(perm))
    return [ctx.reshape(parts, result)]


def _depth_to_space(ctx: Context) -> Sequence[Operand]:
    (n, c, h, w), b = ctx.shape(0), int(ctx.attr("blocksize"))
    if c % b**2:
        raise ModelError(f"{c} channels are not a multiple of blocksize² ({b**2})")
    result = (n, c // b**2, h * b, w * b)
    if ctx.attr("mode", "DCR") == "CRD":
        return _moved(ctx, (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3), result)
    return _moved(ctx, (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2), result)


def _space_to_depth(ctx: Context) -> Sequence[Operand]:
    (n, c, h, w), b = ctx.shape(0), int(ctx.attr("blocksize"))
    if h % b or w % b:
        raise ModelError(f"height {h} and width {w} are not multiples of blocksize {b}")
    perm = (0, 1, 3, 5, 2, 4) if ctx.attr("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return _moved(ctx, (n, c, h // b, b, w // b, b), perm, (n, c * b**2, h // b, w // b))


def _trilu(ctx: Context) -> Sequence[Operand]:
    x, (rows, columns) = ctx.value(0), ctx.shape(0)[-2:]
    diagonal = ctx.constants("a diagonal", 1)[1] if ctx.has(1) else None
    first = 0 if diagonal is None else int(diagonal.reshape(-1)[0])
    row = ctx.build.constant(np.arange(rows)[:, None] + first, "int64")
    column = ctx.build.constant(np.arange(columns), "int64")
    outside = ctx.make("Less" if ctx.attr("upper", 1) else "Greater", column, row)
    return [ctx.make("Where", outside, ctx.number(0.0, x), x)]


def _eye_like(ctx: Context) -> Sequence[Operand]:
    rows, columns = ctx.shape(0)
    allow(ctx.node, (rows, columns), 8)
    given = ctx.operand(0)
    kind = given.dtype if not isinstance(given, str) else np.dtype(ctx.build.dtype(given))
    code = ctx.attr("dtype")
    ctx.sized.add(ctx.node.outputs[0])
    return [np.eye(rows, columns, int(ctx.attr("k", 0)), numpy_type(code) if code else kind)]


REARRANGE: dict[str, Lower] = {
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Trilu": _trilu,
    "EyeLike": _eye_like,
}
"""Lowerings of operators that put elements elsewhere, or zeros in their place."""
