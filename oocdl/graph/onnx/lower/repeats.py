"""Finds what Keras calls repeat: a new axis, copies along it by Tile, merged into the axis before it.

That is interpolation to the nearest, and read as such it leaves the axis whole, which can then be cut. Copies
by Expand stay what they are: those of heads that a group of queries shares are never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from oocdl.graph.ir.graph import Node, Shape
from oocdl.graph.onnx.context import Context


def repeated(ctx: Context, x: str, shape: Shape, target: Shape) -> str | None:
    """Return a Reshape of ``x`` [..., n, r, ...] to [..., n r, ...] where all along r is equal; else None."""
    moved = ctx.maker(x)
    perm, inner = tuple(range(len(shape))), x
    if moved is not None and moved.op == "Transpose":
        perm, inner = moved.attrs["perm"], moved.inputs[0]
    copies = ctx.maker(ctx.unreshaped(inner))
    before = ctx.build.shape(inner)
    tiled = copies is not None and copies.outputs[0] in ctx.tiles and ctx.build.dtype(x) == ctx.precision
    place = _copied(ctx, copies, before) if copies is not None and tiled else None
    if copies is None or place is None:
        return None
    axis, count = perm.index(place) - 1, before[place]
    if axis < 0 or target != (*shape[:axis], shape[axis] * count, *shape[axis + 2 :]):
        return None
    order = [old - (old > place) for old in perm if old != place]  # axes of the base, as ``x`` has them
    base = ctx.reshape(copies.inputs[0], (*before[:place], *before[place + 1 :]))
    first = ctx.maker(base)
    if first is not None and first.op == "Transpose":  # the axes of a file may be moved there and back
        base, order = first.inputs[0], [first.attrs["perm"][old] for old in order]
    extent = ctx.build.shape(base)[order[axis]] * count
    made = ctx.make(
        "Resample",
        base,
        axis=order[axis],
        size=extent,
        mode="nearest",
        coordinates="asymmetric",
        scale=float(count),
        nearest_mode="floor",
        transposed=False,
    )
    return made if order == sorted(order) else ctx.make("Transpose", made, perm=tuple(order))


def _copied(ctx: Context, copies: Node, shape: Sequence[int]) -> int | None:
    """Return which axis of ``shape``, a Reshape of an Expand, is the only one that this has made."""
    old, new = ctx.build.shape(copies.inputs[0]), ctx.build.shape(copies.outputs[0])
    if len(old) != len(new):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if len(grown) != 1:
        return None
    outside, count = prod(new[: grown[0]]), new[grown[0]]
    found = [n for n, extent in enumerate(shape) if extent == count and prod(shape[:n]) == outside]
    return found[0] if found else None
