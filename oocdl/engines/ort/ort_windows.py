"""Convolutions, their gradients and pooling as standard ONNX operators.

The measurements behind each choice are in `docs/explanation/kernel-measurements.md`, sections 2 to 4:
never im2col, never ConvTranspose at stride one (which makes an im2col inside).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from oocdl.engines.convolution import groups_of
from oocdl.engines.ort.emit import Emitter, Val
from oocdl.graph.ir.operands import Pads, crop_of, is_empty, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction

_LOWEST = float(np.nextafter(np.finfo(np.float32).min, np.float32(0)))
"""Just above the number from which onnxruntime's MaxPool starts to look for a larger one."""


def _ints(instruction: Instruction, name: str, rank: int) -> list[int]:
    """An attribute with one number for each axis; ones where it is left out."""
    return list(instruction.attrs.get(name) or (1,) * rank)


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


def convolve(
    emit: Emitter,
    x: Val,
    w: Val,
    pads: Sequence[tuple[int, int]],
    strides: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
) -> Val:
    """An ONNX Conv without bias."""
    spatial = [
        (n + b + a - dilation * (k - 1) - 1) // stride + 1
        for n, (b, a), k, stride, dilation in zip(
            x.shape[2:], pads, w.shape[2:], strides, dilations, strict=True
        )
    ]
    return emit.node(
        "Conv",
        [x, w],
        (x.shape[0], w.shape[0], *spatial),
        kernel_shape=list(w.shape[2:]),
        pads=_flat(pads),
        strides=list(strides),
        dilations=list(dilations),
        group=groups,
    )


def conv(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Conv, whose operand it pads as ONNX can."""
    x, pads = _first(emit, args, instruction)
    w = _padded(emit, args, instruction, 1, instruction.fill)
    rank = len(pads)
    strides, dilations = (_ints(instruction, name, rank) for name in ("strides", "dilations"))
    return [convolve(emit, x, w, pads, strides, dilations, groups_of(instruction))]


def conv_transpose(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The wanted box of a transposed convolution."""
    shape = instruction.kernel_shapes[0]
    x, w = args[0], _padded(emit, args, instruction, 1, instruction.fill)
    rank = len(shape) - 2
    if prod(x.shape) == 0:
        return [emit.full(shape, 0.0, x.dtype)]
    strides, dilations = (_ints(instruction, name, rank) for name in ("strides", "dilations"))
    # Zeros before the operand only move the result.
    pads = spatial_pads(instruction.operands[0])
    crop = [c - b * s for c, (b, _), s in zip(crop_of(instruction)[2:], pads, strides, strict=True)]
    build = _transposed_by_conv if all(s == 1 for s in strides) else _transposed_by_op
    return [build(emit, x, w, crop, list(shape[2:]), strides, dilations, groups_of(instruction))]


def _transposed_by_conv(
    emit: Emitter,
    x: Val,
    w: Val,
    crop: list[int],
    extents: list[int],
    strides: list[int],
    dilations: list[int],
    groups: int,
) -> Val:
    """Stride one: a Conv with the weights flipped and their channels exchanged, group by group.

    Output i sees inputs i + crop - reach to i + crop: that is what pads must supply, or a
    slice drop where they would be negative.
    """
    ranges, pads, out = [(0, n) for n in x.shape[:2]], [], w.shape[1]
    for axis, (start, extent, dilation) in enumerate(zip(crop, extents, dilations, strict=True)):
        have, reach = x.shape[axis + 2], dilation * (w.shape[axis + 2] - 1)
        low, high = start - reach, start + extent
        first, last = max(low, 0), min(high, have)
        if last <= first:
            return emit.full((x.shape[0], groups * out, *extents), 0.0, x.dtype)
        ranges.append((first, last))
        pads.append((first - low, high - last))
    axes, taps = range(2, len(w.shape)), w.shape[2:]
    w = emit.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))
    exchanged = emit.transpose(w, [0, 2, 1, *range(3, len(w.shape))])
    flipped = emit.flip(emit.reshape(exchanged, (groups * out, w.shape[1], *taps)), axes)
    return convolve(emit, emit.slice(x, ranges), flipped, pads, strides, dilations, groups)


def _transposed_by_op(
    emit: Emitter,
    x: Val,
    w: Val,
    crop: list[int],
    extents: list[int],
    strides: list[int],
    dilations: list[int],
    groups: int,
) -> Val:
    """ConvTranspose, whose pads cut its result; zeros around what it does not reach."""
    pads, extra, outer, spatial = [], [], [(0, 0), (0, 0)], []
    for axis, (start, extent) in enumerate(zip(crop, extents, strict=True)):
        stride = strides[axis]
        full = (x.shape[axis + 2] - 1) * stride + dilations[axis] * (w.shape[axis + 2] - 1) + 1
        stop = start + extent
        if stop <= 0 or start >= full:
            return emit.full((x.shape[0], groups * w.shape[1], *extents), 0.0, x.dtype)
        pads.append((max(start, 0), max(full - stop, 0)))
        short = max(stop - full, 0)
        extra.append(min(short, stride - 1))
        outer.append((max(-start, 0), short - extra[-1]))
        spatial.append(extent - sum(outer[-1]))
    result = emit.node(
        "ConvTranspose",
        [x, w],
        (x.shape[0], groups * w.shape[1], *spatial),
        kernel_shape=list(w.shape[2:]),
        pads=_flat(pads),
        strides=strides,
        dilations=dilations,
        output_padding=extra,
        group=groups,
    )
    return emit.pad(result, outer)


def fold(
    emit: Emitter,
    image: Val,
    kernel: Val,
    pads: Sequence[tuple[int, int]],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Val:
    """``sum over n, d of image[n, c, stride d + dilation z] kernel[n, o, d]``, by one Conv.

    The batch is the Conv's channel axis, the channels of the image are folded into its
    last axis: with a dilation of that many, one Conv makes all kernel positions of
    all channels as columns of one matrix product, without an im2col. Axes o, c, z.
    """
    rank, channels = len(pads), image.shape[1]
    spatial = range(2, rank + 2)
    last = image.shape[-1] * channels
    folded = emit.transpose(image, [0, *spatial, 1])
    folded = emit.reshape(folded, [1, image.shape[0], *image.shape[2:-1], last])
    wide = [*pads[:-1], (pads[-1][0] * channels, pads[-1][1] * channels)]
    filters = emit.transpose(kernel, [1, 0, *spatial])
    # The last axis cannot step over positions, only over channels: it is thinned out after.
    steps = [*dilations[:-1], 1]
    out = convolve(emit, folded, filters, wide, steps, [*strides[:-1], strides[-1] * channels])
    shape = (*out.shape[1:-1], out.shape[-1] // channels, channels)
    out = emit.reshape(out, shape)
    out = emit.slice(out, [(0, n) for n in shape], [1] * rank + [dilations[-1], 1])
    return emit.transpose(out, [0, rank + 1, *range(1, rank + 1)])


def conv_weight_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The gradient of a convolution's weights."""
    x, pads = _first(emit, args, instruction)
    dy = _padded(emit, args, instruction, 1, instruction.fill)
    kernel = instruction.kernel_shapes[0][2:]
    rank = len(kernel)
    strides, dilations = (_ints(instruction, name, rank) for name in ("strides", "dilations"))
    if groups_of(instruction) > 1:
        return [_by_group(emit, x, dy, pads, strides, dilations, groups_of(instruction))]
    if prod(kernel) == 1:
        return [_pointwise_weight_grad(emit, x, dy, pads, strides)]
    reach = [dilation * (k - 1) for dilation, k in zip(dilations, kernel, strict=True)]
    other = [(r - b, r - a) for r, (b, a) in zip(reach, pads, strict=True)]
    within = all(min(pair) >= 0 for pair in other)
    if x.shape[1] > dy.shape[1] and within and all(s == 1 for s in strides):
        # The wider operand serves as the kernel: positions come out in reverse.
        swapped = fold(emit, dy, x, other, strides, dilations)
        axes = range(2, rank + 2)
        return [emit.flip(emit.transpose(swapped, [1, 0, *axes]), axes)]
    return [fold(emit, x, dy, pads, strides, dilations)]


def _by_group(
    emit: Emitter,
    x: Val,
    dy: Val,
    pads: Sequence[tuple[int, int]],
    strides: list[int],
    dilations: list[int],
    groups: int,
) -> Val:
    """The gradient of weights by one Conv, whose batch is the channels of a group, and whose windows are all
    places of ``dy``."""
    batch, channels, spatial = x.shape[0], x.shape[1] // groups, x.shape[2:]
    axes = range(2, len(x.shape))
    x = emit.reshape(x, (batch, groups, channels, *spatial))
    x = emit.transpose(x, [2, 1, 0, *range(3, len(x.shape))])
    x = emit.reshape(x, (channels, groups * batch, *spatial))
    filters = emit.transpose(dy, [1, 0, *axes])
    return emit.transpose(convolve(emit, x, filters, pads, dilations, strides, groups), [1, 0, *axes])


def _pointwise_weight_grad(
    emit: Emitter, x: Val, dy: Val, pads: Sequence[tuple[int, int]], strides: list[int]
) -> Val:
    """A kernel of one element: one matrix product."""
    x = emit.pad(x, [(0, 0), (0, 0), *pads])
    x = emit.slice(x, [(0, n) for n in x.shape], [1, 1, *strides])
    batch, channels, filters, size = *x.shape[:2], dy.shape[1], prod(dy.shape[2:])
    columns = emit.transpose(emit.reshape(x, (batch, channels, size)), [0, 2, 1])
    product = emit.matmul(emit.reshape(dy, (batch, filters, size)), columns)
    total = emit.sum(product, [0])
    return emit.reshape(total, (filters, channels, *[1] * len(pads)))


def _windows(instruction: Instruction, rank: int) -> dict[str, Any]:
    return {
        "kernel_shape": list(instruction.attrs["kernel_shape"]),
        "strides": _ints(instruction, "strides", rank),
        "dilations": _ints(instruction, "dilations", rank),
    }


def max_pool(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """MaxPool."""
    x, pads = _first(emit, args, instruction)
    windows = _windows(instruction, len(pads))
    if any(max(pair) >= k for pair, k in zip(pads, windows["kernel_shape"], strict=True)):
        # onnxruntime refuses windows that see nothing but padding.
        x, pads = _padded(emit, args, instruction, 0, instruction.fill), ((0, 0),) * len(pads)
    return [emit.node("MaxPool", [x], instruction.kernel_shapes[0], pads=_flat(pads), **windows)]


def max_pool_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The gradient of MaxPool, by the indices that it finds."""
    dy = _padded(emit, args, instruction, 1, 0.0)  # a window that does not exist has no gradient
    # MaxPool finds no index in a window of minus infinities, so there are none.
    x = emit("Max", args[0], _LOWEST)
    pads = pads_of(instruction.operands[0])
    x = x if pads is None else emit.pad(x, pads, _LOWEST)
    specs = [(dy.shape, x.dtype), (dy.shape, "int64")]
    windows = _windows(instruction, len(dy.shape) - 2)
    found = emit.many("MaxPool", [x], specs, **windows)[1]
    # Nor in a window of NaNs; what becomes of those does not matter, as long as it is inside.
    found = emit("Max", found, 0)
    count, total = prod(dy.shape), prod(x.shape)
    zeros = emit.full((total,), 0.0, x.dtype)
    flat = [emit.reshape(found, (count,)), emit.reshape(dy, (count,))]
    dx = emit.node("ScatterElements", [zeros, *flat], (total,), axis=0, reduction="add")
    dx = emit.reshape(dx, x.shape)
    return [emit.take(dx, crop_of(instruction), instruction.kernel_shapes[0])]
