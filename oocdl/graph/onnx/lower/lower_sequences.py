"""Lowers Attention, RotaryEmbedding, LSTM, GRU and RNN.

A recurrence is a product of the input for all steps, and then goes by segments of time, each of which passes
its last states on. Their length bounds what a unit needs of a sequence, and follows from the network's sizes
alone, so that every budget computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.index import pieces
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.structure import slice_axis

QUERY, KEY, VALUE, MASK = range(4)
"""Inputs of Attention; those behind them are of a cache of keys."""


def _heads(ctx: Context, index: int, count: int) -> str:
    """Return an operand as [batch, heads, length, size]; of rank 3 its heads lie side by side."""
    x, shape = ctx.value(index), ctx.shape(index)
    if len(shape) == 4:
        return x
    if not count or shape[2] % count:
        raise ModelError(f"{shape[2]} numbers are not those of {count} heads")
    return ctx.make("Transpose", ctx.reshape(x, (*shape[:2], count, shape[2] // count)), perm=(0, 2, 1, 3))


@lowers("Attention")
def _attention(ctx: Context) -> Sequence[Operand]:
    """``softmax(q k^T scale + mask) v``; a head of keys serves as many heads of queries as there are more."""
    if any(ctx.node.inputs[MASK + 1 :]) or any(name in ctx.read for name in ctx.node.outputs[1:] if name):
        ctx.refuse("a cache of keys, or scores as a result")
    if ctx.attr("softcap", 0.0):
        ctx.refuse("a softcap")
    q = _heads(ctx, QUERY, ctx.attr("q_num_heads", 0))
    k, v = (_heads(ctx, index, ctx.attr("kv_num_heads", 0)) for index in (KEY, VALUE))
    (batch, heads, length, size), groups = ctx.build.shape(q), ctx.build.shape(k)[1]
    if heads % groups:
        raise ModelError(f"{heads} heads of queries cannot share {groups} heads of keys")
    q = ctx.reshape(q, (batch, groups, heads // groups, length, size))
    mask = [_by_group(ctx, groups)] if ctx.has(MASK) else []
    scale = float(ctx.attr("scale", 1 / sqrt(size)))
    left, right = ctx.attr("left_window_size", -1), ctx.attr("right_window_size", -1)
    ends = [0] * bool(ctx.attr("is_causal", 0)) + [right] * (right >= 0)
    # How far before and behind itself a query sees keys.
    band = (-left if left >= 0 else None, min(ends) if ends else None)
    y = ctx.make("Attend", q, k, v, *mask, scale=scale, band=band, unseen=-inf, blind=0.0)
    y = ctx.reshape(y, (batch, heads, length, ctx.build.shape(v)[3]))
    if len(ctx.shape(QUERY)) == 4:
        return [y]
    y = ctx.make("Transpose", y, perm=(0, 2, 1, 3))
    return [ctx.reshape(y, (batch, length, heads * ctx.build.shape(v)[3]))]


def _by_group(ctx: Context, groups: int) -> str:
    """Return the mask, [batch, heads, queries, keys], with its heads as [groups, heads of each]."""
    shape, keys = ctx.shape(MASK), ctx.shape(KEY)[-2]
    if shape[-1] != keys:
        ctx.refuse(f"a mask of {shape[-1]} of {keys} keys")
    batch, heads, *rest = (*(1,) * (4 - len(shape)), *shape)
    split = (1, 1) if heads == 1 else (groups, heads // groups)
    return ctx.reshape(ctx.value(MASK), (batch, *split, *rest))


@lowers("RotaryEmbedding")
def _rotary(ctx: Context) -> Sequence[Operand]:
    """Turn pairs of numbers by angles of their positions; those beyond ``rotary_embedding_dim`` stay."""
    x, shape = ctx.value(0), ctx.shape(0)
    flat = len(shape) == 3
    if flat:
        x = ctx.reshape(x, (*shape[:2], ctx.attr("num_heads"), shape[2] // ctx.attr("num_heads")))
    size = ctx.build.shape(x)[3]
    turned = ctx.attr("rotary_embedding_dim", 0) or size
    half, paired = turned // 2, bool(ctx.attr("interleaved", 0))
    ranges = ((0, turned, 2), (1, turned, 2)) if paired else ((0, half, 1), (half, turned, 1))
    parts = [slice_axis(ctx, x, 3, *one) for one in ranges]
    angles = []
    for index in (1, 2):
        table = ctx.make("Gather", ctx.value(index), ctx.value(3)) if ctx.has(3) else ctx.value(index)
        batch, length = ctx.build.shape(table)[:2]
        angles.append(ctx.reshape(table, (batch, length, 1, half) if flat else (batch, 1, length, half)))
    (first, second), (cosine, sine) = parts, angles
    results = [
        ctx.make("Sub", ctx.make("Mul", cosine, first), ctx.make("Mul", sine, second)),
        ctx.make("Add", ctx.make("Mul", sine, first), ctx.make("Mul", cosine, second)),
    ]
    if paired:
        inner = ctx.build.shape(results[0])
        pairs = ctx.make("Concat", *(ctx.reshape(one, (*inner, 1)) for one in results), axis=4)
        results = [ctx.reshape(pairs, (*inner[:3], turned))]
    if turned < size:
        results.append(slice_axis(ctx, x, 3, turned, size, 1))
    return [ctx.reshape(ctx.concat(results, 3), shape)]


SEGMENT_ELEMENTS = 1 << 21
"""Elements of the gates of one sample (steps x gates x hidden size) in a segment: 8 MiB of float32."""
ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}
"""ONNX's name in lower case -> our operator."""


DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
"""Activations of one direction of a recurrent operator."""


def _activations(ctx: Context, directions: int) -> list[tuple[str, ...]]:
    defaults = DEFAULTS[ctx.node.op]
    count, names = len(defaults), ctx.attr("activations") or defaults * directions
    if len(names) != directions * count:
        raise ModelError(f"{len(names)} activations are given, not {directions * count}")
    for name in names:
        if name.lower() not in ACTIVATIONS:
            ctx.refuse(f"activation {name}")
    known = tuple(ACTIVATIONS[name.lower()] for name in names)
    return [known[start : start + count] for start in range(0, len(known), count)]


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
    ctx: Context, number: int, reverse: bool, activations: tuple[str, ...], mask: str | None
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
    shape, inputs = (1, samples, hidden), (5, 6) if ctx.node.op == "LSTM" else (5,)
    states = tuple(_initial(ctx, index, number, shape) for index in inputs)
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
        made = ctx.build.node(f"{ctx.node.op.title()}Steps", [x, weight, *states, *bias, *here], attrs)
        parts.append(made[0])
        states = made[-len(states) :]
    return ctx.concat(parts[::-1] if reverse else parts, 0), states


@lowers("RNN", "GRU", "LSTM")
def _recurrent(ctx: Context) -> Sequence[Operand]:
    direction = ctx.attr("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ModelError(f"direction '{direction}' is not forward, reverse or bidirectional")
    if ctx.attr("clip") is not None or ctx.attr("input_forget", 0) or ctx.has(7) or ctx.attr("layout", 0):
        ctx.refuse("peepholes, clip, input_forget or layout 1")
    ctx.need_floats(0, 1, 2)
    steps, samples = ctx.shape(0)[:2]
    count, hidden = 2 if direction == "bidirectional" else 1, ctx.shape(2)[2]
    activations = _activations(ctx, count)
    mask = _mask(ctx, steps, samples)
    outputs, lasts = [], []
    for number in range(count):
        reverse = direction == "reverse" or number == 1
        h, last = _direction(ctx, number, reverse, activations[number], mask)
        if mask is not None:
            h = ctx.make("Where", mask, h, ctx.number(0.0, h))
        outputs.append(ctx.reshape(h, (steps, 1, samples, hidden)))
        lasts.append(last)
    results = [ctx.concat(outputs, 1), *(ctx.concat(each, 0) for each in zip(*lasts, strict=True))]
    return results[: len(ctx.node.outputs)]
