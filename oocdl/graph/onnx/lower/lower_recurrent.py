"""Lowers LSTM, GRU and RNN: a product of the input for all steps, and the recurrence by segments of time.

A segment passes its last states on to the next. It is as long as the gates of one sample fill
``SEGMENT_ELEMENTS``, so that what a unit needs of a sequence is bounded however long that is; the length
follows from the network's sizes alone, so that every budget computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.index import pieces
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.structure import slice_axis

SEGMENT_ELEMENTS = 1 << 21
"""Elements of the gates of one sample (steps x gates x hidden size) in a segment: 8 MiB of float32."""
ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}
"""ONNX's name in lower case -> our operator."""


class _Kind(NamedTuple):
    """A recurrent operator as ONNX defines it."""

    op: str
    """Our operator."""
    states: int
    """Number of states that go from step to step."""
    activations: tuple[str, ...]
    """Default activations of one direction."""


_KINDS = {
    "RNN": _Kind("RnnSteps", 1, ("Tanh",)),
    "GRU": _Kind("GruSteps", 1, ("Sigmoid", "Tanh")),
    "LSTM": _Kind("LstmSteps", 2, ("Sigmoid", "Tanh", "Tanh")),
}


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


def _initial(ctx: Context, index: int, direction: int, shape: tuple[int, ...]) -> str:
    """Return an initial state of one direction: that input, or zeros."""
    known = ctx.known(index)
    if not ctx.has(index) or (known is not None and not known.any()):
        return ctx.build("Expand", ctx.number(0.0, ctx.value(1)), shape=shape)
    return ctx.reshape(slice_axis(ctx, ctx.value(index), 0, direction, direction + 1), shape)


def _direction(
    ctx: Context, kind: _Kind, number: int, reverse: bool, activations: tuple[str, ...], mask: str | None
) -> tuple[str, tuple[str, ...]]:
    """Return h of all steps [T, N, H] of one direction, and its last states: h, and c of an LSTM, [1, N, H].

    The input is multiplied for all steps at once; the steps come in as many segments as there have to be.
    """
    steps, samples, features = ctx.shape(0)
    _, width, hidden = ctx.shape(2)

    def one(index: int, *shape: int) -> str:
        return ctx.reshape(slice_axis(ctx, ctx.value(index), 0, number, number + 1), shape)

    gates = ctx.make("Einsum", ctx.value(0), one(1, width, features), equation="tni,gi->tng")
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
    states = tuple(_initial(ctx, 5 + place, number, (1, samples, hidden)) for place in range(kind.states))
    weight = one(2, width, hidden)
    count = -(-steps * width // SEGMENT_ELEMENTS)
    ctx.make_room(count)
    segments, parts = pieces(steps, count), []
    attrs: dict[str, object] = {"reverse": reverse, "activations": activations}
    if ctx.node.op == "GRU":
        attrs["linear_before_reset"] = late
    for start, stop in reversed(segments) if reverse else segments:
        x = slice_axis(ctx, gates, 0, start, stop)
        here = () if mask is None else (slice_axis(ctx, mask, 0, start, stop),)
        made = ctx.build.node(kind.op, [x, weight, *states, *bias, *here], attrs)
        parts.append(made[0])
        states = made[-kind.states :]
    ordered = parts[::-1] if reverse else parts
    return ordered[0] if len(ordered) == 1 else ctx.make("Concat", *ordered, axis=0), states


@lowers("RNN", "GRU", "LSTM")
def _recurrent(ctx: Context) -> Sequence[Operand]:
    kind, direction = _KINDS[ctx.node.op], str(ctx.attr("direction", "forward"))
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ModelError(f"direction '{direction}' is not forward, reverse or bidirectional")
    if ctx.attr("clip") is not None or ctx.attr("input_forget", 0) or ctx.has(7) or ctx.attr("layout", 0):
        ctx.refuse("peepholes, clip, input_forget or layout 1")
    ctx.need_floats(0, 1, 2)
    steps, samples = ctx.shape(0)[:2]
    count, hidden = 2 if direction == "bidirectional" else 1, ctx.shape(2)[2]
    activations = _activations(ctx, kind, count)
    mask = _mask(ctx, steps, samples)
    outputs, lasts = [], []
    for number in range(count):
        reverse = direction == "reverse" or number == 1
        h, last = _direction(ctx, kind, number, reverse, activations[number], mask)
        if mask is not None:
            h = ctx.make("Where", mask, h, ctx.number(0.0, h))
        outputs.append(ctx.reshape(h, (steps, 1, samples, hidden)))
        lasts.append(last)
    y = outputs[0] if count == 1 else ctx.make("Concat", *outputs, axis=1)
    states = [
        each[0] if count == 1 else ctx.make("Concat", *each, axis=0) for each in zip(*lasts, strict=True)
    ]
    return [y, *states][: len(ctx.node.outputs)]
