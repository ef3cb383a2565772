"""Kernels of volumes with their channels last, for which onnxruntime has none: its own want planes.

They pool and convolve where windows lie side by side: then a window sees rows of the kernel's width times the
channels, and convolutions are matrix products. Arrays are ``[n, d, h, w, c]`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from oocdl.engines.convolution import Convolution, slide_of
from oocdl.engines.numpy_moves import copy
from oocdl.engines.ort.ort_record import Into, Orders
from oocdl.engines.ort.ort_session import run
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import crop_of, pads_of
from oocdl.graph.ir.program import Instruction

Kernel = Callable[[Sequence[Array], Array, Instruction], None]
"""(operands, where the result goes, instruction); the data among these have their channels last."""
POOLED_ELEMENTS = 1 << 16
"""Elements of a plane that are pooled at once."""
PRODUCT_ELEMENTS = 1 << 18
"""Elements of the windows that are multiplied at once."""


def with_channels_last(
    kernel: Kernel, item: Instruction, orders: Orders, kind: Convolution | None
) -> Into | None:
    """Return the kernel of an instruction that pads nothing, and all of whose data are volumes with their
    channels last; else None. ``kind``: a convolution also has weights."""
    if any(len(shape) != 5 for shape in (item.kernel_shapes[0], *(o.shape for o in item.operands))):
        return None
    slots = [operand.slot for operand in item.operands]
    places = range(len(slots)) if kind is None else kind.data
    made = () if kind is not None and kind.makes_weights else item.outputs
    if any(map(pads_of, item.operands)) or not orders.keys() >= {*(slots[place] for place in places), *made}:
        return None

    def into(args: list[Array], outs: list[Array]) -> None:
        seen = [np.moveaxis(array, 1, -1) if place in places else array for place, array in enumerate(args)]
        kernel(seen, np.moveaxis(outs[0], 1, -1) if made else outs[0], item)

    return into


def is_tiled(item: Instruction, large: Shape, small: Shape, kernel: Sequence[int]) -> bool:
    """Whether the windows of ``kernel`` lie side by side, all of them whole, and cover ``large``, the shape
    of what they see; ``small`` has one place for each window."""
    apart = item.dtypes[0] == "float32" and slide_of(item) == (tuple(kernel), (1,) * len(kernel), 1)
    covers = tuple(large[2:]) == tuple(n * k for n, k in zip(small[2:], kernel, strict=True))
    return apart and covers and not any(crop_of(item)) and prod(large) > 0


def _parts(small: Array, window: int, most: int) -> Iterator[tuple[int, int, slice]]:
    """(sample, plane, rows) of what has one place for each window of ``window`` elements, so few rows that
    their windows have at most ``most`` elements."""
    rows = max(most // (window * small.shape[3]), 1)
    for sample, plane, first in np.ndindex(*small.shape[:2], -(-small.shape[2] // rows)):
        yield sample, plane, slice(first * rows, min((first + 1) * rows, small.shape[2]))


def _seen(x: Array, kernel: Sequence[int], part: tuple[int, int, slice]) -> Array:
    """The planes and rows of ``x`` that the windows of a part see."""
    (sample, plane, rows), (depth, height, _) = part, kernel
    return x[sample, plane * depth : (plane + 1) * depth, rows.start * height : rows.stop * height]


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


def max_pool(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """Max pooling."""
    kernel = item.attrs["kernel_shape"]
    for part in _parts(out, prod(kernel[1:]) * out.shape[4], POOLED_ELEMENTS):
        out[part] = _largest(_seen(args[0], kernel, part), kernel)


def max_pool_grad(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """The gradient goes to the first of the largest elements of a window."""
    (whole, grad), (depth, height, width) = args, item.attrs["kernel_shape"]
    kernel = depth, height, width
    for part in _parts(grad, height * width * grad.shape[4], POOLED_ELEMENTS):
        x, dx = (_seen(array, kernel, part) for array in (whole, out))
        largest = _largest(x, kernel)
        dy = np.ascontiguousarray(grad[part])
        open_ = np.ones(largest.shape, bool)
        for tap in np.ndindex(kernel):
            window = (tap[0], slice(tap[1], None, height), slice(tap[2], None, width))
            is_it = np.equal(np.ascontiguousarray(x[window]), largest)
            np.logical_and(is_it, open_, out=is_it)
            np.logical_xor(open_, is_it, out=open_)
            copy(np.multiply(dy, is_it), dx[window])


def _tiles(x: Array, kernel: Sequence[int], part: tuple[int, int, slice]) -> Array:
    """The windows of a part, ``[h, w, kd, kh, kw * c]``, a view."""
    x = _seen(x, kernel, part)
    depth, height, width = kernel
    shape = (depth, x.shape[1] // height, height, x.shape[2] // width, width * x.shape[3])
    return np.reshape(x, shape, copy=False).transpose(1, 3, 0, 2, 4)


def _gathered(tiles: Array) -> Array:
    """Windows as rows of a matrix."""
    made = tiles
    if not tiles.flags.c_contiguous:
        made = np.empty(tiles.shape, np.float32)
        copy(tiles, made)
    return made.reshape(-1, prod(tiles.shape[2:]))


def convolve(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """Conv with ``w[o, c, d, h, w]``."""
    x, w = np.ascontiguousarray(args[0]), args[1]
    matrix = np.ascontiguousarray(w.transpose(2, 3, 4, 1, 0)).reshape(-1, len(w))
    for part in _parts(out, len(matrix), PRODUCT_ELEMENTS):
        seen = _gathered(_tiles(x, w.shape[2:], part))
        run("Gemm", [seen, matrix], [np.reshape(out[part], (len(seen), -1), copy=False)])


def spread(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """ConvTranspose with ``w[c, o, d, h, w]``."""
    x, w = np.ascontiguousarray(args[0]), args[1]
    matrix = np.ascontiguousarray(w.transpose(0, 2, 3, 4, 1)).reshape(len(w), -1)
    for part in _parts(x, matrix.shape[1], PRODUCT_ELEMENTS):
        seen = x[part].reshape(-1, len(w))
        made = np.empty((len(seen), matrix.shape[1]), np.float32)
        run("Gemm", [seen, matrix], [made])
        target = _tiles(out, w.shape[2:], part)
        copy(made.reshape(target.shape), target)


def weight_gradient(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """ConvWeightGrad, ``[o, c, d, h, w]``."""
    x, dy = map(np.ascontiguousarray, args)
    o, c, *kernel = out.shape
    total = np.zeros((c * prod(kernel), o), np.float32)
    for part in _parts(dy, len(total), PRODUCT_ELEMENTS):
        seen = _gathered(_tiles(x, kernel, part))
        run("Gemm", [seen, dy[part].reshape(-1, o), total], [total], transA=1)
    out[...] = total.reshape(*kernel, c, o).transpose(4, 3, 0, 1, 2)
