"""Lowers sequences of tensors whose lengths are known before the run: lists that no operator ever sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.onnx.context import Context, Lower, Operand


def _made(ctx: Context, items: Sequence[Operand]) -> list[Operand]:
    """Let the node's output be a sequence; what stands in its place is read by nothing else."""
    ctx.sequences[ctx.node.outputs[0]] = list(items)
    return [np.empty(0)]


def _items(ctx: Context) -> list[Operand]:
    if ctx.node.inputs[0] not in ctx.sequences:
        ctx.refuse("a sequence whose length depends on data")
    return list(ctx.sequences[ctx.node.inputs[0]])


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


def _at(ctx: Context) -> Sequence[Operand]:
    items = _items(ctx)
    return [items[_place(ctx, 1, len(items))]]


def _insert(ctx: Context) -> Sequence[Operand]:
    items = _items(ctx)
    place = _place(ctx, 2, len(items) + 1) if ctx.has(2) else len(items)
    return _made(ctx, [*items[:place], ctx.operand(1), *items[place:]])


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


def _concat(ctx: Context) -> Sequence[Operand]:
    return [joined(ctx, _items(ctx), int(ctx.attr("axis")), bool(ctx.attr("new_axis", 0)))]


SEQUENCES: dict[str, Lower] = {
    "SequenceEmpty": lambda ctx: _made(ctx, []),
    "SequenceConstruct": lambda ctx: _made(ctx, [ctx.operand(i) for i in range(len(ctx.node.inputs))]),
    "SequenceAt": _at,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceLength": lambda ctx: [np.asarray(len(_items(ctx)), np.int64)],
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
}
"""Lowerings of sequences."""
