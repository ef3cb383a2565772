"""Lowers ONNX operators that read or write at indices: Gather*, Scatter*, OneHot, TopK.

Known indices that form a box are slices. All others are ids of Gather and of its gradient, which adds; LastAt
finds the last of equal ones, where that counts. Several indices of one element are counted as one, each
looked up along its axis first: one that is outside of its axis is an error, and not another element.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.constant_folding import flat_indices, wrapped
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.lower_reductions import maxima, minima, products
from oocdl.graph.onnx.lower.structure import slice_axis

MOST_COMPARED = 1 << 24
"""Elements that a scatter with reduction mul, max or min makes at most: each row for each update."""


def box_of(flat: Array, extents: Shape) -> list[tuple[int, int]] | None:
    """Return the box, as ranges of all axes, whose elements ``flat`` names in order; None if there is none.

    >>> box_of(np.array([[1, 2], [4, 5]]), (2, 3))
    [(0, 2), (1, 3)]
    """
    if not flat.size or not extents:
        return None
    first, last = (np.unravel_index(int(end), extents) for end in (flat.reshape(-1)[0], flat.reshape(-1)[-1]))
    box = [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
    if prod(max(stop - start, 0) for start, stop in box) != flat.size:
        return None
    named = np.ravel_multi_index(np.ix_(*(np.arange(*side) for side in box)), extents)
    return box if (named.reshape(-1) == flat.reshape(-1)).all() else None


def _front(rank: int, axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order of axes that puts ``axis`` last, and the one that undoes it."""
    there = (*(other for other in range(rank) if other != axis), axis)
    return there, tuple(there.index(place) for place in range(rank))


def _batched(batch: int) -> dict[str, int]:
    return {"batch": batch} if batch else {}


@lowers("Gather")
def _gather(ctx: Context) -> Sequence[Operand]:
    x, shape, index, axis = ctx.value(0), ctx.shape(0), ctx.known(1), ctx.axis(0)
    front = (axis, *(other for other in range(len(shape)) if other != axis))
    if index is None:
        fact = ctx.facts.get(ctx.node.inputs[0])
        known = fact is not None and fact.padding_idx is not None and axis == 0
        padding = {"padding_idx": fact.padding_idx} if fact is not None and known else {}
        rows = ctx.make("Gather", ctx.transpose(x, front), ctx.value(1), **padding)
        count = len(ctx.shape(1))
        back = (*range(count, count + axis), *range(count), *range(count + axis, count + len(shape) - 1))
        return [ctx.transpose(rows, back)]
    flat = wrapped(index, shape[axis], f"axis {axis}").reshape(-1)
    step = int(flat[1] - flat[0]) if flat.size > 1 else 1
    if flat.size and step > 0 and (np.diff(flat) == step).all():  # at equal distances
        made = slice_axis(ctx, x, axis, int(flat[0]), int(flat[-1]) + 1, step)
    else:
        rows = ctx.build("Gather", ctx.transpose(x, front), ctx.build.constant(flat, "int64"))
        made = ctx.transpose(rows, (*range(1, axis + 1), 0, *range(axis + 1, len(shape))))
    return [ctx.reshape(made, (*shape[:axis], *index.shape, *shape[axis + 1 :]))]


def _ids(ctx: Context, index: int) -> str:
    """Return an operand of indices, as int64."""
    ids = ctx.value(index)
    return ids if ctx.build.dtype(ids) == "int64" else ctx.make("Cast", ids, to="int64")


def _cropped(ctx: Context, x: str, shape: Shape, axis: int) -> str:
    """Take the first elements of ``x`` along all axes but ``axis``, as many as ``shape`` has."""
    for other, extent in enumerate(shape):
        x = x if other == axis else slice_axis(ctx, x, other, 0, extent)
    return x


@lowers("GatherElements")
def _gather_elements(ctx: Context) -> Sequence[Operand]:
    ids, shape, axis = _ids(ctx, 1), ctx.shape(1), ctx.axis(0)
    last, back = _front(len(shape), axis)
    table = ctx.transpose(_cropped(ctx, ctx.value(0), shape, axis), last)
    found = ctx.make("Gather", table, ctx.transpose(ids, last), **_batched(len(shape) - 1))
    return [ctx.transpose(found, back)]


def _flat(ctx: Context, index: int, extents: Shape) -> str:
    """Return indices ``[.., k]`` of the axes of ``extents`` as numbers of elements ``[..]``."""
    shape, known = ctx.shape(index), ctx.known(index)
    if known is not None:
        return ctx.build.constant(flat_indices(known, extents), "int64")
    ids, rank = _ids(ctx, index), len(shape) - 1
    if shape[-1] == 1:
        return ctx.reshape(ids, shape[:-1])
    total = ""
    for axis, extent in enumerate(extents):
        one = _numbered(ctx, ctx.reshape(slice_axis(ctx, ids, rank, axis, axis + 1), shape[:-1]), extent)
        count = ctx.build.constant(extent, "int64")
        total = ctx.make("Add", ctx.make("Mul", total, count), one) if total else one
    return total


def _numbered(ctx: Context, ids: str, extent: int) -> str:
    """Number indices along an axis from 0; one that is outside of the axis is an error."""
    return ctx.make("Gather", ctx.build.constant(numbered(extent), "int64"), ids)


@lowers("GatherND")
def _gather_nd(ctx: Context) -> Sequence[Operand]:
    x, shape, where = ctx.value(0), ctx.shape(0), ctx.shape(1)
    batch = int(ctx.attr("batch_dims", 0))
    extents = shape[batch : batch + where[-1]]
    if where[:batch] != shape[:batch] or len(extents) != where[-1]:
        raise ModelError(f"indices {list(where)} do not fit an input of shape {list(shape)}")
    row = shape[batch + where[-1] :]
    table = ctx.reshape(x, (*shape[:batch], prod(extents), *row))
    ids = _flat(ctx, 1, extents)
    if len(where) - 1 == batch:  # one index for each sample
        ids = ctx.reshape(ids, (*where[:batch], 1))
    return [ctx.reshape(ctx.make("Gather", table, ids, **_batched(batch)), (*where[:-1], *row))]


def _paste(ctx: Context, x: str, part: str, box: Sequence[tuple[int, int]], axis: int = 0) -> str:
    """Put ``part`` in the place of a box of ``x``, by slices and Concats along its axes from ``axis`` on."""
    if axis == len(box):
        return part
    (start, stop), extent = box[axis], ctx.build.shape(x)[axis]
    inner = _paste(ctx, slice_axis(ctx, x, axis, start, stop), part, box, axis + 1)
    before = [slice_axis(ctx, x, axis, 0, start)] if start else []
    after = [slice_axis(ctx, x, axis, stop, extent)] if stop < extent else []
    return ctx.make("Concat", *before, inner, *after, axis=axis) if before or after else inner


def _scattered(ctx: Context, x: str, ids: str, updates: str, known: Array | None, batch: int) -> str:
    """Write rows of ``updates[b, i, row]`` at ``ids[b, i]`` of ``x[b, rows, row]``, or add them."""
    shape, more = ctx.build.shape(x), _batched(batch)
    rows = shape[batch]
    if ctx.attr("reduction", "none") == "add":
        return ctx.make("Add", x, ctx.make("GatherGrad", ids, updates, rows=rows, **more))
    if ctx.attr("reduction", "none") != "none":
        return _reduced(ctx, x, ids, updates, batch)
    if known is not None and not batch:
        places = np.full(rows, -1, np.int64)
        places[known.reshape(-1)] = np.arange(known.size)  # of indices that are equal the last one stays
        last = ctx.build.constant(places, "int64")
    else:
        last = ctx.make("LastAt", ids, rows=rows, **more)
    zero = ctx.build.constant(0, "int64")
    none = ctx.make("Less", last, zero)
    found = ctx.make("Gather", updates, ctx.make("Where", none, zero, last), **more)
    none = ctx.reshape(none, (*shape[: batch + 1], *(1,) * (len(shape) - batch - 1)))
    return ctx.make("Where", none, x, found)


def _reduced(ctx: Context, x: str, ids: str, updates: str, batch: int) -> str:
    """Combine each row of ``x`` with its updates: one reduction over all updates, others' being neutral."""
    shape, count, how = ctx.build.shape(x), ctx.build.shape(ids)[batch], ctx.attr("reduction")
    rows, row, axis = shape[batch], shape[batch + 1 :], batch + 1
    if how not in ("mul", "max", "min"):
        ctx.refuse(f"reduction {how}")
    if prod(shape) * count > MOST_COMPARED:
        ctx.refuse(f"reduction {how} of {count} updates into {rows} rows, each compared with each,")
    ids = ctx.reshape(_numbered(ctx, ids, rows), (*shape[:batch], 1, count, *(1,) * len(row)))
    numbers = numbered(rows).reshape(rows, 1, *(1,) * len(row))
    kind = np.dtype(ctx.build.dtype(x)).kind
    bounds = (-np.inf, np.inf) if kind == "f" else (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    neutral = {"mul": 1, "max": bounds[0], "min": bounds[1]}[how]
    here = ctx.make("Equal", ids, ctx.build.constant(numbers, "int64"))
    updates = ctx.reshape(updates, (*shape[:batch], 1, count, *row))
    part = ctx.make("Where", here, updates, ctx.number(neutral, x))
    both = ctx.make("Concat", ctx.reshape(x, (*shape[:axis], 1, *row)), part, axis=axis)
    return ctx.reshape({"mul": products, "max": maxima, "min": minima}[how](ctx, both, (axis,)), shape)


@lowers("ScatterND")
def _scatter_nd(ctx: Context) -> Sequence[Operand]:
    x, shape, where, known = ctx.value(0), ctx.shape(0), ctx.shape(1), ctx.known(1)
    depth = where[-1]
    extents, row, updates = shape[:depth], shape[depth:], ctx.value(2)
    if len(extents) != depth or ctx.shape(2) != (*where[:-1], *row):
        raise ModelError(f"updates {list(ctx.shape(2))} at indices {list(where)} do not fit {list(shape)}")
    flat = None if known is None else flat_indices(known, extents)
    box = None if flat is None else box_of(flat, extents)
    if box is not None and ctx.attr("reduction", "none") == "none":
        part = ctx.reshape(updates, (*(stop - start for start, stop in box), *row))
        return [_paste(ctx, x, part, box)]
    count = prod(where[:-1])
    ids = ctx.reshape(_flat(ctx, 1, extents), (count,))
    table, rows = ctx.reshape(x, (prod(extents), *row)), ctx.reshape(updates, (count, *row))
    return [ctx.reshape(_scattered(ctx, table, ids, rows, flat, 0), shape)]


@lowers("Scatter", "ScatterElements")
def _scatter_elements(ctx: Context) -> Sequence[Operand]:
    x, shape, where, axis = ctx.value(0), ctx.shape(0), ctx.shape(1), ctx.axis(0)
    last, back = _front(len(shape), axis)
    part = ctx.transpose(_cropped(ctx, x, where, axis), last)
    ids, updates = (ctx.transpose(value, last) for value in (_ids(ctx, 1), ctx.value(2)))
    made = ctx.transpose(_scattered(ctx, part, ids, updates, None, len(shape) - 1), back)
    box = [(0, extent if other != axis else shape[axis]) for other, extent in enumerate(where)]
    return [_paste(ctx, x, made, box)]


@lowers("TopK")
def _top_k(ctx: Context) -> Sequence[Operand]:
    x, rank, axis, count = ctx.value(0), len(ctx.shape(0)), ctx.axis(-1), ctx.scalar("a number", 1)
    k = int(ctx.attr("k") if count is None else count)
    places = ctx.make("Top", x, axis=axis, k=k, largest=bool(ctx.attr("largest", 1)))
    last, back = _front(rank, axis)
    found = ctx.make("Gather", ctx.transpose(x, last), ctx.transpose(places, last), **_batched(rank - 1))
    return [ctx.transpose(found, back), places]


@lowers("OneHot")
def _one_hot(ctx: Context) -> Sequence[Operand]:
    """Compare each index with the numbers up to the depth; what is outside of it is nowhere."""
    count, values, shape, axis = int(ctx.scalar("a depth", 1)), ctx.value(2), ctx.shape(0), ctx.axis(-1, 1)
    ids, extent = _ids(ctx, 0), ctx.build.constant(count, "int64")
    negative = ctx.make("Less", ids, ctx.build.constant(0, "int64"))
    ids = ctx.make("Where", negative, ctx.make("Add", ids, extent), ids)
    numbers = numbered(count).reshape(-1, *(1,) * (len(shape) - axis))
    wide = ctx.reshape(ids, (*shape[:axis], 1, *shape[axis:]))
    is_it = ctx.make("Equal", wide, ctx.build.constant(numbers, "int64"))
    off, on = (_one_of(ctx, values, place) for place in (0, 1))
    return [ctx.make("Where", is_it, on, off)]


def _one_of(ctx: Context, values: str, place: int) -> str:
    """Return one of two numbers, as a sum with a zero: an axis so short has no gradient in pieces."""
    here = ctx.build.constant(np.arange(2) == place, "bool")
    alone = ctx.make("Where", here, values, ctx.number(0, values))
    return ctx.reshape(ctx.make("ReduceSum", alone, axes=(0,)), ())
