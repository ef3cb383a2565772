"""Convolutions of volumes at stride one in blocks of channels, plane by plane, as images (``blocks``).

The planes that a plane of the result sees are taken for further channels of one image: where they lie
one after the other, that costs nothing.
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

from oocdl.engines.convolution import Convolution, slide_of
from oocdl.engines.numpy_moves import copy
from oocdl.engines.ort import blocks
from oocdl.engines.ort.blocks import block, blocks_of
from oocdl.engines.ort.ort_record import Into, Orders
from oocdl.engines.ort.ort_windows import seen_by_transposed
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import Pads, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction

SCRATCH_BYTES = 2 << 20
"""Bytes of a plane of ``dy`` that are taken at once: with fewer rows there are too many calls."""

_MAX_PADDED_RATIO, _MAX_PADDED_GRADIENT_RATIO = 2.0, 1.6
"""Products made for each that is wanted, above which onnxruntime's Conv of volumes is faster; the same of
a gradient of weights."""


def in_blocks(kind: Convolution, item: Instruction, orders: Orders) -> Into | None:
    """Return the kernel of a convolution on blocks of channels; None where it is not faster."""
    if not (_is_plain(item) and block() > 1 and _pays(kind, item, orders)):
        return None
    if kind.makes_weights:
        pads = spatial_pads(item.operands[0])
        return lambda args, outs: _gradient(args[0], args[1], pads, outs[0])
    return partial(_convolutions, kind, item, item.operands[0].slot in orders)


def _is_plain(item: Instruction) -> bool:
    """Whether a convolution of a volume has strides and dilations of one, and pads only axes of space."""
    slide, (first, second) = slide_of(item), item.operands
    outer = first.pads is not None and any(any(pair) for pair in first.pads[:2])
    sizes = [prod(shape) for shape in (first.shape, second.shape, *item.kernel_shapes)]
    whole = len(item.kernel_shapes[0]) == 5 and slide.groups == 1 and item.dtypes[0] == "float32"
    plain = {*slide.strides, *slide.dilations} <= {1} and not outer and pads_of(second) is None
    return whole and plain and min(sizes) > 0


def _pays(kind: Convolution, item: Instruction, orders: Orders) -> bool:
    """Whether blocks are not padded too much; slots in ``orders`` have their channels last."""
    channels = item.operands[0].shape[1], kind.other_data(item)[1]
    gradient = kind.makes_weights
    data = [item.operands[0].slot, item.operands[1].slot if gradient else item.outputs[0]]
    if any(slot in orders and n % 4 for slot, n in zip(data, channels, strict=True)):
        return False  # not known to the operators that sort
    if prod(kind.weights(item)[2:]) == 1:
        # A matrix product where all has its channels last (``ort_channels_last``); else sorting counts.
        return not all(slot in orders for slot in data)
    # Few channels are not blocked, and the gradient takes rows for channels.
    alone = gradient or (data[0] not in orders and channels[0] <= 2)
    computed = prod(blocks_of(n) * block() / n for n in (channels[1:] if alone else channels))
    if gradient:
        height = item.operands[0].shape[3]
        computed *= blocks_of(height) * block() / height
    return computed <= (_MAX_PADDED_GRADIENT_RATIO if gradient else _MAX_PADDED_RATIO)


def _convolutions(
    kind: Convolution, item: Instruction, channels_last: bool, args: list[Array], outs: list[Array]
) -> None:
    """A convolution of samples one after the other; ``channels_last``: whether the operand lies so."""
    (x, w), pads = args, spatial_pads(item.operands[0])
    if kind.transposed:
        x, pads = seen_by_transposed(x, item)
        w = w.swapaxes(0, 1)[:, :, ::-1, ::-1, ::-1]
    if x.size == 0:
        outs[0][...] = 0
        return
    for sample, made in zip(x, outs[0], strict=True):
        _convolve(sample, w, pads, made, channels_last)


def _filters(w: Array, few: bool) -> Array:
    """``w[o, c, d, h, w]`` in blocks, ``[blocks of o, d, blocks of c, h, w, c, o]``.

    ``few``: c is not blocked, and its axes are ``c, h, w, o``.
    """
    b, (o, c, *taps) = block(), w.shape
    rows = c if few else blocks_of(c) * b
    whole = w
    if (blocks_of(o) * b, rows) != (o, c):
        whole = np.zeros((blocks_of(o) * b, rows, *taps), np.float32)
        whole[:o, :c] = w
    if few:
        return np.ascontiguousarray(whole.reshape(-1, b, c, *taps).transpose(0, 3, 2, 4, 5, 1))
    return np.ascontiguousarray(whole.reshape(-1, b, rows // b, b, *taps).transpose(0, 4, 2, 5, 6, 3, 1))


def _images(x: Array, channels_last: bool, planes: int) -> tuple[Array, bool]:
    """A sample ``[c, d, h, w]`` as images, a plane each, and whether these have so few channels that they are
    not blocked; ``planes`` of them are taken at once."""
    if channels_last:
        return blocks.sort_channels_last(np.ascontiguousarray(np.moveaxis(x, 0, -1))), False
    x = x.swapaxes(0, 1)
    if planes * x.shape[1] < block():
        return np.ascontiguousarray(x), True
    if more := -x.shape[1] % 4:  # not known to the operator that sorts
        x = np.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
    x = np.ascontiguousarray(x)
    made = np.empty((len(x), blocks_of(x.shape[1]) * block(), *x.shape[2:]), np.float32)
    blocks.sort_planes(x, made)
    return made, False


def _convolve(x: Array, w: Array, pads: Pads, out: Array, channels_last: bool) -> None:
    """The convolution of one sample ``[c, d, h, w]`` with ``w[o, c, d, h, w]``."""
    images, few = _images(x, channels_last, w.shape[2])
    weights, sides = _filters(w, few), (pads[1][0], pads[2][0], pads[1][1], pads[2][1])
    # A result whose channels lie side by side, but not all of it without gaps, is made elsewhere.
    last = np.moveaxis(out, 0, -1)
    is_last = last.flags.c_contiguous and len(out) % 4 == 0
    buffer = np.empty((1, len(weights) * block(), *out.shape[2:]), np.float32)
    for place in range(out.shape[1]):
        made = last[place : place + 1] if is_last and len(out) == block() else buffer
        low = place - pads[0][0]
        start, stop = max(-low, 0), min(len(images) - low, w.shape[2])
        if stop <= start:
            made[...] = 0
        else:
            seen = images[low + start : low + stop]
            seen = seen.reshape(1, -1, *seen.shape[2:])
            part = np.ascontiguousarray(weights[:, start:stop]).reshape(buffer.shape[1], -1, *w.shape[3:])
            blocks.convolve(seen, part, made.reshape(buffer.shape), w.shape[3:], sides)
        if made is not buffer:
            continue
        if is_last:
            blocks.unsort(buffer, last[place : place + 1], True)
        else:
            plane = np.empty((1, len(out), *out.shape[2:]), np.float32)
            blocks.unsort(buffer, plane, False)
            out[:, place] = plane[0]


def _gradient(x: Array, dy: Array, pads: Pads, out: Array) -> None:
    """The sum over places of ``x[place + tap, c] dy[place, o]``, samples one after the other.

    A block of rows of ``x`` is taken for channels, its columns with their channels for the columns
    of an image, and as many rows of ``dy`` for the filters: all columns of the kernel and all of
    its rows (for which there is a copy of the filters each) come out at once.
    """
    b, (o, c, depth, height, width) = block(), out.shape
    total = np.zeros((blocks_of(o), depth, height * b, 1, width * c), np.float32)
    columns = dy.shape[4]
    most = max(min(SCRATCH_BYTES, dy[0].nbytes) // (4 * b * b * height * columns), 1)
    rows = -(-blocks_of(x.shape[3]) // -(-blocks_of(x.shape[3]) // most)) * b
    for sample, change in zip(np.moveaxis(x, 1, -1), np.moveaxis(dy, 1, -1), strict=True):
        for first in range(0, x.shape[3], rows):
            count = min(rows, blocks_of(x.shape[3] - first) * b)
            _add_rows(sample, change, pads, total, out.shape, first, count)
    # In memory: blocks of o, d, h, (w, c), o.
    parts = total.reshape(-1, depth, height, width, c, b).transpose(0, 5, 4, 1, 2, 3)
    out[...] = parts.reshape(-1, *out.shape[1:])[:o]


def _add_rows(x: Array, dy: Array, pads: Pads, total: Array, shape: Shape, first: int, rows: int) -> None:
    """Add the products of ``rows`` rows of ``x[d, h, w, c]`` from ``first`` on to the sums of a gradient of
    ``shape``."""
    _, c, depth, height, width = shape
    columns = dy.shape[2]
    images = _row_images(x, first, rows, columns + width - 1, pads[2][0])
    padded = np.zeros((rows + height - 1, columns, block()), np.float32)
    filters = np.empty((height, rows // block(), columns, block(), block()), np.float32)
    for place in range(len(dy)):
        low = place - pads[0][0]
        start, stop = max(-low, 0), min(len(x) - low, depth)
        if stop <= start:
            continue
        for part in range(len(total)):
            _sort_filters(dy[place], part, first + pads[1][0], padded, filters)
            seen, w = images[low + start : low + stop], filters.reshape(height * block(), rows, 1, -1)
            blocks.convolve(seen, w, total[part, start:stop], (1, columns), dilations=(1, c), adds=True)


def _row_images(x: Array, first: int, rows: int, columns: int, left: int) -> Array:
    """Rows of ``x`` as blocks of channels, plane by plane; zeros where there is padding."""
    planes, height, width, c = x.shape
    there = min(rows, height - first)
    padded = np.zeros((1, rows, 1, columns * c), np.float32)
    inside = padded.reshape(rows, columns, c)[:there, left : left + width]
    made = np.empty((planes, rows, 1, columns * c), np.float32)
    for place in range(planes):
        inside[...] = x[place, first : first + there]
        blocks.sort_planes(padded, made[place : place + 1])
    return made


def _sort_filters(dy: Array, part: int, first: int, padded: Array, filters: Array) -> None:
    """A block of channels of a plane of ``dy[h, w, o]``, shifted by every row of the kernel.

    ``padded``: rows that ``filters`` see, the last of the first filter at ``first``; zeros stay where ``dy``
    has nothing.
    """
    b, height = block(), len(filters)
    mine = dy[..., part * b : (part + 1) * b]
    low = first - (height - 1)
    start, stop = max(-low, 0), min(len(dy) - low, len(padded))
    if mine.shape[-1] < b:
        padded[...] = 0
    if stop > start:
        copy(mine[low + start : low + stop], padded[start:stop, :, : mine.shape[-1]])
    rows = len(padded) - height + 1
    for row in range(height):
        shifted = padded[height - 1 - row : height - 1 - row + rows]
        blocks.interleave(shifted.reshape(rows // b, b, -1, b), filters[row])
