"""Convolutions, their gradients and pooling as standard ONNX operators.

The measurements behind each choice are in `docs/explanation/kernel-measurements.md`, sections 2 to 4:
never im2col, never ConvTranspose at stride one (which makes an im2col inside).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from oocdl.engines.convolution import groups_of
from oocdl.engines.ort.emit import Emitter, Val
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import Pads, crop_of, is_empty, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction, padded_shape

_LOWEST = float(np.nextafter(np.finfo(np.float32).min, np.float32(0)))
"""Just above the number from which onnxruntime's MaxPool starts to look for a larger one."""


def _padded(emit: Emitter, args: list[Val], instruction: Instruction, index: int, fill: float) -> Val:
    pads = pads_of(instruction.operands[index])
    return args[index] if pads is None else emit.pad(args[index], pads, fill)


def _first(emit: Emitter, args: list[Val], instruction: Instruction) -> tuple[Val, Pads]:
    """Operand 0, and its spatial padding where that may be left to the operator."""
    operand = instruction.operands[0]
    outer = operand.pads is not None and any(any(pair) for pair in operand.pads[:2])
    if outer or is_empty(operand):
        return _padded(emit, args, instruction, 0, instruction.fill), ((0, 0),) * (len(operand.shape) - 2)
    return args[0], spatial_pads(operand)


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Begins, then ends."""
    return [before for before, _ in pads] + [after for _, after in pads]


@dataclass(frozen=True)
class _Windows:
    """Pads, strides and dilations of windows for each spatial axis, and the number of channel groups."""

    pads: Sequence[tuple[int, int]]
    strides: Sequence[int]
    dilations: Sequence[int]
    groups: int = 1


def _windows(item: Instruction, pads: Sequence[tuple[int, int]]) -> _Windows:
    """The windows of an instruction; strides and dilations are ones where they are left out."""
    strides, dilations = (item.attrs.get(name) or (1,) * len(pads) for name in ("strides", "dilations"))
    return _Windows(pads, list(strides), list(dilations), groups_of(item))


def _convolve(emit: Emitter, x: Val, w: Val, windows: _Windows) -> Val:
    """An ONNX Conv without bias."""
    rows = zip(x.shape[2:], windows.pads, w.shape[2:], windows.strides, windows.dilations, strict=True)
    spatial = [(n + b + a - dilation * (k - 1) - 1) // stride + 1 for n, (b, a), k, stride, dilation in rows]
    shape = (x.shape[0], w.shape[0], *spatial)
    return emit.node(
        "Conv",
        [x, w],
        shape,
        kernel_shape=list(w.shape[2:]),
        pads=_flat(windows.pads),
        strides=list(windows.strides),
        dilations=list(windows.dilations),
        group=windows.groups,
    )


def conv(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Conv, whose operand it pads as ONNX can."""
    x, pads = _first(emit, args, instruction)
    w = _padded(emit, args, instruction, 1, instruction.fill)
    if prod(x.shape) == 0:
        return [emit.full(instruction.kernel_shapes[0], 0.0, x.dtype)]
    return [_convolve(emit, x, w, _windows(instruction, pads))]


def conv_transpose(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The wanted box of a transposed convolution."""
    x, w = args[0], _padded(emit, args, instruction, 1, instruction.fill)
    if prod(x.shape) == 0:
        return [emit.full(instruction.kernel_shapes[0], 0.0, x.dtype)]
    windows = _windows(instruction, spatial_pads(instruction.operands[0]))
    build = _transposed_by_conv if set(windows.strides) <= {1} else _transposed_by_op
    return [build(emit, x, w, windows, instruction)]


def seen_by_transposed(item: Instruction) -> tuple[list[tuple[int, int]], Pads]:
    """The box of its operand that a ConvTranspose at stride one sees, and the padding of that.

    The box is empty along an axis where nothing is seen.

    Output i sees inputs i + crop - reach to i + crop: that is what pads must supply, or a
    slice drop where they would be negative.
    """
    box, pads = [], []
    windows, (data, weights) = _windows(item, spatial_pads(item.operands[0])), item.operands
    taps = zip(padded_shape(weights)[2:], windows.dilations, strict=True)
    wanted = zip(crop_of(item)[2:], item.kernel_shapes[0][2:], strict=True)
    rows = zip(wanted, windows.pads, data.shape[2:], taps, strict=True)
    for (start, extent), (before, _), have, (count, dilation) in rows:
        # Zeros before the operand only move the result.
        low, high = start - before - dilation * (count - 1), start - before + extent
        first = max(low, 0)
        last = max(min(high, have), first)
        box.append((first, last))
        pads.append((first - low, high - last))
    return box, tuple(pads)


def _transposed_by_conv(emit: Emitter, x: Val, w: Val, windows: _Windows, item: Instruction) -> Val:
    """Stride one: a Conv with the weights flipped and their channels exchanged, group by group."""
    box, pads = seen_by_transposed(item)
    if any(first == last for first, last in box):
        return emit.full(item.kernel_shapes[0], 0.0, x.dtype)
    groups, axes, taps = windows.groups, range(2, len(w.shape)), w.shape[2:]
    split = emit.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))
    exchanged = emit.transpose(split, [0, 2, 1, *range(3, len(split.shape))])
    flipped = emit.flip(emit.reshape(exchanged, (groups * w.shape[1], split.shape[1], *taps)), axes)
    seen = emit.slice(x, [*((0, n) for n in x.shape[:2]), *box])
    return _convolve(emit, seen, flipped, replace(windows, pads=pads))


def _transposed_by_op(emit: Emitter, x: Val, w: Val, windows: _Windows, item: Instruction) -> Val:
    """ConvTranspose, whose pads cut its result; zeros around what it does not reach."""
    shape = item.kernel_shapes[0]
    pads, extra, outer = [], [], [(0, 0), (0, 0)]
    for axis, stride in enumerate(windows.strides, start=2):
        reach = windows.dilations[axis - 2] * (w.shape[axis] - 1)
        full = (x.shape[axis] - 1) * stride + reach + 1
        # Zeros before the operand only move the result.
        start = crop_of(item)[axis] - windows.pads[axis - 2][0] * stride
        stop = start + shape[axis]
        if stop <= 0 or start >= full:
            return emit.full(shape, 0.0, x.dtype)
        pads.append((max(start, 0), max(full - stop, 0)))
        short = max(stop - full, 0)
        extra.append(min(short, stride - 1))
        outer.append((max(-start, 0), short - extra[-1]))
    result = emit.node(
        "ConvTranspose",
        [x, w],
        tuple(n - sum(around) for n, around in zip(shape, outer, strict=True)),
        kernel_shape=list(w.shape[2:]),
        pads=_flat(pads),
        strides=windows.strides,
        dilations=windows.dilations,
        output_padding=extra,
        group=windows.groups,
    )
    return emit.pad(result, outer)


def _fold(emit: Emitter, image: Val, kernel: Val, windows: _Windows) -> Val:
    """``sum over n, d of image[n, c, stride d + dilation z] kernel[n, o, d]``, by one Conv.

    The batch is the Conv's channel axis, the channels of the image are folded into its
    last axis: with a dilation of that many, one Conv makes all kernel positions of
    all channels as columns of one matrix product, without an im2col. Axes o, c, z.
    """
    pads, strides, dilations = windows.pads, windows.strides, windows.dilations
    rank, channels = len(pads), image.shape[1]
    spatial = range(2, rank + 2)
    folded = emit.transpose(image, [0, *spatial, 1])
    folded = emit.reshape(folded, [1, *folded.shape[:-2], image.shape[-1] * channels])
    wide = [*pads[:-1], (pads[-1][0] * channels, pads[-1][1] * channels)]
    filters = emit.transpose(kernel, [1, 0, *spatial])
    # The last axis cannot step over positions, only over channels: it is thinned out after.
    steps, spread = [*dilations[:-1], 1], [*strides[:-1], strides[-1] * channels]
    out = _convolve(emit, folded, filters, _Windows(wide, steps, spread))
    shape = (*out.shape[1:-1], out.shape[-1] // channels, channels)
    out = emit.reshape(out, shape)
    out = emit.slice(out, [(0, n) for n in shape], [1] * rank + [dilations[-1], 1])
    return emit.transpose(out, [0, rank + 1, *range(1, rank + 1)])


def conv_weight_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The gradient of a convolution's weights."""
    x, pads = _first(emit, args, instruction)
    dy = _padded(emit, args, instruction, 1, instruction.fill)
    if 0 in (*x.shape, *dy.shape):
        return [emit.full(instruction.kernel_shapes[0], 0.0, x.dtype)]
    kernel, windows = instruction.kernel_shapes[0][2:], _windows(instruction, pads)
    if windows.groups > 1:
        return [_by_group(emit, x, dy, windows)]
    if prod(kernel) == 1:
        return [_pointwise_weight_grad(emit, x, dy, windows)]
    reach = [dilation * (k - 1) for dilation, k in zip(windows.dilations, kernel, strict=True)]
    other = [(r - b, r - a) for r, (b, a) in zip(reach, pads, strict=True)]
    within = all(min(pair) >= 0 for pair in other)
    if x.shape[1] > dy.shape[1] and within and set(windows.strides) <= {1}:
        # The wider operand serves as the kernel: positions come out in reverse.
        swapped = _fold(emit, dy, x, replace(windows, pads=other))
        axes = range(2, len(x.shape))
        return [emit.flip(emit.transpose(swapped, [1, 0, *axes]), axes)]
    return [_fold(emit, x, dy, windows)]


def _by_group(emit: Emitter, x: Val, dy: Val, windows: _Windows) -> Val:
    """The gradient of weights by one Conv, whose batch is the channels of a group, and whose windows are all
    places of ``dy``."""
    batch, channels, spatial = x.shape[0], x.shape[1] // windows.groups, x.shape[2:]
    axes = range(2, len(x.shape))
    x = emit.reshape(x, (batch, windows.groups, channels, *spatial))
    x = emit.transpose(x, [2, 1, 0, *range(3, len(x.shape))])
    x = emit.reshape(x, (channels, windows.groups * batch, *spatial))
    filters = emit.transpose(dy, [1, 0, *axes])
    exchanged = replace(windows, strides=windows.dilations, dilations=windows.strides)
    return emit.transpose(_convolve(emit, x, filters, exchanged), [1, 0, *axes])


def _pointwise_weight_grad(emit: Emitter, x: Val, dy: Val, windows: _Windows) -> Val:
    """A kernel of one element: one matrix product."""
    x = emit.pad(x, [(0, 0), (0, 0), *windows.pads])
    x = emit.slice(x, [(0, n) for n in x.shape], [1, 1, *windows.strides])
    batch, channels, filters, size = *x.shape[:2], dy.shape[1], prod(dy.shape[2:])
    columns = emit.transpose(emit.reshape(x, (batch, channels, size)), [0, 2, 1])
    product = emit.matmul(emit.reshape(dy, (batch, filters, size)), columns)
    return emit.reshape(emit.sum(product, [0]), (filters, channels, *[1] * len(windows.pads)))


def _max_pool(
    emit: Emitter, x: Val, item: Instruction, windows: _Windows, *made: tuple[Shape, str]
) -> list[Val]:
    return emit.many(
        "MaxPool",
        [x],
        made,
        kernel_shape=list(item.attrs["kernel_shape"]),
        pads=_flat(windows.pads),
        strides=windows.strides,
        dilations=windows.dilations,
    )


def max_pool(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """MaxPool."""
    x, pads = _first(emit, args, instruction)
    kernel = instruction.attrs["kernel_shape"]
    if any(max(pair) >= k for pair, k in zip(pads, kernel, strict=True)):
        # onnxruntime refuses windows that see nothing but padding.
        x, pads = _padded(emit, args, instruction, 0, instruction.fill), ((0, 0),) * len(pads)
    return _max_pool(
        emit, x, instruction, _windows(instruction, pads), (instruction.kernel_shapes[0], x.dtype)
    )


def max_pool_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The gradient of MaxPool, by the indices that it finds."""
    dy = _padded(emit, args, instruction, 1, 0.0)  # a window that does not exist has no gradient
    # MaxPool finds no index in a window of minus infinities, so there are none.
    x = emit("Max", args[0], _LOWEST)
    pads = pads_of(instruction.operands[0])
    x = x if pads is None else emit.pad(x, pads, _LOWEST)
    windows = _windows(instruction, ((0, 0),) * (len(dy.shape) - 2))
    found = _max_pool(emit, x, instruction, windows, (dy.shape, x.dtype), (dy.shape, "int64"))[1]
    # Nor in a window of NaNs; what becomes of those does not matter, as long as it is inside.
    found = emit("Max", found, 0)
    count, total = prod(dy.shape), prod(x.shape)
    zeros = emit.full((total,), 0.0, x.dtype)
    flat = [emit.reshape(found, (count,)), emit.reshape(dy, (count,))]
    dx = emit.node("ScatterElements", [zeros, *flat], (total,), axis=0, reduction="add")
    dx = emit.reshape(dx, x.shape)
    return [emit.take(dx, crop_of(instruction), instruction.kernel_shapes[0])]
