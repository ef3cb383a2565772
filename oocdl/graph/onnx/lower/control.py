"""Lowers control flow and sequences whose course is known before the run.

If is a branch, loops are unrolled, and sequences are lists that no operator ever sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.bounds import MOST_TRIPS
from oocdl.graph.onnx.context import Context, Operand, grouped, in_body, lowers
from oocdl.graph.onnx.lower.structure import slice_axis
from oocdl.graph.onnx.model_file import Body, shown


def _made(ctx: Context, items: Sequence[Operand]) -> list[Operand]:
    """Let the node's output be a sequence; what stands in its place is read by nothing else."""
    ctx.sequences[ctx.node.outputs[0]] = list(items)
    return [np.empty(0)]


@lowers("SequenceConstruct", "SequenceEmpty")
def _construct(ctx: Context) -> Sequence[Operand]:
    return _made(ctx, [ctx.operand(index) for index in range(len(ctx.node.inputs))])


@lowers("SequenceLength")
def _length(ctx: Context) -> Sequence[Operand]:
    return [np.asarray(len(_items(ctx)), np.int64)]


def _items(ctx: Context) -> list[Operand]:
    if ctx.node.inputs[0] not in ctx.sequences:
        ctx.refuse("a sequence whose length depends on data")
    return list(ctx.sequences[ctx.node.inputs[0]])


@lowers("SplitToSequence")
def _split(ctx: Context) -> Sequence[Operand]:
    x, shape = ctx.value(0), ctx.shape(0)
    axis = ctx.attr("axis", 0) % len(shape)
    given = ctx.constants("sizes", 1)[1] if ctx.has(1) else None
    if given is not None and given.ndim:
        sizes = tuple(int(size) for size in given)
    else:
        piece, extent = 1 if given is None else int(given), shape[axis]
        sizes = tuple(min(piece, extent - start) for start in range(0, extent, piece))
    pieces = ctx.many("Split", x, axis=axis, sizes=sizes) if len(sizes) > 1 else (x,)
    if given is None and not ctx.attr("keepdims", 1):
        pieces = tuple(ctx.reshape(piece, (*shape[:axis], *shape[axis + 1 :])) for piece in pieces)
    return _made(ctx, pieces)


def _place(ctx: Context, index: int, length: int) -> int:
    """Return a position in a sequence, checked; negative ones count from the end."""
    array = ctx.constants("a position", index)[index]
    place = int(np.asarray(array).reshape(-1)[0])
    if not -length <= place < length:
        raise ModelError(f"position {place} is outside of a sequence of length {length}")
    return place % length


@lowers("SequenceAt")
def _at(ctx: Context) -> Sequence[Operand]:
    items = _items(ctx)
    return [items[_place(ctx, 1, len(items))]]


@lowers("SequenceInsert")
def _insert(ctx: Context) -> Sequence[Operand]:
    items = _items(ctx)
    place = _place(ctx, 2, len(items) + 1) if ctx.has(2) else len(items)
    return _made(ctx, [*items[:place], ctx.operand(1), *items[place:]])


@lowers("SequenceErase")
def _erase(ctx: Context) -> Sequence[Operand]:
    items = _items(ctx)
    place = _place(ctx, 1, len(items)) if ctx.has(1) else len(items) - 1
    return _made(ctx, [*items[:place], *items[place + 1 :]])


def joined(ctx: Context, items: Sequence[Operand], axis: int, new: bool) -> Operand:
    """Concatenate operands along an axis, which is a new one of theirs if ``new``."""
    if not items:
        ctx.refuse("an empty sequence, whose concatenation has no elements")
    arrays = [item for item in items if not isinstance(item, str)]
    if len(arrays) == len(items):
        return np.stack(arrays, axis) if new else np.concatenate(arrays, axis)
    values = [item if isinstance(item, str) else ctx.store(item) for item in items]
    shape = ctx.build.shape(values[0])
    axis %= len(shape) + new
    if new:
        values = [ctx.reshape(value, (*shape[:axis], 1, *shape[axis:])) for value in values]
    return ctx.make("Concat", *values, axis=axis) if len(values) > 1 else values[0]


@lowers("ConcatFromSequence")
def _concat(ctx: Context) -> Sequence[Operand]:
    return [joined(ctx, _items(ctx), int(ctx.attr("axis")), bool(ctx.attr("new_axis", 0)))]


def _body(ctx: Context, name: str) -> Body:
    found = ctx.attr(name)
    if not isinstance(found, Body):
        raise ModelError(f"attribute {name} is missing, or is no graph")
    return found


def _run(ctx: Context, body: Body, given: Sequence[tuple[Operand, str]]) -> list[tuple[Operand, str]]:
    """Lower the nodes of a body for operands and the names that these have outside.

    Returns the same of its outputs. What the body reads of the outside is there, and nothing of the
    inside stays.
    """
    node, env, sized, stored = ctx.node, ctx.env, set(ctx.sized), dict(ctx.stored)
    if len(given) != len(body.inputs):
        raise ModelError(f"its body takes {len(body.inputs)} inputs, but {len(given)} are there")
    ctx.env = {**env, **body.constants}
    for inner, (operand, outer) in zip(body.inputs, given, strict=True):
        ctx.env[inner] = operand
        ctx.sized |= {inner} & ({inner} if outer in sized else set())
        if outer in ctx.sequences:
            ctx.sequences[inner] = ctx.sequences[outer]
    try:
        refused = in_body(ctx.lower(body.nodes), node.name)
        if refused:
            raise UnsupportedError(grouped(refused), refused)
        missing = [name for name in body.outputs if name not in ctx.env]
        if missing:
            raise ModelError(f"{shown(missing[0])}, a result of its body, is made nowhere")
        return [(ctx.env[name], name) for name in body.outputs]
    finally:
        ctx.node, ctx.env, ctx.stored = node, env, stored
        ctx.sized &= sized | set(body.outputs)


def _given(ctx: Context, start: int) -> list[tuple[Operand, str]]:
    """Return the operands from ``start`` on, with the names they have outside."""
    return [(ctx.operand(index), ctx.node.inputs[index]) for index in range(start, len(ctx.node.inputs))]


def _results(ctx: Context, made: Sequence[tuple[Operand, str]]) -> list[Operand]:
    """Hand over what a body has made: sequences, and whether sizes are followed, go by names."""
    for (_, inner), outer in zip(made, ctx.node.outputs, strict=False):
        if inner in ctx.sequences:
            ctx.sequences[outer] = ctx.sequences[inner]
        if inner in ctx.sized:
            ctx.sized.add(outer)
    return [operand for operand, _ in made]


@lowers("If")
def _if(ctx: Context) -> Sequence[Operand]:
    condition = ctx.known(0)
    if condition is None:
        ctx.refuse("a condition that depends on data")
    branch = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
    return _results(ctx, _run(ctx, _body(ctx, branch), []))


def _truth(ctx: Context, condition: Operand) -> bool:
    if isinstance(condition, str):
        ctx.refuse("a condition that depends on data")
    return bool(condition.reshape(-1)[0])


@lowers("Loop")
def _loop(ctx: Context) -> Sequence[Operand]:
    body, state = _body(ctx, "body"), _given(ctx, 2)
    count = ctx.constants("a number of trips", 0)[0] if ctx.has(0) else None
    going = _truth(ctx, ctx.operand(1)) if ctx.has(1) else True
    trips = MOST_TRIPS + 1 if count is None else int(count.reshape(-1)[0])
    scanned: list[list[Operand]] = [[] for _ in body.outputs[1 + len(state) :]]
    trip = 0
    while going and trip < trips:
        if trip == MOST_TRIPS:
            ctx.refuse(f"more than {MOST_TRIPS} trips")
        given = [(np.asarray(trip, np.int64), ""), (np.asarray(True), ""), *state]
        made = _run(ctx, body, given)
        state = _kept(ctx, made[1 : 1 + len(state)], trip)
        for all_made, (operand, _) in zip(scanned, made[1 + len(state) :], strict=True):
            all_made.append(operand)
        trip += 1
        # A condition that nothing reads any more may depend on data.
        going = trip >= trips or _truth(ctx, made[0][0])
    if not trip and scanned:
        ctx.refuse("no trip, so that its results have no elements")
    return [*_results(ctx, state), *(joined(ctx, items, 0, new=True) for items in scanned)]


def _kept(ctx: Context, made: Sequence[tuple[Operand, str]], trip: int) -> list[tuple[Operand, str]]:
    """Name the sequences of a trip apart from those of the next one, which the same names are used for."""
    found = []
    for operand, inner in made:
        name = f"{inner}/{ctx.node.name}/{trip}" if inner in ctx.sequences else inner
        if inner in ctx.sequences:
            ctx.sequences[name] = ctx.sequences[inner]
        found.append((operand, name))
    return found


@lowers("Scan")
def _scan(ctx: Context) -> Sequence[Operand]:
    body, count = _body(ctx, "body"), int(ctx.attr("num_scan_inputs"))
    first = len(ctx.node.inputs) - count
    state, names = _given(ctx, 0)[:first], range(first, len(ctx.node.inputs))
    made_count = len(body.outputs) - first
    axes = [
        axis % len(ctx.shape(index))
        for axis, index in zip(ctx.attr("scan_input_axes", (0,) * count), names, strict=True)
    ]
    extents = {ctx.shape(index)[axis] for index, axis in zip(names, axes, strict=True)}
    if len(extents) != 1:
        raise ModelError(f"its scanned inputs have extents {sorted(extents)}, which differ")
    (trips,) = extents
    backwards = ctx.attr("scan_input_directions", (0,) * count)
    scanned: list[list[Operand]] = [[] for _ in range(made_count)]
    for trip in range(trips):
        given = [*state]
        for index, axis, back in zip(names, axes, backwards, strict=True):
            place = trips - 1 - trip if back else trip
            one = slice_axis(ctx, ctx.value(index), axis, place, place + 1)
            shape = ctx.shape(index)
            given.append((ctx.reshape(one, (*shape[:axis], *shape[axis + 1 :])), ""))
        made = _run(ctx, body, given)
        state = made[:first]
        for items, (operand, _) in zip(scanned, made[first:], strict=True):
            items.append(operand)
    ends = zip(
        scanned,
        ctx.attr("scan_output_axes", (0,) * made_count),
        ctx.attr("scan_output_directions", (0,) * made_count),
        strict=True,
    )
    return [
        *_results(ctx, state),
        *(joined(ctx, items[::-1] if back else items, axis, new=True) for items, axis, back in ends),
    ]
