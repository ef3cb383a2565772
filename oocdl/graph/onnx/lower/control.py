"""Lowers control flow whose course is known before the run: If is a branch, loops are unrolled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.bounds import MOST_TRIPS
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.lower.sequences import joined
from oocdl.graph.onnx.lower.structure import slice_axis
from oocdl.graph.onnx.model_file import Body, shown
from oocdl.graph.onnx.refusals import grouped, in_body


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


CONTROL: Mapping[str, Lower] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""Lowerings of control flow."""
