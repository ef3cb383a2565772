"""Lowers Attention to the operator of that kind, or to products, masks and Softmax; and RotaryEmbedding."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from oocdl.errors import ModelError
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.structure import slice_axis

QUERY, KEY, VALUE, MASK = range(4)
"""Inputs of Attention; those behind them are of a cache of keys."""


def _heads(ctx: Context, index: int, count: int) -> str:
    """Return an operand as [batch, heads, length, size], or of rank 3 as [batch, length, heads, size]."""
    x, shape = ctx.value(index), ctx.shape(index)
    if len(shape) == 4:
        return x
    if not count or shape[2] % count:
        raise ModelError(f"{shape[2]} numbers are not those of {count} heads")
    return ctx.reshape(x, (*shape[:2], count, shape[2] // count))


def _band(ctx: Context) -> tuple[int | None, int | None]:
    """Return how far before and behind itself a query sees keys."""
    left, right = ctx.attr("left_window_size", -1), ctx.attr("right_window_size", -1)
    ends = [0] * bool(ctx.attr("is_causal", 0)) + [right] * (right >= 0)
    return -left if left >= 0 else None, min(ends) if ends else None


def _mask(ctx: Context, keys: int) -> str | None:
    """Return the mask that is an operand, if one is."""
    if not ctx.has(MASK):
        return None
    if ctx.shape(MASK)[-1] != keys:
        ctx.refuse(f"a mask of {ctx.shape(MASK)[-1]} of {keys} keys")
    return ctx.value(MASK)


def _masked(ctx: Context, scores: str) -> tuple[str, bool]:
    """Return the scores, minus infinity where nothing is seen, and whether a row may see nothing at all."""
    queries, keys = ctx.build.shape(scores)[-2:]
    mask, (first, last) = _mask(ctx, keys), _band(ctx)
    column = ctx.build.constant(numbered(keys), "int64")
    place = ctx.build.constant(numbered(queries).reshape(-1, 1), "int64")
    allowed = []
    for op, end in (("Greater", last), ("Less", first)):
        if end is not None:
            bound = ctx.make("Add", place, ctx.number(end, place)) if end else place
            allowed.append(ctx.make("Not", ctx.make(op, column, bound)))
    none = ctx.number(-inf, scores)
    if mask is not None and ctx.build.dtype(mask) == "bool":
        allowed.append(mask)
    elif mask is not None:
        scores = ctx.make("Add", scores, mask)
    for one in allowed:
        scores = ctx.make("Where", one, scores, none)
    return scores, mask is not None or (first, last) not in ((None, None), (None, 0))


def _weights(ctx: Context, scores: str, may_be_blind: bool) -> str:
    """Return the Softmax over keys; 0 for a query that sees none."""
    last = len(ctx.build.shape(scores)) - 1
    if not may_be_blind:
        return ctx.make("Softmax", scores, axis=last)
    zero = ctx.number(0.0, scores)
    blind = ctx.make("Equal", ctx.make("ReduceMax", scores, axes=(last,)), ctx.number(-inf, scores))
    seen = ctx.make("Softmax", ctx.make("Where", blind, zero, scores), axis=last)
    return ctx.make("Where", blind, zero, seen)


@lowers("Attention")
def _attention(ctx: Context) -> Sequence[Operand]:
    """``softmax(q k^T scale + mask) v``; a head of keys serves as many heads of queries as there are more.

    One node computes it without storing scores, unless these pass a ``softcap``.
    """
    if any(ctx.node.inputs[MASK + 1 :]) or any(ctx.used(name) for name in ctx.node.outputs[1:] if name):
        ctx.refuse("a cache of keys, or scores as a result")
    flat = len(ctx.shape(QUERY)) == 3  # heads lie as [batch, length, heads, size]
    q = _heads(ctx, QUERY, ctx.attr("q_num_heads", 0))
    k, v = (_heads(ctx, index, ctx.attr("kv_num_heads", 0)) for index in (KEY, VALUE))
    shape, size = ctx.build.shape(q), ctx.build.shape(v)[3]
    heads, groups = shape[2 if flat else 1], ctx.build.shape(k)[2 if flat else 1]
    if heads % groups:
        raise ModelError(f"{heads} heads of queries cannot share {groups} heads of keys")
    split = (groups, heads // groups)
    cap, scale = ctx.attr("softcap", 0.0), float(ctx.attr("scale", 1 / sqrt(shape[3])))
    if cap:
        q = ctx.reshape(q, (*shape[:2], *split, shape[3]) if flat else (shape[0], *split, *shape[2:]))
        queries, keys, values = ("bqgrh", "bkgh", "bkgv") if flat else ("bgrqh", "bgkh", "bgkv")
        scores = ctx.make("Einsum", q, k, equation=f"{queries},{keys}->bgrqk")
        extents = ctx.build.shape(scores)
        scores = ctx.reshape(scores, (extents[0], heads, *extents[3:]))
        scores = ctx.make("Mul", scores, ctx.number(scale, scores))
        part = ctx.make("Tanh", ctx.make("Mul", scores, ctx.number(1 / cap, scores)))
        weights = _weights(ctx, *_masked(ctx, ctx.make("Mul", part, ctx.number(cap, part))))
        made = queries.replace("h", "v")
        y = ctx.make("Einsum", ctx.reshape(weights, extents), v, equation=f"bgrqk,{values}->{made}")
    else:
        k, v = (ctx.make("Transpose", x, perm=(0, 2, 1, 3)) if flat else x for x in (k, v))
        q = ctx.reshape(q, (*shape[:2], *split, shape[3]) if flat else (shape[0], *split, *shape[2:]))
        q = ctx.make("Transpose", q, perm=(0, 2, 3, 1, 4)) if flat else q
        mask = _mask(ctx, ctx.build.shape(k)[2])
        given = [] if mask is None else [_by_group(ctx, mask, groups)]
        y = ctx.make("Attend", q, k, v, *given, scale=scale, band=_band(ctx), unseen=-inf, blind=0.0)
        y = ctx.make("Transpose", y, perm=(0, 3, 1, 2, 4)) if flat else y
    return [ctx.reshape(y, (*shape[:2], heads * size) if flat else (shape[0], heads, shape[2], size))]


def _by_group(ctx: Context, mask: str, groups: int) -> str:
    """Return what broadcasts to [batch, heads, queries, keys] with its heads as [groups, heads of each]."""
    shape = ctx.build.shape(mask)
    batch, heads, *rest = (*(1,) * (4 - len(shape)), *shape)
    split = (1, 1) if heads == 1 else (groups, heads // groups)
    return ctx.reshape(mask, (batch, *split, *rest))


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
