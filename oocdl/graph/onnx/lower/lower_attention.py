"""Lowers Attention to the operator of that kind, and RotaryEmbedding."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from oocdl.errors import ModelError
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


def _band(ctx: Context) -> tuple[int | None, int | None]:
    """Return how far before and behind itself a query sees keys."""
    left, right = ctx.attr("left_window_size", -1), ctx.attr("right_window_size", -1)
    ends = [0] * bool(ctx.attr("is_causal", 0)) + [right] * (right >= 0)
    return -left if left >= 0 else None, min(ends) if ends else None


@lowers("Attention")
def _attention(ctx: Context) -> Sequence[Operand]:
    """``softmax(q k^T scale + mask) v``; a head of keys serves as many heads of queries as there are more."""
    if any(ctx.node.inputs[MASK + 1 :]) or any(ctx.used(name) for name in ctx.node.outputs[1:] if name):
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
    y = ctx.make("Attend", q, k, v, *mask, scale=scale, band=_band(ctx), unseen=-inf, blind=0.0)
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


def _table(ctx: Context, index: int) -> str:
    """Return cosines or sines as [batch, length, size], looked up by positions if these are given."""
    table = ctx.value(index)
    return ctx.make("Gather", table, ctx.value(3)) if ctx.has(3) else table


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
        table = _table(ctx, index)
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
    y = results[0] if len(results) == 1 else ctx.make("Concat", *results, axis=3)
    return [ctx.reshape(y, shape)]
