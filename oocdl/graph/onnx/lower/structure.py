"""Lowers ONNX operators to those of ``ops``: operators that only move elements.

Files that were exported with a fixed batch hold its size in the constants of Reshape, Slice and Expand. Where
only the batch is another, such a constant is read against the shape the node had when the file was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Node, Role, Shape, normalize_axis
from oocdl.graph.onnx.constant_folding import parts, reshaped, slices, squeezed, unsqueezed
from oocdl.graph.onnx.context import Context, Operand, Sized, lowers


def repeated(ctx: Context, x: str, shape: Shape, target: Shape) -> str | None:
    """Return a Reshape of ``x`` [..., n, r, ...] to [..., n r, ...] where all along r is equal; else None."""
    # Copies of heads that share keys stay on purpose: attention reads the head itself, and none is made.
    moved = ctx.build.makers.get(x)
    perm, inner = tuple(range(len(shape))), x
    if moved is not None and moved.op == "Transpose":
        perm, inner = moved.attrs["perm"], moved.inputs[0]
    copies, before = ctx.build.makers.get(ctx.unreshaped(inner)), ctx.build.shape(inner)
    if copies is None or copies.outputs[0] not in ctx.tiles or ctx.build.dtype(x) != ctx.precision:
        return None
    place = _copied(ctx, copies, before)
    if place is None:
        return None
    axis, count = perm.index(place) - 1, before[place]
    if axis < 0 or target != (*shape[:axis], shape[axis] * count, *shape[axis + 2 :]):
        return None
    order = [old - (old > place) for old in perm if old != place]  # axes of the base, as ``x`` has them
    base = ctx.reshape(copies.inputs[0], (*before[:place], *before[place + 1 :]))
    first = ctx.build.makers.get(base)
    if first is not None and first.op == "Transpose":  # the axes of a file may be moved there and back
        base, order = first.inputs[0], [first.attrs["perm"][old] for old in order]
    extent = ctx.build.shape(base)[order[axis]] * count
    how = {"mode": "nearest", "coordinates": "asymmetric", "scale": float(count), "nearest_mode": "floor"}
    made = ctx.make("Resample", base, axis=order[axis], size=extent, **how, transposed=False)
    return ctx.transpose(made, order)


def _copied(ctx: Context, copies: Node, shape: Sequence[int]) -> int | None:
    """Return which axis of ``shape``, a Reshape of an Expand, is the only one that this has made."""
    old, new = ctx.build.shape(copies.inputs[0]), ctx.build.shape(copies.outputs[0])
    if len(old) != len(new):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if len(grown) != 1:
        return None
    outside, count = prod(new[: grown[0]]), new[grown[0]]
    found = [n for n, extent in enumerate(shape) if extent == count and prod(shape[:n]) == outside]
    return found[0] if found else None


@lowers("Concat")
def _concat(ctx: Context) -> Sequence[Operand]:
    values, axis = [value for index, value in enumerate(ctx.values()) if prod(ctx.shape(index))], ctx.axis()
    if ctx.batch is not None and ctx.batch[0] == 1 and axis:  # a class token, traced with a batch of 1
        batch = max(ctx.build.shape(value)[0] for value in values)
        for place, value in enumerate(values):
            first, *rest = ctx.build.shape(value)
            if first == 1 != batch:
                values[place], ctx.rebatched = ctx.make("Expand", value, shape=(batch, *rest)), True
    return [ctx.concat(values, axis)]


@lowers("Split")
def _split(ctx: Context) -> Sequence[Operand]:
    x, axis = ctx.value(0), ctx.axis(0)
    ctx.constants("sizes", 1)
    sizes = parts(ctx.node, ctx.known(1), ctx.shape(0)[axis])
    return ctx.many("Split", x, axis=axis, sizes=sizes) if len(sizes) > 1 else [x]


def slice_axis(ctx: Context, x: str, axis: int, start: int, stop: int, step: int = 1) -> str:
    """Slice one axis; returns ``x`` itself if the range is all of it."""
    if (start, stop, step) == (0, ctx.build.shape(x)[axis], 1):
        return x
    return ctx.make("Slice", x, axis=axis, start=start, stop=stop, step=step)


def expanded(ctx: Context, value: str, like: str, axis: int, extent: int) -> str:
    """Expand ``value`` to the shape of ``like``, but for the extent of an axis."""
    shape = ctx.build.shape(like)
    return ctx.make("Expand", value, shape=(*shape[:axis], extent, *shape[axis + 1 :]))


@lowers("Slice")
def _slice(ctx: Context) -> Sequence[Operand]:
    x, before = ctx.value(0), ctx.was(0) if ctx.batch is not None else None
    inputs = ctx.constants("positions", 1, 2, 3, 4)
    for axis, first, last, step in slices(ctx.node, inputs, len(ctx.shape(0))):
        extent = ctx.build.shape(x)[axis]
        if before is not None and last == before[axis] and not ctx.is_sized(2):
            last, ctx.rebatched = extent, True  # a traced end that was the whole batch
        if not step:
            raise ModelError(f"step 0 along axis {axis}")
        taken = range(extent)[slice(first, last, step)]
        if not taken:
            raise ModelError(f"nothing is left of axis {axis} (extent {extent}) between {first} and {last}")
        x = slice_axis(ctx, x, axis, min(taken), max(taken) + 1, abs(step))
        if step < 0 and len(taken) > 1:
            x = ctx.make("Reverse", x, axis=axis)
    return [x]


@lowers("Transpose")
def _transpose(ctx: Context) -> Sequence[Operand]:
    x, rank = ctx.value(0), len(ctx.shape(0))
    perm = tuple(normalize_axis(axis, rank) for axis in ctx.attr("perm", tuple(range(rank))[::-1]))
    before = ctx.build.makers.get(x)
    if before is not None and before.op == "Transpose":  # channels last and back again
        x, perm = before.inputs[0], tuple(before.attrs["perm"][axis] for axis in perm)
    return [ctx.transpose(x, perm)]


def rebound(
    before: Shape, after: Shape, now: Shape, batch: tuple[int, int], free: int | None = None
) -> Shape | None:
    """Return the target of a traced Reshape ``before -> after`` for an input of shape ``now``, if one fits.

    What is made of the axes before and after those that changed keeps its target. Between them grows the axis
    ``free`` (the -1 of the constant), or, going by ``batch`` (traced and new extent), the one that is the
    batch, else its outermost multiple.

    >>> rebound((1, 8, 4, 4), (1, 128), (3, 8, 4, 4), (1, 3))
    (3, 128)
    >>> rebound((34, 16), (17, 2, 16), (85, 16), (2, 5))
    (17, 5, 16)
    """
    changed = [axis for axis, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    first, last, most = changed[0], changed[-1] + 1, len(after)
    starts = ((a, b) for a in range(first, -1, -1) for b in range(most))
    start = next((b for a, b in starts if prod(before[:a]) == prod(after[:b])), 0)
    if after[start:] == before[last:] and 1 not in after[start:]:
        start = max(start - 1, 0)  # a batch of one that has gone: it is of the axis before it
        stop = start + 1
    else:
        ends = ((a, b) for a in range(last, len(before)) for b in range(most, start, -1))
        stop = next((b for a, b in ends if prod(before[a:]) == prod(after[b:])), most)
    if free is not None and start <= free < stop:
        axis, extent = free, prod(now) * after[free] // prod(after)
    else:
        order = sorted(range(start, stop), key=lambda axis: (after[axis] != batch[0], axis))
        axis = next((axis for axis in order if after[axis] % batch[0] == 0), start)
        extent = after[axis] // batch[0] * batch[1]
    result = (*after[:axis], extent, *after[axis + 1 :])
    return result if prod(result) == prod(now) else None


@lowers("Reshape")
def _reshape(ctx: Context) -> Sequence[Operand]:
    x, shape, before = ctx.value(0), ctx.shape(0), ctx.was(0)
    target = [*(ctx.ints("a shape", "", 1) or ())]
    zero = bool(ctx.attr("allowzero", 0))
    if before is None or ctx.batch is None or ctx.is_sized(1):
        found: Shape | None = reshaped(shape, target, zero)
    elif not ctx.alone:
        if (target[0], shape[0]) == ctx.batch:
            target[0], ctx.rebatched = shape[0], True
        found = reshaped(shape, target, zero)
    else:
        free, ctx.rebatched = target.index(-1) if -1 in target else None, True
        found = rebound(before, reshaped(before, target, zero), shape, ctx.batch, free)
    if found is None:
        raise ModelError(
            f"its fixed shape {target} was made for an input of {list(before or ())} and does not "
            f"fit {list(shape)}; export the model with dynamic sizes"
        )
    return [repeated(ctx, x, shape, found) or ctx.reshape(x, found)]


@lowers("Expand")
def _expand(ctx: Context) -> Sequence[Operand]:
    x, shape, before = ctx.value(0), ctx.shape(0), ctx.was(0)
    target = [*(ctx.ints("a shape", "", 1) or ())]
    if ctx.batch is None or ctx.is_sized(1):
        pass
    elif before is not None:
        shift = len(target) - len(shape)
        for axis, (old, new) in enumerate(zip(before, shape, strict=True)):
            if axis + shift >= 0 and target[axis + shift] == old:
                target[axis + shift], ctx.rebatched = new, True
    elif target[:1] == [ctx.batch[0]] and (len(shape) < len(target) or shape[0] == 1):
        target[0], ctx.rebatched = ctx.batch[1], True
    result = np.broadcast_shapes(shape, tuple(target))
    return [x if result == shape else ctx.make("Expand", x, shape=tuple(int(e) for e in result))]


@lowers("Flatten")
def _flatten(ctx: Context) -> Sequence[Operand]:
    shape = ctx.shape(0)
    axis = ctx.attr("axis", 1)
    axis = axis if axis == len(shape) else normalize_axis(axis, len(shape))
    return [ctx.reshape(ctx.value(0), (prod(shape[:axis]), prod(shape[axis:])))]


@lowers("Squeeze", change=squeezed)
@lowers("Unsqueeze", change=unsqueezed)
def _reaxed(ctx: Context, change: Callable[[Shape, Sequence[int] | None], Shape]) -> Sequence[Operand]:
    return [ctx.reshape(ctx.value(0), change(ctx.shape(0), ctx.ints("axes", "axes", 1)))]


@lowers("Shape", "Size")
def _measure(ctx: Context) -> Sequence[Operand]:
    """Compute Shape or Size of an operand; arrays computed from it follow the bound sizes."""
    shape, operand = ctx.shape(0), ctx.operand(0)
    extents = prod(shape) if ctx.node.op == "Size" else shape[ctx.attr("start", 0) : ctx.attr("end")]
    made = np.asarray(extents, np.int64)
    fixed = isinstance(operand, str) and ctx.build.values[operand].role in (Role.WEIGHT, Role.STATE)
    return [made.view(Sized) if ctx.is_sized(0) or (isinstance(operand, str) and not fixed) else made]
