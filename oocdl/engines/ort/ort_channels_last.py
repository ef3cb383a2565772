"""NumPy kernels that move and pool values with their channels last: onnxruntime's take planes only.

Arrays are ``[n, *space, c]`` here. Channels that lie side by side are copied as one long element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import concat_axis, concat_pieces, crop_of
from oocdl.graph.ir.program import Instruction

Kernel = Callable[[Sequence[Array], Array, Instruction], None]
SCRATCH_ELEMENTS = 1 << 16
"""Elements of a plane that are pooled at once."""


def copy(source: Array, target: Array) -> None:
    """``target[...] = source``, runs of channels as one element each."""
    run = source.shape[-1] * source.itemsize
    if source.strides[-1] == target.strides[-1] == source.itemsize and source.shape == target.shape:
        source, target = (array.view(f"V{run}") for array in (source, target))
    target[...] = source


def concat(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """A Concat along any axis."""
    axis = (0, out.ndim - 1, *range(1, out.ndim - 1))[concat_axis(item)]
    start = 0
    for index in concat_pieces(item):
        stop = start + args[index].shape[axis]
        copy(args[index], out[(slice(None),) * axis + (slice(start, stop),)])
        start = stop


def cut(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """A Slice, whose operand begins and ends with a wanted element."""
    axis = int(item.attrs["axis"]) % out.ndim
    axis = (0, out.ndim - 1, *range(1, out.ndim - 1))[axis]
    copy(args[0][(slice(None),) * axis + (slice(None, None, int(item.attrs.get("step", 1))),)], out)


def is_tiled(item: Instruction, large: Shape, small: Shape, kernel: Sequence[int]) -> bool:
    """Whether the windows of ``kernel`` lie side by side, all of them whole, and cover ``large``, the shape
    of what they see; ``small`` has one place for each window."""
    ones = (1,) * len(kernel)
    return (
        tuple(item.attrs.get("strides") or ones) == tuple(kernel)
        and tuple(item.attrs.get("dilations") or ones) == ones
        and tuple(large[2:]) == tuple(n * k for n, k in zip(small[2:], kernel, strict=True))
        and not any(crop_of(item))
        and prod(large) > 0
        and len(kernel) == 3
    )


def _largest(x: Array, kernel: Sequence[int]) -> Array:
    """The largest element of every window of ``x[kd, h, w, c]``, one plane: ``[h, w, c]``."""
    _, height, width = kernel
    planes = np.maximum.reduce(x, axis=0) if len(x) > 1 else x[0]
    rows = planes[::height].copy()
    for row in range(1, height):
        np.maximum(rows, planes[row::height], out=rows)
    found: Array = rows[:, ::width].copy()
    for column in range(1, width):
        np.maximum(found, rows[:, column::width], out=found)
    return found


def _parts(small: Array, kernel: Sequence[int]) -> Iterator[tuple[int, slice, slice, slice]]:
    """(plane and rows of the pooled value; the planes, the rows that these see) of a sample."""
    depth, height, width = kernel
    rows = max(SCRATCH_ELEMENTS // (height * width * prod(small.shape[2:])), 1)
    for place in range(len(small)):
        for first in range(0, small.shape[1], rows):
            last = min(first + rows, small.shape[1])
            planes = slice(place * depth, (place + 1) * depth)
            yield place, slice(first, last), planes, slice(first * height, last * height)


def max_pool(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """Max pooling with windows that lie side by side."""
    kernel = item.attrs["kernel_shape"]
    for sample, made in zip(args[0], out, strict=True):
        for place, mine, planes, rows in _parts(made, kernel):
            made[place, mine] = _largest(sample[planes, rows], kernel)


def max_pool_grad(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """The gradient goes to the first of the largest elements of a window."""
    depth, height, width = kernel = item.attrs["kernel_shape"]
    for sample, grad, made in zip(*args, out, strict=True):
        for place, mine, planes, rows in _parts(grad, kernel):
            x, dx = sample[planes, rows], made[planes, rows]
            largest = _largest(x, kernel)
            dy = np.ascontiguousarray(grad[place, mine])
            open_ = np.ones(largest.shape, bool)
            for tap in np.ndindex(depth, height, width):
                window = (tap[0], slice(tap[1], None, height), slice(tap[2], None, width))
                is_it = np.equal(np.ascontiguousarray(x[window]), largest)
                np.logical_and(is_it, open_, out=is_it)
                np.logical_xor(open_, is_it, out=open_)
                copy(np.multiply(dy, is_it), dx[window])


def on_numbered_axes(kernel: Kernel) -> Kernel:
    """A kernel of this module as one of arrays ``[n, c, *space]``, however these lie in memory."""

    def run(args: Sequence[Array], out: Array, item: Instruction) -> None:
        *seen, made = (np.moveaxis(array, 1, -1) for array in (*args, out))
        kernel(seen, made, item)

    return run
