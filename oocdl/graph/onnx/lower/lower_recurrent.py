"""Lowers LSTM, GRU and RNN: a product of the input for all steps, and the recurrence by segments of time.

A segment passes its last states on to the next. It is as long as the gates of one sample fill
``SEGMENT_ELEMENTS``, so that what a unit needs of a sequence is bounded however long that is; the length
follows from the network's sizes alone, so that every budget computes the same. What the recurrence has no
kernels for (peepholes, clipping, a forget gate that is the input gate's rest) is written out, as nodes of
each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.index import pieces
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.lower.arithmetic import bounded, need_floats
from oocdl.graph.onnx.lower.structure import slice_axis

SEGMENT_ELEMENTS = 1 << 21
"""Elements of the gates of one sample (steps x gates x hidden size) in a segment: 8 MiB of float32."""
MOST_STEPS = 1000
"""Steps that are written out; more would be more nodes than planning is made for."""
ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}
"""By ONNX's names in lower case."""


class _Kind(NamedTuple):
    """What ONNX says of one of its operators."""

    op: str
    """Ours."""
    states: int
    """How many states go from step to step."""
    activations: tuple[str, ...]
    """Default activations of one direction."""


_KINDS = {
    "RNN": _Kind("RnnSteps", 1, ("Tanh",)),
    "GRU": _Kind("GruSteps", 1, ("Sigmoid", "Tanh")),
    "LSTM": _Kind("LstmSteps", 2, ("Sigmoid", "Tanh", "Tanh")),
}


class _Direction(NamedTuple):
    """One direction of a layer."""

    x: str
    """The input's part of the gates [T, N, G H]."""
    weight: str
    states: tuple[str, ...]
    """Initial h, and c of an LSTM, [1, N, H]."""
    bias: tuple[str, ...]
    reverse: bool
    activations: tuple[str, ...]
    peepholes: tuple[str, ...]
    """Weights [H] of the cell in the gates i, o and f."""


def _activations(ctx: Context, kind: _Kind, directions: int) -> list[tuple[str, ...]]:
    """Return the activations of each direction."""
    names = [str(name) for name in ctx.attr("activations", ())] or [*kind.activations] * directions
    if len(names) != directions * len(kind.activations):
        raise ModelError(f"{len(names)} activations are given, not {directions * len(kind.activations)}")
    for name in names:
        if name.lower() not in ACTIVATIONS:
            ctx.refuse(f"activation {name}")
    known = [ACTIVATIONS[name.lower()] for name in names]
    count = len(kind.activations)
    return [tuple(known[start : start + count]) for start in range(0, len(known), count)]


def _refuse(ctx: Context, direction: str) -> None:
    """Refuse what is not computed here."""
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ModelError(f"direction '{direction}' is not forward, reverse or bidirectional")
    if _is_written_out(ctx) and ctx.shape(0)[ctx.attr("layout", 0)] > MOST_STEPS:
        ctx.refuse(f"peepholes, clip or input_forget over more than {MOST_STEPS} steps")


def _is_written_out(ctx: Context) -> bool:
    """Whether there is what the recurrence has no kernels for."""
    return ctx.attr("clip") is not None or bool(ctx.attr("input_forget", 0)) or ctx.has(7)


def _mask(ctx: Context, steps: int, samples: int) -> str | None:
    """Return where samples have steps [T, N, 1]; None if all have all of them."""
    if not ctx.has(4):
        return None
    times = numbered(steps).reshape(-1, 1, 1)
    known = ctx.known(4)
    if known is not None:
        if known.size != samples:
            raise ModelError(f"its {known.size} sequence lengths are fixed, for a batch of {samples}")
        lengths = known.astype(np.int64).reshape(1, samples, 1)
        return None if (lengths >= steps).all() else ctx.build.constant(times < lengths)
    given = ctx.reshape(ctx.value(4), (1, samples, 1))
    return ctx.make("Less", ctx.build.constant(times, "int64"), given)


def _initial(ctx: Context, index: int, direction: int, batch_first: bool, shape: tuple[int, ...]) -> str:
    """Return an initial state of one direction: that input, or zeros."""
    known = ctx.known(index)
    if not ctx.has(index) or (known is not None and not known.any()):
        return ctx.build("Expand", ctx.number(0.0, ctx.value(1)), shape=shape)
    one = slice_axis(ctx, ctx.value(index), 1 if batch_first else 0, direction, direction + 1)
    return ctx.reshape(one, shape)


def _direction(
    ctx: Context, kind: _Kind, number: int, reverse: bool, activations: tuple[str, ...]
) -> _Direction:
    """Return one direction, its input already multiplied and its biases added."""
    batch_first = bool(ctx.attr("layout", 0))
    x, given = ctx.value(0), ctx.shape(0)
    samples, (_, width, hidden) = given[0 if batch_first else 1], ctx.shape(2)

    def one(index: int, *shape: int) -> str:
        return ctx.reshape(slice_axis(ctx, ctx.value(index), 0, number, number + 1), shape)

    gates = ctx.make(
        "Einsum",
        x,
        one(1, width, given[2]),
        equation="nti,gi->tng" if batch_first else "tni,gi->tng",
    )
    late = ctx.node.op == "GRU" and bool(ctx.attr("linear_before_reset", 0))
    bias = (ctx.build.constant(np.zeros(hidden), ctx.build.dtype(gates)),) * late
    if ctx.has(3):
        both = one(3, 2 * width)
        added, inner = (slice_axis(ctx, both, 0, start, start + width) for start in (0, width))
        if late:  # the last gate's recurrent bias is multiplied by the reset gate
            cut = 2 * hidden
            bias = (slice_axis(ctx, inner, 0, cut, width),)
            two = ctx.make("Add", slice_axis(ctx, added, 0, 0, cut), slice_axis(ctx, inner, 0, 0, cut))
            added = ctx.make("Concat", two, slice_axis(ctx, added, 0, cut, width), axis=0)
        elif ctx.node.inputs[3] not in ctx.single_biases:
            added = ctx.make("Add", added, inner)
        gates = ctx.make("Add", gates, added)
    states = tuple(
        _initial(ctx, 5 + place, number, batch_first, (1, samples, hidden)) for place in range(kind.states)
    )
    peepholes = _parts(ctx, one(7, 3 * hidden), 0, 3) if ctx.has(7) else ()
    return _Direction(gates, one(2, width, hidden), states, bias, reverse, activations, peepholes)


def _steps(ctx: Context, kind: _Kind, given: _Direction, mask: str | None) -> tuple[str, tuple[str, ...]]:
    """Return h of all steps [T, N, H], and the last states, by as many segments as there have to be."""
    steps, _, width = ctx.build.shape(given.x)
    count = -(-steps * width // SEGMENT_ELEMENTS)
    ctx.make_room(count)
    segments = pieces(steps, count)
    attrs: dict[str, object] = {"reverse": given.reverse, "activations": given.activations}
    if ctx.node.op == "GRU":
        attrs["linear_before_reset"] = bool(given.bias)
    states, parts = given.states, []
    for start, stop in reversed(segments) if given.reverse else segments:
        x = slice_axis(ctx, given.x, 0, start, stop)
        here = () if mask is None else (slice_axis(ctx, mask, 0, start, stop),)
        made = ctx.build.node(kind.op, [x, given.weight, *states, *given.bias, *here], attrs)
        parts.append(made[0])
        states = made[-kind.states :]
    ordered = parts[::-1] if given.reverse else parts
    return ordered[0] if len(ordered) == 1 else ctx.make("Concat", *ordered, axis=0), states


def _parts(ctx: Context, value: str, axis: int, count: int) -> tuple[str, ...]:
    """Split a value along an axis into equal parts."""
    extent = ctx.build.shape(value)[axis] // count
    return (value,) if count == 1 else ctx.many("Split", value, axis=axis, sizes=(extent,) * count)


def _each_step(ctx: Context, given: _Direction, mask: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the same as ``_steps``, of nodes for each step."""
    steps = ctx.build.shape(given.x)[0]
    xs = _parts(ctx, given.x, 0, steps)
    masks = () if mask is None else _parts(ctx, mask, 0, steps)
    one = {"LSTM": _lstm_step, "GRU": _gru_step, "RNN": _rnn_step}[ctx.node.op]
    states, made = given.states, [""] * steps
    for t in reversed(range(steps)) if given.reverse else range(steps):
        after = one(ctx, given, xs[t], states)
        if masks:
            pairs = zip(after, states, strict=True)
            after = tuple(ctx.make("Where", masks[t], new, old) for new, old in pairs)
        states, made[t] = after, after[0]
    return made[0] if steps == 1 else ctx.make("Concat", *made, axis=0), states


def _act(ctx: Context, activation: str, value: str) -> str:
    """Clip an element of a gate, and activate it. The cell is not clipped, as ONNX Runtime has it."""
    clip = ctx.attr("clip")
    if clip is not None:
        value = bounded(ctx, value, -clip, clip)
    return ctx.make(activation, value)


def _recur(ctx: Context, state: str, weight: str) -> str:
    return ctx.make("Einsum", state, weight, equation="tnh,gh->tng")


def _rnn_step(ctx: Context, given: _Direction, x: str, states: Sequence[str]) -> tuple[str, ...]:
    return (_act(ctx, given.activations[0], ctx.make("Add", x, _recur(ctx, states[0], given.weight))),)


def _gru_step(ctx: Context, given: _Direction, x: str, states: Sequence[str]) -> tuple[str, ...]:
    (h,), hidden = states, ctx.build.shape(given.weight)[1]
    sizes = (2 * hidden, hidden)
    two, new = ctx.many("Split", given.weight, axis=0, sizes=sizes)
    x_two, x_new = ctx.many("Split", x, axis=2, sizes=sizes)
    both = ctx.make("Add", x_two, _recur(ctx, h, two))
    z, r = _parts(ctx, _act(ctx, given.activations[0], both), 2, 2)
    if given.bias:
        q = ctx.make("Mul", r, ctx.make("Add", _recur(ctx, h, new), given.bias[0]))
    else:
        q = _recur(ctx, ctx.make("Mul", r, h), new)
    n = _act(ctx, given.activations[1], ctx.make("Add", x_new, q))
    return (ctx.make("Add", n, ctx.make("Mul", z, ctx.make("Sub", h, n))),)


def _lstm_step(ctx: Context, given: _Direction, x: str, states: Sequence[str]) -> tuple[str, ...]:
    (h, c), (sigma, squash, last) = states, given.activations
    i, o, f, g = _parts(ctx, ctx.make("Add", x, _recur(ctx, h, given.weight)), 2, 4)

    def gate(value: str, place: int, cell: str) -> str:
        if given.peepholes:
            value = ctx.make("Add", value, ctx.make("Mul", given.peepholes[place], cell))
        return _act(ctx, sigma, value)

    i = gate(i, 0, c)
    f = ctx.make("Sub", ctx.number(1.0, i), i) if ctx.attr("input_forget", 0) else gate(f, 2, c)
    c = ctx.make("Add", ctx.make("Mul", f, c), ctx.make("Mul", i, _act(ctx, squash, g)))
    return ctx.make("Mul", gate(o, 1, c), ctx.make(last, c)), c


def _recurrent(ctx: Context) -> Sequence[Operand]:
    kind, direction = _KINDS[ctx.node.op], str(ctx.attr("direction", "forward"))
    _refuse(ctx, direction)
    need_floats(ctx, 0, 1, 2)
    batch_first = bool(ctx.attr("layout", 0))
    steps, samples = ctx.shape(0)[1::-1] if batch_first else ctx.shape(0)[:2]
    count, hidden = 2 if direction == "bidirectional" else 1, ctx.shape(2)[2]
    activations = _activations(ctx, kind, count)
    mask = _mask(ctx, steps, samples)
    outputs, lasts = [], []
    for number in range(count):
        reverse = direction == "reverse" or number == 1
        one = _direction(ctx, kind, number, reverse, activations[number])
        h, last = _each_step(ctx, one, mask) if _is_written_out(ctx) else _steps(ctx, kind, one, mask)
        if mask is not None:
            h = ctx.make("Where", mask, h, ctx.number(0.0, h))
        outputs.append(ctx.reshape(h, (steps, 1, samples, hidden)))
        lasts.append(last)
    y = outputs[0] if count == 1 else ctx.make("Concat", *outputs, axis=1)
    states = [
        each[0] if count == 1 else ctx.make("Concat", *each, axis=0) for each in zip(*lasts, strict=True)
    ]
    if batch_first:
        y = ctx.make("Transpose", y, perm=(2, 0, 1, 3))
        states = [ctx.make("Transpose", state, perm=(1, 0, 2)) for state in states]
    return [y, *states][: len(ctx.node.outputs)]


RECURRENT: dict[str, Lower] = dict.fromkeys(_KINDS, _recurrent)
"""Lowerings of recurrent layers."""
