"""Lowers Pad, in all modes, to slices that are joined; what repeats has the sum of all gradients then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.folding.constant_folding import allow, ints
from oocdl.graph.onnx.lower.structure import slice_axis

_REPEATS = ("edge", "reflect", "wrap")
"""Modes that repeat elements; NumPy calls them the same."""

_MOST_PIECES = 64
"""So many pieces of an axis are joined at most: a few bytes can ask for millions."""


def _pad(ctx: Context) -> Sequence[Operand]:
    x, mode = ctx.value(0), ctx.attr("mode", "constant")
    if mode != "constant" and mode not in _REPEATS:
        ctx.refuse(f"mode {mode}")
    inputs = ctx.constants("pads or a value", 1, 2, 3)
    filler = inputs[2] if len(inputs) > 2 else None
    number = ctx.attr("value", 0.0) if filler is None or not filler.size else filler.reshape(-1)[0].item()
    for axis, before, after in _pads(ctx, inputs):
        start, stop = max(-before, 0), ctx.build.shape(x)[axis] - max(-after, 0)
        if start >= stop:
            raise ModelError(f"pads {before} and {after} leave nothing of axis {axis}")
        x = slice_axis(ctx, x, axis, start, stop)  # what is cut off is not repeated
        before, after = max(before, 0), max(after, 0)
        if not before and not after:
            continue
        if mode != "constant":
            x = _repeated(ctx, x, axis, (before, after))
        elif number == 0:
            x = ctx.make("Pad", x, axis=axis, before=before, after=after)
        else:
            parts = [_full(ctx, x, axis, before, number), [x], _full(ctx, x, axis, after, number)]
            x = ctx.make("Concat", *sum(parts, []), axis=axis)
    return [x]


def _pads(ctx: Context, inputs: Sequence[Array | None]) -> list[tuple[int, int, int]]:
    """Return (axis, before, after) as they are written."""
    rank = len(ctx.shape(0))
    axes = ints(ctx.node, inputs, "axes", 3)
    axes = tuple(range(rank)) if axes is None else axes
    pads = ints(ctx.node, inputs, "pads", 1) or ()
    if len(pads) != 2 * len(axes) or any(not -rank <= axis < rank for axis in axes):
        raise ModelError(f"pads {list(pads)} do not fit axes {list(axes)} of {rank}")
    count = len(axes)
    return [(axis % rank, a, b) for axis, a, b in zip(axes, pads[:count], pads[count:], strict=True)]


def _full(ctx: Context, x: str, axis: int, extent: int, number: float) -> list[str]:
    """Return ``number`` everywhere, with the shape of ``x`` but for ``extent``; nothing if that is 0."""
    shape = list(ctx.build.shape(x))
    shape[axis] = extent
    return [ctx.make("Expand", ctx.number(number, x), shape=tuple(shape))] if extent else []


def _repeated(ctx: Context, x: str, axis: int, pads: tuple[int, int]) -> str:
    """Join ``x`` with the slices of itself that lie before and after it, forwards, backwards or of one."""
    extent = ctx.build.shape(x)[axis]
    allow(ctx.node, (pads[0] + extent + pads[1],), 8)
    places = np.pad(np.arange(extent), pads, mode=ctx.attr("mode"))
    runs = [*_runs(places[: pads[0]]), (0, extent, 1), *_runs(places[pads[0] + extent :])]
    if len(runs) > _MOST_PIECES:
        ctx.refuse(f"axis {axis} of {extent} repeated {len(runs) - 1} times")
    return ctx.make("Concat", *(_piece(ctx, x, axis, *run) for run in runs), axis=axis)


def _runs(places: Array) -> Iterator[tuple[int, int, int]]:
    """Yield (first, count, step) of neighbours, with a step of 1, -1 or 0.

    >>> list(_runs(np.array([3, 2, 1, 0, 0, 5])))
    [(3, 4, -1), (0, 1, 1), (5, 1, 1)]
    """
    steps = np.diff(places)
    start = 0
    while start < len(places):
        step = int(steps[start]) if start < len(steps) and abs(steps[start]) <= 1 else 1
        other = np.flatnonzero(steps[start:] != step)
        stop = start + 1 + int(other[0] if other.size else len(steps) - start)
        yield int(places[start]), stop - start, step
        start = stop


def _piece(ctx: Context, x: str, axis: int, first: int, count: int, step: int) -> str:
    """Return ``count`` elements from ``first`` on; a step of 0 repeats it."""
    last = first + step * (count - 1)
    piece = slice_axis(ctx, x, axis, min(first, last), max(first, last) + 1)
    if step == -1:
        return ctx.make("Reverse", piece, axis=axis)
    if step or count == 1:
        return piece
    shape = list(ctx.build.shape(piece))
    shape[axis] = count
    return ctx.make("Expand", piece, shape=tuple(shape))


PADDING: dict[str, Lower] = {"Pad": _pad}
"""Lowerings of what enlarges tensors by repeated elements or a number."""
