"""Refuses other sizes than a file was traced at, where a node has a number in it that may be such a size.

An exporter that is not told which axes are open writes their sizes into shapes, ends, windows and divisors.
A file does not say which of its numbers are sizes; those that would be are refused, by node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from math import isclose, prod, sqrt

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.constant_folding import ints, slices
from oocdl.graph.onnx.context import Context
from oocdl.graph.onnx.model_file import shown

_FAR = 1 << 30
"""An end of a Slice beyond this stands for the end of the axis."""


def check_baked(ctx: Context) -> None:
    """Raise ModelError if the node of ``ctx`` holds a size of the trace that is another one now."""
    check = _CHECKS.get(ctx.node.op)
    if not ctx.traced or check is None:
        return
    before = ctx.traced.get(ctx.node.inputs[0], ()) if ctx.has(0) else ()
    pairs = enumerate(zip(before, ctx.shape(0), strict=True)) if before else ()
    every = tuple(axis for axis, (old, new) in pairs if old != new)
    changed = tuple(axis for axis in every if axis or not ctx.batch)  # another batch is read as such
    for axis, why in check(ctx, before, changed) if changed or ctx.node.op in _ARITHMETIC else ():
        if axis is not None and axis not in changed:
            continue
        old = "a size" if axis is None else f"axis {axis} of extent {before[axis]}"
        raise ModelError(
            f"node {shown(ctx.node.name)} ({ctx.node.op}): {why} may stand for {old} in the file, which is "
            "given other sizes here; export it with these axes open, or give it the sizes that it has"
        )
    if not ctx.alone and every != changed:  # then a size may be taken for the batch: to be compared
        ctx.rebatched = ctx.rebatched or any(axis == 0 for axis, _ in check(ctx, before, every))


Found = Iterator[tuple[int | None, str]]
"""(axis of the first input, what may stand for its extent, if that is another one now)"""
Check = Callable[[Context, Shape, Shape], Found]
"""(context, the shape that the first input had in the trace, its axes that have other extents now)"""


def _written(ctx: Context, index: int) -> list[int] | None:
    """Return the numbers of an input that the file holds; None of one that is computed of sizes or data."""
    found = None if ctx.is_sized(index) else ctx.known(index)
    return None if found is None else [int(number) for number in found.reshape(-1)]


def _reshape(ctx: Context, before: Shape, changed: Shape) -> Found:
    wanted = _written(ctx, 1)
    if wanted is None:
        return
    copied = {axis for axis, extent in enumerate(wanted) if extent == 0 and not ctx.attr("allowzero", 0)}
    inside = [axis for axis in changed if axis not in copied]
    if not inside:
        return
    first, last = inside[0], inside[-1]
    if -1 not in wanted:
        yield first, f"shape {wanted}"
        return
    free = wanted.index(-1)
    # What is written before and after the -1 has to be made of axes that keep their extents.
    ahead = prod(before[axis] if axis in copied else wanted[axis] for axis in range(free))
    behind = prod(wanted[free + 1 :])
    spans = (prod(before[:first]), ahead), (prod(before[last + 1 :]), behind)
    alone = any(before[axis] == 1 for axis in inside)  # a 1 in the shape would stand for it
    if any(span != written if alone else span % written for span, written in spans):
        yield first, f"shape {wanted}"


def _slice(ctx: Context, before: Shape, changed: Shape) -> Found:
    inputs = [ctx.known(index) for index in range(len(ctx.node.inputs))]
    if any(ctx.is_sized(index) for index in (1, 2)) or any(given is None for given in inputs[1:3]):
        return
    for axis, first, last, step in slices(ctx.node, inputs, len(ctx.shape(0))):
        end = last if step > 0 else first
        if 0 < end < _FAR:
            yield axis, f"end {end}"


def _gather(ctx: Context, before: Shape, changed: Shape) -> Found:
    places, axis = _written(ctx, 1), ctx.attr("axis", 0) % len(before)
    if places and (ctx.shape(1) or places[0] == before[axis] - 1 > 0):
        yield axis, "its indices"


def _resize(ctx: Context, before: Shape, changed: Shape) -> Found:
    made = ctx.traced.get(ctx.node.outputs[0], before)
    axes = ctx.attr("axes", range(len(before)))
    for axis, size in zip(axes, ints(ctx.node, "", ctx.known(3)) or (), strict=False):
        if size == made[axis]:
            yield axis % len(before), f"size {size}"


def _split(ctx: Context, before: Shape, changed: Shape) -> Found:
    if "split" in ctx.node.attrs or (ctx.has(1) and not ctx.is_sized(1)):
        yield ctx.attr("axis", 0) % len(before), "its sizes"


def _conv(ctx: Context, before: Shape, changed: Shape) -> Found:
    """Yield a padding that is as large as the window: a Pad that the exporter has joined with it."""
    pads = ctx.attr("pads", ())
    extents = ctx.attr("kernel_shape", ctx.shape(1)[2:] if ctx.has(1) else ())
    dilations = ctx.attr("dilations", (1,) * len(extents))
    for axis, (extent, dilation) in enumerate(zip(extents, dilations, strict=True), start=2):
        largest = max(pads[axis - 2 :: len(extents)], default=0)
        if largest > (extent - 1) * dilation:
            yield axis, f"a padding of {largest}"


def _pool(ctx: Context, before: Shape, changed: Shape) -> Found:
    for axis, extent in enumerate(ctx.attr("kernel_shape", ()), start=2):
        if extent == before[axis] > 1:
            yield axis, f"a window of {extent}"


def _pad(ctx: Context, before: Shape, changed: Shape) -> Found:
    """Yield a padding that is half as large as the axis was; smaller ones are those of windows."""
    written = _written(ctx, 1) if ctx.has(1) else ctx.attr("pads", ())
    axes = ctx.known(3) if ctx.has(3) else np.arange(len(before))
    if written is None or axes is None:
        return
    for axis, ends in zip(axes.reshape(-1).tolist(), np.reshape(written, (2, -1)).T.tolist(), strict=True):
        if max(ends) * 2 >= before[axis]:
            yield axis % len(before), f"a padding of {max(ends)}"


def _expand(ctx: Context, before: Shape, changed: Shape) -> Found:
    target = _written(ctx, 1) or ()
    for axis in changed if target else ():
        if target[axis + len(target) - len(before)] != 1:
            yield axis, f"shape {target}"


def _squeeze(ctx: Context, before: Shape, changed: Shape) -> Found:
    if "axes" not in ctx.node.attrs and not ctx.has(1):
        yield from ((axis, "a Squeeze of all axes of 1") for axis in changed)


def _arithmetic(ctx: Context, before: Shape, changed: Shape) -> Found:
    """Yield a number that is an extent of the trace, a product of some, or a root or reciprocal of these."""
    for index in range(len(ctx.node.inputs)):
        array = ctx.known(index)
        if array is not None and array.size == 1 and not ctx.is_sized(index):
            number = abs(float(array.reshape(())))
            if any(isclose(number, size, rel_tol=1e-6) for size in _sizes(ctx.resized)):
                yield None, f"the number {number:g}"


def _sizes(resized: Iterable[Shape]) -> Iterator[float]:
    """Yield what a size may be written as; 1 and 2 are numbers of their own right."""
    for extents in resized:
        for count in range(1, len(extents) + 1):
            for size in map(prod, combinations(extents, count)):
                if size > 2:
                    yield from (size, 1 / size, sqrt(size), 1 / sqrt(size))


def note_resized(ctx: Context, name: str, shape: Shape) -> None:
    """Note the extents that a value had in the trace along axes that have others now, but for the batch."""
    before = ctx.traced.get(name, shape)
    if before != shape and len(before) == len(shape):
        ctx.resized.add(tuple(old for old, new in zip(before[1:], shape[1:], strict=True) if old != new))


_ARITHMETIC = ("Mul", "Div")
_CHECKS: Mapping[str, Check] = {
    "Reshape": _reshape,
    "Slice": _slice,
    "Gather": _gather,
    "Resize": _resize,
    "Split": _split,
    "Conv": _conv,
    **dict.fromkeys(("AveragePool", "MaxPool"), _pool),
    "Expand": _expand,
    "Pad": _pad,
    "Squeeze": _squeeze,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}
