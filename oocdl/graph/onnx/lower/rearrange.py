"""Lowers what puts elements elsewhere by a pattern, to slices, Reshape, Transpose and Gather.

Pad becomes slices that are joined: what repeats has the sum of all gradients then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, normalize_axis
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.constant_folding import allow, numpy_type
from oocdl.graph.onnx.context import Context, Operand, Sized, lowers
from oocdl.graph.onnx.lower.structure import expanded, slice_axis

_REPEATS = ("edge", "reflect", "wrap")
"""Modes that repeat elements; NumPy calls them the same."""

_MOST_PIECES = 64
"""Maximum number of pieces of an axis that are joined: a few bytes can ask for millions."""


@lowers("Pad")
def _pad(ctx: Context) -> Sequence[Operand]:
    x, mode = ctx.value(0), ctx.attr("mode", "constant")
    if mode != "constant" and mode not in _REPEATS:
        ctx.refuse(f"mode {mode}")
    inputs = ctx.constants("pads or a value", 1, 2, 3)
    filler = inputs[2] if len(inputs) > 2 else None
    number = ctx.attr("value", 0.0) if filler is None or not filler.size else filler.reshape(-1)[0].item()
    for axis, before, after in _pads(ctx):
        x = _padded(ctx, x, axis, before, after, mode, number)
    return [x]


def _padded(ctx: Context, x: str, axis: int, before: int, after: int, mode: str, number: float) -> str:
    """Pad an axis; pads below zero are cut off, and nothing of that is repeated."""
    start, stop = max(-before, 0), ctx.build.shape(x)[axis] - max(-after, 0)
    if start >= stop:
        raise ModelError(f"pads {before} and {after} leave nothing of axis {axis}")
    x = slice_axis(ctx, x, axis, start, stop)
    before, after = max(before, 0), max(after, 0)
    if not before and not after:
        return x
    if mode != "constant":
        return _repeated(ctx, x, axis, (before, after))
    if number == 0:
        return ctx.make("Pad", x, axis=axis, before=before, after=after)
    filled = [[expanded(ctx, ctx.number(number, x), x, axis, n)] if n else [] for n in (before, after)]
    return ctx.make("Concat", *filled[0], x, *filled[1], axis=axis)


def _pads(ctx: Context) -> list[tuple[int, int, int]]:
    rank = len(ctx.shape(0))
    axes = ctx.ints("axes", "axes", 3)
    axes = tuple(range(rank)) if axes is None else axes
    pads = ctx.ints("pads", "pads", 1) or ()
    if len(pads) != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        raise ModelError(f"pads {list(pads)} do not fit axes {list(axes)} of {rank}")
    count = len(axes)
    return [(axis % rank, a, b) for axis, a, b in zip(axes, pads[:count], pads[count:], strict=True)]


def _repeated(ctx: Context, x: str, axis: int, pads: tuple[int, int]) -> str:
    """Join ``x`` with the slices of itself that lie before and after it, forwards, backwards or of one."""
    extent = ctx.build.shape(x)[axis]
    allow(ctx.node, (pads[0] + extent + pads[1],), 8)
    places = np.pad(np.arange(extent), pads, mode=ctx.attr("mode"))
    runs = [*_runs(places[: pads[0]]), (0, extent, 1), *_runs(places[pads[0] + extent :])]
    if len(runs) > _MOST_PIECES:
        ctx.refuse(f"axis {axis} of {extent} repeated {len(runs) - 1} times")
    return ctx.make("Concat", *(_piece(ctx, x, axis, *run) for run in runs), axis=axis)


def _runs(places: Array) -> Iterator[tuple[int, int, int]]:
    """Yield (first, count, step) of neighbours, with a step of 1, -1 or 0.

    >>> list(_runs(np.array([3, 2, 1, 0, 0, 5])))
    [(3, 4, -1), (0, 1, 1), (5, 1, 1)]
    """
    steps = np.diff(places)
    start = 0
    while start < len(places):
        step = int(steps[start]) if start < len(steps) and abs(steps[start]) <= 1 else 1
        other = np.flatnonzero(steps[start:] != step)
        stop = start + 1 + int(other[0] if other.size else len(steps) - start)
        yield int(places[start]), stop - start, step
        start = stop


def _piece(ctx: Context, x: str, axis: int, first: int, count: int, step: int) -> str:
    """Return ``count`` elements from ``first`` on; a step of 0 repeats it."""
    last = first + step * (count - 1)
    piece = slice_axis(ctx, x, axis, min(first, last), max(first, last) + 1)
    if step == -1:
        return ctx.make("Reverse", piece, axis=axis)
    return piece if step or count == 1 else expanded(ctx, piece, piece, axis, count)


@lowers("Tile")
def _tile(ctx: Context) -> Sequence[Operand]:
    x, shape = ctx.value(0), ctx.shape(0)
    repeats = [*(ctx.ints("repeats", "", 1) or ())]
    if len(repeats) != len(shape) or min(repeats, default=1) < 1:
        raise ModelError(f"repeats {repeats} are not a positive number for each axis of {list(shape)}")
    batched = ctx.batch is not None and not ctx.is_sized(1) and shape[:1] == (1,)
    if batched and ctx.batch is not None and 1 < repeats[0] == ctx.batch[0]:
        # Something that is the same for all samples, traced with a batch.
        repeats[0], ctx.rebatched = ctx.batch[1], True
    apart = [*zip(repeats, shape, strict=True)]
    before = [n for count, extent in apart for n in ((1, extent) if count > 1 else (extent,))]
    after = [n for count, extent in apart for n in ((count, extent) if count > 1 else (extent,))]
    if before == after:
        return [x]
    wide = ctx.make("Expand", ctx.reshape(x, before), shape=tuple(after))
    ctx.tiles.add(wide)
    return [ctx.reshape(wide, [count * extent for count, extent in apart])]


def _moved(ctx: Context, split: Sequence[int], perm: Sequence[int], result: Sequence[int]) -> list[Operand]:
    """Reshape to ``split``, transpose, and reshape to the result."""
    parts = ctx.make("Transpose", ctx.reshape(ctx.value(0), split), perm=tuple(perm))
    return [ctx.reshape(parts, result)]


@lowers("DepthToSpace")
def _depth_to_space(ctx: Context) -> Sequence[Operand]:
    (n, c, h, w), b = ctx.shape(0), int(ctx.attr("blocksize"))
    if c % b**2:
        raise ModelError(f"{c} channels are not a multiple of blocksize² ({b**2})")
    result = (n, c // b**2, h * b, w * b)
    if ctx.attr("mode", "DCR") == "CRD":
        return _moved(ctx, (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3), result)
    return _moved(ctx, (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2), result)


@lowers("SpaceToDepth")
def _space_to_depth(ctx: Context) -> Sequence[Operand]:
    (n, c, h, w), b = ctx.shape(0), int(ctx.attr("blocksize"))
    if h % b or w % b:
        raise ModelError(f"height {h} and width {w} are not multiples of blocksize {b}")
    perm = (0, 1, 3, 5, 2, 4) if ctx.attr("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return _moved(ctx, (n, c, h // b, b, w // b, b), perm, (n, c * b**2, h // b, w // b))


@lowers("Trilu")
def _trilu(ctx: Context) -> Sequence[Operand]:
    x, (rows, columns) = ctx.value(0), ctx.shape(0)[-2:]
    first = ctx.scalar("a diagonal", 1) or 0
    row = ctx.build.constant(numbered(rows)[:, None] + first, "int64")
    column = ctx.build.constant(numbered(columns), "int64")
    outside = ctx.make("Less" if ctx.attr("upper", 1) else "Greater", column, row)
    return [ctx.make("Where", outside, ctx.number(0.0, x), x)]


@lowers("EyeLike")
def _eye_like(ctx: Context) -> Sequence[Operand]:
    rows, columns = ctx.shape(0)
    allow(ctx.node, (rows, columns), 8)
    given = ctx.operand(0)
    kind = given.dtype if not isinstance(given, str) else np.dtype(ctx.build.dtype(given))
    code = ctx.attr("dtype")
    return [np.eye(rows, columns, int(ctx.attr("k", 0)), numpy_type(code) if code else kind).view(Sized)]


@lowers("ReverseSequence")
def _reverse_sequence(ctx: Context) -> Sequence[Operand]:
    """Turn round the first elements of each sample, as many as its length says; the rest stays."""
    x, shape, rank = ctx.value(0), ctx.shape(0), len(ctx.shape(0))
    places = ctx.attr("batch_axis", 1), ctx.attr("time_axis", 0)
    batch, time = (normalize_axis(axis, rank) for axis in places)
    if batch == time or ctx.shape(1) != (shape[batch],):
        raise ModelError(f"lengths {list(ctx.shape(1))} of axis {batch} and {time} do not fit {list(shape)}")
    lengths = ctx.reshape(ctx.value(1), (shape[batch], 1))
    place = ctx.build.constant(numbered(shape[time])[None], "int64")
    mirrored = ctx.make("Sub", ctx.make("Sub", lengths, ctx.number(1, lengths)), place)
    ids = ctx.make("Where", ctx.make("Less", place, lengths), mirrored, place)
    perm = (batch, time, *(axis for axis in range(rank) if axis not in (batch, time)))
    turned = ctx.make("Gather", ctx.make("Transpose", x, perm=perm), ids, batch=1)
    return [ctx.make("Transpose", turned, perm=tuple(perm.index(axis) for axis in range(rank)))]


@lowers("Col2Im")
def _col2im(ctx: Context) -> Sequence[Operand]:
    """Add the columns of all blocks up where they lie in the image, as ``torch.nn.functional.fold``."""
    n, rows, columns = ctx.shape(0)
    image, block = (ctx.ints("sizes of the image or of a block", "", index) or () for index in (1, 2))
    rank = len(image)
    strides, dilations = ctx.attr("strides", (1,) * rank), ctx.attr("dilations", (1,) * rank)
    pads = ctx.attr("pads", (0,) * 2 * rank)
    padded = [image[axis] + pads[axis] + pads[rank + axis] for axis in range(rank)]
    steps = [(padded[a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1 for a in range(rank)]
    if len(block) != rank or rows % prod(block) or columns != prod(steps):
        raise ModelError(
            f"columns {[n, rows, columns]} are not those of blocks {[*block]} of image {[*image]}"
        )
    allow(ctx.node, (prod(block), columns), 8)
    inside, step = np.indices(block).reshape(rank, -1, 1), np.indices(steps).reshape(rank, 1, -1)
    places = [inside[a] * dilations[a] + step[a] * strides[a] for a in range(rank)]
    ids = ctx.build.constant(np.ravel_multi_index(places, padded).reshape(-1), "int64")
    channels = rows // prod(block)
    apart = ctx.reshape(ctx.value(0), (n, channels, prod(block) * columns))
    summed = ctx.make("GatherGrad", ids, ctx.make("Transpose", apart, perm=(2, 0, 1)), rows=prod(padded))
    x = ctx.reshape(ctx.make("Transpose", summed, perm=(1, 2, 0)), (n, channels, *padded))
    for axis in range(rank):
        x = slice_axis(ctx, x, axis + 2, pads[axis], pads[axis] + image[axis])
    return [x]
