"""Convolutions, their gradients and pooling by standard operators of onnxruntime.

The measurements behind each choice are in `docs/explanation/kernel-measurements.md`, sections 2 to 4:
never im2col, never ConvTranspose at stride one (which makes an im2col inside).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from oocdl.engines.convolution import Slide, clipped, flipped_pads, slide_of
from oocdl.engines.numpy_moves import boxed, padded
from oocdl.engines.ort.ort_session import run
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import Pads, aligned, crop_of, is_empty, spatial_pads
from oocdl.graph.ir.program import Instruction

_LOWEST = np.nextafter(np.finfo(np.float32).min, np.float32(0))
"""Just above the number from which onnxruntime's MaxPool starts to look for a larger one."""


def _first(args: Sequence[Array], item: Instruction) -> tuple[Array, Pads]:
    """Operand 0, and its spatial padding where that may be left to the operator."""
    operand = item.operands[0]
    outer = operand.pads is not None and any(any(pair) for pair in operand.pads[:2])
    if outer or is_empty(operand):
        return padded(args[0], operand, item.fill), ((0, 0),) * (len(operand.shape) - 2)
    return args[0], spatial_pads(operand)


def _turned(x: Array, perm: Sequence[int]) -> Array:
    """``x`` with its axes in another order, without gaps."""
    view = x.transpose(perm)
    if view.flags.c_contiguous:
        return view
    made = np.empty(view.shape, x.dtype)
    run("Transpose", [x], [made], perm=tuple(perm))
    return made


def _convolve(x: Array, w: Array, pads: Pads, slide: Slide, out: Array | None = None) -> Array:
    """An ONNX Conv without bias; of one tap a product of matrices, which takes the weights as they lie."""
    if out is None:
        rows = zip(x.shape[2:], pads, w.shape[2:], slide.strides, slide.dilations, strict=True)
        space = [(n + b + a - dilation * (k - 1) - 1) // step + 1 for n, (b, a), k, step, dilation in rows]
        out = np.empty((x.shape[0], w.shape[0], *space), x.dtype)
    if {*slide.strides, slide.groups, prod(w.shape[2:])} == {1} and not any(map(any, pads)):
        places = np.reshape(out, (*out.shape[:2], -1), copy=False)
        np.matmul(aligned(w.reshape(w.shape[:2])), aligned(x.reshape(*x.shape[:2], -1)), out=places)
    else:
        _slide("Conv", [x, w], [out], w.shape[2:], pads, slide, group=slide.groups)
    return out


def _slide(
    op: str, args: list[Array], results: list[Array], kernel: Shape, pads: Pads, slide: Slide, **attrs: Any
) -> None:
    """An operator with sliding windows; its pads are all begins, then all ends."""
    sides = (*(before for before, _ in pads), *(after for _, after in pads))
    attrs |= {"strides": slide.strides, "dilations": slide.dilations}
    run(op, args, results, kernel_shape=tuple(kernel), pads=sides, **attrs)


def conv(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """Conv, whose operand it pads as ONNX can."""
    (x, pads), w = _first(args, item), padded(args[1], item.operands[1], item.fill)
    if x.size == 0:
        out[...] = 0
    else:
        _convolve(x, w, pads, slide_of(item), out)


def conv_transpose(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """The wanted box of a transposed convolution."""
    x, w = args[0], padded(args[1], item.operands[1], item.fill)
    if x.size == 0:
        out[...] = 0
    else:
        make = _transposed_by_conv if set(slide_of(item).strides) <= {1} else _transposed_by_op
        make(x, w, item, out)


def seen_by_transposed(x: Array, item: Instruction) -> tuple[Array, Pads]:
    """Return the part of its operand that a ConvTranspose at stride one reads, and the padding around it."""
    box, pads = clipped(x.shape[2:], flipped_pads(item))
    inside: tuple[Any, ...] = (..., *(slice(start, max(stop, 0)) for start, stop in box))
    return x[inside], pads


def _transposed_by_conv(x: Array, w: Array, item: Instruction, out: Array) -> None:
    """Stride one: a Conv with the weights flipped and their channels exchanged, group by group."""
    (x, pads), slide = seen_by_transposed(x, item), slide_of(item)
    if x.size == 0:
        out[...] = 0
        return
    split = w.reshape(slide.groups, -1, *w.shape[1:]).swapaxes(1, 2)
    flipped = np.flip(split.reshape(-1, split.shape[2], *w.shape[2:]), tuple(range(2, w.ndim)))
    _convolve(x, flipped, pads, slide, out)


def _transposed_by_op(x: Array, w: Array, item: Instruction, out: Array) -> None:
    """ConvTranspose, whose pads cut its result; zeros around what it does not reach."""
    slide, (_, _, *crop) = slide_of(item), crop_of(item)
    pads, extra, inside = [], [], [slice(None), slice(None)]
    rows = zip(spatial_pads(item.operands[0]), crop, x.shape[2:], w.shape[2:], out.shape[2:], strict=True)
    for ((before, _), place, have, taps, extent), stride, dilation in zip(rows, *slide[:2], strict=True):
        full = (have - 1) * stride + dilation * (taps - 1) + 1
        # Zeros before the operand only move the result.
        start = place - before * stride
        stop = start + extent
        if stop <= 0 or start >= full:
            out[...] = 0
            return
        pads.append((max(start, 0), max(full - stop, 0)))
        short = max(stop - full, 0)
        extra.append(min(short, stride - 1))
        inside.append(slice(max(-start, 0), extent - short + extra[-1]))
    made = out[tuple(inside)]
    if made.shape != out.shape:
        out[...] = 0
    more = {"output_padding": tuple(extra), "group": slide.groups}
    _slide("ConvTranspose", [x, w], [made], w.shape[2:], tuple(pads), slide, **more)


def _fold(image: Array, kernel: Array, pads: Pads, slide: Slide) -> Array:
    """``sum over n, d of image[n, c, stride d + dilation z] kernel[n, o, d]``, by one Conv.

    The batch is the Conv's channel axis, the channels of the image are folded into its
    last axis: with a dilation of that many, one Conv makes all kernel positions of
    all channels as columns of one matrix product, without an im2col. Axes o, c, z.
    """
    rank, channels, (strides, dilations, _) = len(pads), image.shape[1], slide
    spatial = range(2, rank + 2)
    folded = _turned(image, [0, *spatial, 1])
    folded = folded.reshape(1, *folded.shape[:-2], image.shape[-1] * channels)
    wide = (*pads[:-1], (pads[-1][0] * channels, pads[-1][1] * channels))
    filters = _turned(kernel, [1, 0, *spatial])
    # The last axis cannot step over positions, only over channels: it is thinned out after.
    exchanged = Slide((*dilations[:-1], 1), (*strides[:-1], strides[-1] * channels))
    out = _convolve(folded, filters, wide, exchanged)
    out = out.reshape(*out.shape[1:-1], out.shape[-1] // channels, channels)
    return np.moveaxis(out[..., :: dilations[-1], :], -1, 1)


def conv_weight_grad(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """The gradient of a convolution's weights."""
    (x, pads), dy = _first(args, item), padded(args[1], item.operands[1], item.fill)
    kernel, slide = out.shape[2:], slide_of(item)
    reach = [dilation * (k - 1) for dilation, k in zip(slide.dilations, kernel, strict=True)]
    other = tuple((r - b, r - a) for r, (b, a) in zip(reach, pads, strict=True))
    within = all(min(pair) >= 0 for pair in other)
    if 0 in (*x.shape, *dy.shape):
        out[...] = 0
    elif slide.groups > 1:
        out[...] = _by_group(x, dy, pads, slide)
    elif prod(kernel) == 1:
        out[...] = _pointwise_weight_grad(x, dy, pads, slide.strides).reshape(out.shape)
    elif x.shape[1] > dy.shape[1] and within and set(slide.strides) <= {1}:
        # The wider operand serves as the kernel: positions come out in reverse.
        out[...] = np.flip(_fold(dy, x, other, slide).swapaxes(0, 1), tuple(range(2, out.ndim)))
    else:
        out[...] = _fold(x, dy, pads, slide)


def _by_group(x: Array, dy: Array, pads: Pads, slide: Slide) -> Array:
    """The gradient of weights by one Conv, whose batch is the channels of a group, and whose windows are all
    places of ``dy``."""
    batch, channels, spatial = x.shape[0], x.shape[1] // slide.groups, x.shape[2:]
    x = x.reshape(batch, slide.groups, channels, *spatial)
    x = _turned(x, [2, 1, 0, *range(3, x.ndim)]).reshape(channels, slide.groups * batch, *spatial)
    exchanged = Slide(slide.dilations, slide.strides, slide.groups)
    return _convolve(x, dy.swapaxes(0, 1), pads, exchanged).swapaxes(0, 1)


def _pointwise_weight_grad(x: Array, dy: Array, pads: Pads, strides: Sequence[int]) -> Array:
    """A kernel of one element: a matrix product of each sample."""
    x = np.pad(x, [(0, 0), (0, 0), *pads]) if any(map(any, pads)) else x
    steps: tuple[Any, ...] = (..., *(slice(None, None, stride) for stride in strides))
    x = x[steps]
    columns, rows = (aligned(array.reshape(*array.shape[:2], -1)) for array in (x, dy))
    product: Array = np.matmul(rows, columns.swapaxes(1, 2)).sum(0)
    return product


def max_pool(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """MaxPool."""
    x, pads = _first(args, item)
    kernel, slide = item.attrs["kernel_shape"], slide_of(item)
    if any(max(pair) >= k for pair, k in zip(pads, kernel, strict=True)):
        # onnxruntime refuses windows that see nothing but padding.
        x, pads = padded(args[0], item.operands[0], item.fill), ((0, 0),) * len(pads)
    _slide("MaxPool", [x], [out], kernel, pads, slide)


def max_pool_grad(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """The gradient of MaxPool, by the indices that it finds."""
    dy = padded(args[1], item.operands[1], 0.0)  # a window that does not exist has no gradient
    x = padded(args[0], item.operands[0], _LOWEST)
    # MaxPool finds no index in a window of minus infinities, so there are none.
    x = np.maximum(x, _LOWEST, out=None if x is args[0] else x)
    places, shape = np.empty(dy.shape, np.int64), x.shape
    results, pads = [np.empty(dy.shape, x.dtype), places], ((0, 0),) * (dy.ndim - 2)
    _slide("MaxPool", [x], results, item.attrs["kernel_shape"], pads, slide_of(item))
    del results
    # Nor in a window of NaNs; what becomes of those does not matter, as long as it is inside.
    np.maximum(places, 0, out=places)
    del x
    dx = np.zeros(prod(shape), dy.dtype)
    np.add.at(dx, places.ravel(), dy.ravel())
    boxed(dx.reshape(shape), item, out)
