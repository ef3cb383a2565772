"""Lowers Attention to the operator of that kind, or to products, masks and Softmax; and RotaryEmbedding."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Operand, lowers
from oocdl.graph.onnx.lower.structure import slice_axis

QUERY, KEY, VALUE, MASK, PAST_KEY, PAST_VALUE, LENGTHS = range(7)
"""Inputs of Attention."""


def _heads(ctx: Context, index: int, count: int, lay_out: bool) -> str:
    """Return an operand as [batch, heads, length, size], or of rank 3 as [batch, length, heads, size].

    ``lay_out``: in the first order whatever its rank is.
    """
    x, shape = ctx.value(index), ctx.shape(index)
    if len(shape) == 4:
        return x
    if not count or shape[2] % count:
        raise ModelError(f"{shape[2]} numbers are not those of {count} heads")
    x = ctx.reshape(x, (*shape[:2], count, shape[2] // count))
    return ctx.make("Transpose", x, perm=(0, 2, 1, 3)) if lay_out else x


def _with_past(ctx: Context, x: str, past: int) -> str:
    return ctx.make("Concat", ctx.value(past), x, axis=2) if ctx.has(past) else x


def _indices(ctx: Context, count: int, axis: int, first: int = 0) -> str:
    """Add numbers from ``first`` on along one of the two last axes."""
    numbers = first + numbered(count)
    return ctx.build.constant(numbers.reshape(-1, 1) if axis == -2 else numbers, "int64")


def _allowed(ctx: Context, queries: int, keys: int, past: int) -> list[str]:
    """Return what says which query sees which key: causal, windows, lengths without padding."""
    left, right = ctx.attr("left_window_size", -1), ctx.attr("right_window_size", -1)
    column, found = _indices(ctx, keys, -1), []
    place = _indices(ctx, queries, -2, past)
    if ctx.has(LENGTHS):
        lengths = ctx.reshape(ctx.value(LENGTHS), (*ctx.shape(LENGTHS), 1, 1, 1))
        found.append(ctx.make("Less", column, lengths))
        if not ctx.has(PAST_KEY):
            first = ctx.make("Sub", lengths, ctx.number(queries, lengths))
            place = ctx.make("Add", _indices(ctx, queries, -2), first)
    if ctx.attr("is_causal", 0):
        found.append(ctx.make("Not", ctx.make("Greater", column, place)))
    if left >= 0:
        lowest = ctx.make("Sub", place, ctx.number(left, place))
        found.append(ctx.make("Not", ctx.make("Less", column, lowest)))
    if right >= 0:
        highest = ctx.make("Add", place, ctx.number(right, place))
        found.append(ctx.make("Not", ctx.make("Greater", column, highest)))
    return found


def _given_mask(ctx: Context, keys: int) -> str:
    """Return the mask that is an operand; keys beyond its end are not seen."""
    mask = ctx.value(MASK)
    shape = ctx.build.shape(mask)
    if shape[-1] == keys or shape[-1] == 1 and keys == 1:
        return mask
    unseen = ctx.build.constant(False if ctx.build.dtype(mask) == "bool" else -np.inf, ctx.build.dtype(mask))
    rest = ctx.make("Expand", unseen, shape=(*shape[:-1], keys - shape[-1]))
    return ctx.make("Concat", mask, rest, axis=len(shape) - 1)


def _masked(ctx: Context, scores: str, past: int) -> tuple[str, bool]:
    """Return the scores, minus infinity where nothing is seen, and whether a row may see nothing at all."""
    queries, keys = ctx.build.shape(scores)[-2:]
    allowed, none = _allowed(ctx, queries, keys, past), ctx.number(-np.inf, scores)
    mask = _given_mask(ctx, keys) if ctx.has(MASK) else None
    if mask is not None and ctx.build.dtype(mask) == "bool":
        allowed.append(mask)
    elif mask is not None:
        scores = ctx.make("Add", scores, mask)
    for one in allowed:
        scores = ctx.make("Where", one, scores, none)
    return scores, mask is not None or len(allowed) > int(bool(ctx.attr("is_causal", 0)))


def _weights(ctx: Context, scores: str, may_be_blind: bool) -> str:
    """Return the Softmax over keys; 0 for a query that sees none."""
    last = len(ctx.build.shape(scores)) - 1
    if not may_be_blind:
        return ctx.make("Softmax", scores, axis=last)
    zero = ctx.number(0.0, scores)
    blind = ctx.make("Equal", ctx.make("ReduceMax", scores, axes=(last,)), ctx.number(-np.inf, scores))
    seen = ctx.make("Softmax", ctx.make("Where", blind, zero, scores), axis=last)
    return ctx.make("Where", blind, zero, seen)


def _whole_mask(ctx: Context, shape: Shape, past: int) -> list[str]:
    """Return the mask of scores of ``shape`` [batch, groups, heads, queries, keys], if a band is not all.

    Of a mask of numbers and what is false elsewhere one of numbers is made.
    """
    batch, groups, heads, queries, keys = shape
    found = _allowed(ctx, queries, keys, past) if ctx.has(LENGTHS) else []
    numbers: list[str] = []
    if ctx.has(MASK):
        mask = _given_mask(ctx, keys)
        (found if ctx.build.dtype(mask) == "bool" else numbers).append(mask)
    whole = found[:1]
    for other in found[1:]:
        whole = [ctx.make("And", whole[0], other)]
    if numbers and whole:
        whole = [ctx.make("Where", whole[0], numbers[0], ctx.number(-np.inf, numbers[0]))]
    return [_by_group(ctx, mask, groups) for mask in whole or numbers]


def _by_group(ctx: Context, mask: str, groups: int) -> str:
    """Return what broadcasts to [batch, heads, queries, keys] with its heads as [groups, heads of each]."""
    shape = ctx.build.shape(mask)
    batch, heads, *rest = (*(1,) * (4 - len(shape)), *shape)
    split = (1, 1) if heads == 1 else (groups, heads // groups)
    return ctx.reshape(mask, (batch, *split, *rest))


def _band(ctx: Context, past: int) -> tuple[int | None, int | None]:
    """Return how far before and behind itself a query sees keys; lengths make that a mask."""
    if ctx.has(LENGTHS):
        return None, None
    left, right = ctx.attr("left_window_size", -1), ctx.attr("right_window_size", -1)
    ends = [0] * bool(ctx.attr("is_causal", 0)) + [right] * (right >= 0)
    return past - left if left >= 0 else None, past + min(ends) if ends else None


@lowers("Attention")
def _attention(ctx: Context) -> Sequence[Operand]:
    """``softmax(q k^T scale + mask) v``; a head of keys serves as many heads of queries as there are more.

    One node computes it without storing scores, unless these are an output or pass a ``softcap``.
    """
    flat = len(ctx.shape(QUERY)) == 3
    wanted = [bool(name) for name in (*ctx.node.outputs, "", "", "")[:4]]
    lay_out = ctx.has(PAST_KEY) or wanted[1] or wanted[2]
    q = _heads(ctx, QUERY, ctx.attr("q_num_heads", 0), False)
    k = _with_past(ctx, _heads(ctx, KEY, ctx.attr("kv_num_heads", 0), lay_out), PAST_KEY)
    v = _with_past(ctx, _heads(ctx, VALUE, ctx.attr("kv_num_heads", 0), lay_out), PAST_VALUE)
    side = flat and not lay_out  # keys lie as [batch, length, heads, size]
    heads, groups = ctx.build.shape(q)[2 if flat else 1], ctx.build.shape(k)[2 if side else 1]
    if heads % groups:
        raise ModelError(f"{heads} heads of queries cannot share {groups} heads of keys")
    shape = ctx.build.shape(q)
    split = (groups, heads // groups)
    past = ctx.shape(PAST_KEY)[2] if ctx.has(PAST_KEY) else 0
    if not wanted[3] and not ctx.attr("softcap", 0.0):
        y = _attend(ctx, (q, k, v), split, past, (flat, side))
        return [y, k, v][: len(ctx.node.outputs)]
    q = ctx.reshape(q, (*shape[:2], *split, shape[3]) if flat else (shape[0], *split, *shape[2:]))
    queries, keys, values = ("bqgrh", "bkgh", "bkgv") if side else ("bgrqh", "bgkh", "bgkv")
    queries = "bqgrh" if flat else queries
    scores = ctx.make("Einsum", q, k, equation=f"{queries},{keys}->bgrqk")
    extents = ctx.build.shape(scores)
    whole = (extents[0], heads, *extents[3:])
    scores = ctx.reshape(scores, whole)
    scores = raw = ctx.make("Mul", scores, ctx.number(ctx.attr("scale", 1 / sqrt(shape[3])), scores))
    if cap := ctx.attr("softcap", 0.0):
        part = ctx.make("Tanh", ctx.make("Mul", scores, ctx.number(1 / cap, scores)))
        scores = ctx.make("Mul", part, ctx.number(cap, part))
    masked, may_be_blind = _masked(ctx, scores, past)
    weights = _weights(ctx, masked, may_be_blind)
    made = queries.replace("h", "v")
    y = ctx.make("Einsum", ctx.reshape(weights, extents), v, equation=f"bgrqk,{values}->{made}")
    size = ctx.build.shape(v)[3]
    y = ctx.reshape(y, (*shape[:2], heads * size) if flat else (shape[0], heads, shape[2], size))
    stages = (raw, scores, masked, weights)
    return [y, k, v, stages[ctx.attr("qk_matmul_output_mode", 0)]][: len(ctx.node.outputs)]


def _attend(
    ctx: Context, operands: tuple[str, str, str], split: tuple[int, int], past: int, lies: tuple[bool, bool]
) -> str:
    """Add the node; ``lies``: whether queries, and whether keys and values, lie as [batch, length, ..]."""
    q, k, v = operands
    shape, (flat, side) = ctx.build.shape(q), lies
    turned = [ctx.make("Transpose", x, perm=(0, 2, 1, 3)) if side else x for x in (k, v)]
    q = ctx.reshape(q, (*shape[:2], *split, shape[3]) if flat else (shape[0], *split, *shape[2:]))
    q = ctx.make("Transpose", q, perm=(0, 2, 3, 1, 4)) if flat else q
    scores = (*ctx.build.shape(q)[:4], ctx.build.shape(turned[0])[2])
    attrs = {"scale": float(ctx.attr("scale", 1 / sqrt(shape[3]))), "band": _band(ctx, past)}
    mask = _whole_mask(ctx, scores, past)
    y = ctx.make("Attend", q, *turned, *mask, **attrs, unseen=-inf, blind=0.0)
    y = ctx.make("Transpose", y, perm=(0, 3, 1, 2, 4)) if flat else y
    heads, size = split[0] * split[1], ctx.build.shape(v)[3]
    return ctx.reshape(y, (*shape[:2], heads * size) if flat else (shape[0], heads, shape[2], size))


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
