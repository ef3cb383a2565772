"""Lowers control flow and sequences whose course is known before the run.

If is a branch, loops are unrolled, and sequences are lists that no operator ever sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.ir.graph import normalize_axis
from oocdl.graph.onnx.bounds import MOST_TRIPS
from oocdl.graph.onnx.context import Context, Entry, Operand, grouped, in_body, lowers
from oocdl.graph.onnx.lower.structure import slice_axis
from oocdl.graph.onnx.model_file import Body, shown
from oocdl.graph.onnx.whole_numbers import kind_of, typed


@lowers("SequenceConstruct", "SequenceEmpty")
def _construct(ctx: Context) -> Sequence[Entry]:
    return [[ctx.operand(index) for index in range(len(ctx.node.inputs))]]


@lowers("SequenceLength")
def _length(ctx: Context) -> Sequence[Operand]:
    return [np.asarray(len(_items(ctx)), np.int64)]


def _items(ctx: Context) -> list[Operand]:
    found = ctx.entry(0)
    if not isinstance(found, list):
        ctx.refuse("a sequence whose length depends on data")
    return found


@lowers("SplitToSequence")
def _split(ctx: Context) -> Sequence[Entry]:
    x, shape, axis = ctx.value(0), ctx.shape(0), ctx.axis(0)
    ctx.constants("sizes", 1)
    given = ctx.known(1)
    if given is not None and given.ndim:
        sizes = tuple(int(size) for size in given)
    else:
        piece, extent = 1 if given is None else int(given), shape[axis]
        sizes = tuple(min(piece, extent - start) for start in range(0, extent, piece))
    pieces = ctx.many("Split", x, axis=axis, sizes=sizes) if len(sizes) > 1 else (x,)
    if given is None and not ctx.attr("keepdims", 1):
        pieces = tuple(ctx.reshape(piece, (*shape[:axis], *shape[axis + 1 :])) for piece in pieces)
    return [list(pieces)]


def _place(ctx: Context, index: int, length: int, beyond: int = 0) -> int:
    """Return a position in a sequence, or ``beyond`` its end, checked; negative ones count from the end."""
    place = int(ctx.scalar("a position", index))
    if not -length <= place < length + beyond:
        raise ModelError(f"position {place} is outside of a sequence of length {length}")
    return place + length if place < 0 else place


@lowers("SequenceAt")
def _at(ctx: Context) -> Sequence[Operand]:
    items = _items(ctx)
    return [items[_place(ctx, 1, len(items))]]


@lowers("SequenceInsert")
def _insert(ctx: Context) -> Sequence[Entry]:
    items = _items(ctx)
    place = _place(ctx, 2, len(items), beyond=1) if ctx.has(2) else len(items)
    return [[*items[:place], ctx.operand(1), *items[place:]]]


@lowers("SequenceErase")
def _erase(ctx: Context) -> Sequence[Entry]:
    items = _items(ctx)
    place = _place(ctx, 1, len(items)) if ctx.has(1) else len(items) - 1
    return [[*items[:place], *items[place + 1 :]]]


def _joined(ctx: Context, items: Sequence[Entry], axis: int, new: bool) -> Operand:
    """Concatenate operands along an axis, which is a new one of theirs if ``new``."""
    if not items:
        ctx.refuse("an empty sequence, whose concatenation has no elements")
    arrays = [item for item in items if isinstance(item, np.ndarray)]
    if len(arrays) == len(items):
        return np.asarray(np.stack(arrays, axis) if new else np.concatenate(arrays, axis))
    if any(isinstance(item, list) for item in items):
        ctx.refuse("a sequence among the results of its trips")
    values = [ctx.store(item) if isinstance(item, np.ndarray) else str(item) for item in items]
    kind = kind_of(ctx, items[0])
    shape = ctx.build.shape(values[0])
    axis = normalize_axis(axis, len(shape) + new)
    if new:
        values = [ctx.reshape(value, (*shape[:axis], 1, *shape[axis:])) for value in values]
    return typed(ctx.concat(values, axis), kind)


@lowers("ConcatFromSequence")
def _concat(ctx: Context) -> Sequence[Operand]:
    return [_joined(ctx, _items(ctx), int(ctx.attr("axis")), bool(ctx.attr("new_axis", 0)))]


def _run(ctx: Context, body: Body, given: Sequence[Entry]) -> list[Entry]:
    """Lower the nodes of a body, which reads the outside too, and of which only its results stay."""
    node, env, stored = ctx.node, ctx.env, dict(ctx.stored)
    if len(given) != len(body.inputs):
        raise ModelError(f"its body takes {len(body.inputs)} inputs, but {len(given)} are there")
    ctx.env = {**env, **body.constants, **dict(zip(body.inputs, given, strict=True))}
    try:
        refused = in_body(ctx.lower(body.nodes), node.name)
        if refused:
            raise UnsupportedError(grouped(refused), refused)
        missing = [name for name in body.outputs if name not in ctx.env]
        if missing:
            raise ModelError(f"{shown(missing[0])}, a result of its body, is made nowhere")
        return [ctx.env[name] for name in body.outputs]
    finally:
        ctx.node, ctx.env, ctx.stored = node, env, stored


def _truth(ctx: Context, condition: Entry) -> bool:
    if not isinstance(condition, np.ndarray):
        ctx.refuse("a condition that depends on data")
    return bool(condition.reshape(-1)[0])


@lowers("If")
def _if(ctx: Context) -> Sequence[Entry]:
    branch = "then_branch" if _truth(ctx, ctx.entry(0)) else "else_branch"
    return _run(ctx, ctx.attr(branch), [])


@lowers("Loop")
def _loop(ctx: Context) -> Sequence[Entry]:
    body, state = ctx.attr("body"), [ctx.entry(index) for index in range(2, len(ctx.node.inputs))]
    count = ctx.scalar("a number of trips", 0)
    going = _truth(ctx, ctx.entry(1)) if ctx.has(1) else True
    trips = MOST_TRIPS + 1 if count is None else int(count)
    scanned: list[list[Entry]] = []
    while going and len(scanned) < trips:
        if len(scanned) == MOST_TRIPS:
            ctx.refuse(f"more than {MOST_TRIPS} trips")
        number = np.asarray(len(scanned), np.int64)
        condition, *made = _run(ctx, body, [number, np.asarray(True), *state])
        scanned.append(made[len(state) :])
        state = made[: len(state)]
        # A condition that nothing reads any more may depend on data.
        going = len(scanned) >= trips or _truth(ctx, condition)
    if not scanned and body.outputs[1 + len(state) :]:
        ctx.refuse("no trip, so that its results have no elements")
    return [*state, *(_joined(ctx, items, 0, new=True) for items in zip(*scanned, strict=True))]


@lowers("Scan")
def _scan(ctx: Context) -> Sequence[Entry]:
    body, count = ctx.attr("body"), int(ctx.attr("num_scan_inputs"))
    first = len(ctx.node.inputs) - count
    state, names = [ctx.entry(index) for index in range(first)], range(first, len(ctx.node.inputs))
    axes = [
        normalize_axis(axis, len(ctx.shape(index)))
        for axis, index in zip(ctx.attr("scan_input_axes", (0,) * count), names, strict=True)
    ]
    extents = {ctx.shape(index)[axis] for index, axis in zip(names, axes, strict=True)}
    if len(extents) != 1:
        raise ModelError(f"its scanned inputs have extents {sorted(extents)}, which differ")
    (trips,) = extents
    backwards = ctx.attr("scan_input_directions", (0,) * count)
    scanned: list[list[Entry]] = []
    for trip in range(trips):
        slices = []
        for index, axis, back in zip(names, axes, backwards, strict=True):
            place, shape = trips - 1 - trip if back else trip, ctx.shape(index)
            one = slice_axis(ctx, ctx.value(index), axis, place, place + 1)
            one = ctx.reshape(one, (*shape[:axis], *shape[axis + 1 :]))
            slices.append(typed(one, kind_of(ctx, ctx.entry(index))))
        made = _run(ctx, body, [*state, *slices])
        state = made[:first]
        scanned.append(made[first:])
    none = (0,) * len(body.outputs[first:])
    ends = ctx.attr("scan_output_axes", none), ctx.attr("scan_output_directions", none)
    columns = zip(zip(*scanned, strict=True), *ends, strict=True)
    joined = (_joined(ctx, items[::-1] if back else items, axis, new=True) for items, axis, back in columns)
    return [*state, *joined]
