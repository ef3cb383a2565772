"""PyTorch kernels of operators with sliding windows: convolution, its gradients, pooling.

Operands come without their padding. A symmetric one is left to the kernel, so that
nothing is copied; the rest is put on here. What is done otherwise because oneDNN is asked
or its cache spared is left out for another device, where kernels are not ``tuned``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oocdl.engines.convolution import groups_of
from oocdl.engines.torch.conv import grouped, thin_slab
from oocdl.engines.torch.conv import im2col as columns
from oocdl.engines.torch.conv import one_by_one as points
from oocdl.engines.torch.conv.conv_padding import end_rows, evened, flipped_pads, rows_alone, shared, surplus
from oocdl.engines.torch.conv.im2col import has_few_taps
from oocdl.engines.torch.layout import channels_last, empty_as, has_channels_last
from oocdl.engines.torch.torch_pooling import CHUNK_ELEMENTS, Window, max_pool, max_pool_grad
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import crop_of, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.slabs import is_thin

aten = torch.ops.aten
_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _is_thin(x: Tensor, kernel_shape: Sequence[int]) -> bool:
    """Whether oneDNN has to be called by hand for a large convolution.

    By itself PyTorch takes thin slabs, however wide, by im2col: 27 times their memory and 8 times as long.
    """
    if x.dtype != torch.float32 or math.prod(kernel_shape) == 1 or not is_thin(tuple(x.shape)):
        return False
    return points.has_onednn()


def pad(tensor: Tensor, pads: Sequence[tuple[int, int]], fill: float) -> Tensor:
    """``tensor`` with (before, after) elements of ``fill`` on every axis."""
    if not any(before or after for before, after in pads):
        return tensor
    shape = [b + extent + a for extent, (b, a) in zip(tensor.shape, pads, strict=True)]
    value = bool(fill) if tensor.dtype == torch.bool else fill
    if tensor.numel() == 0:
        return tensor.new_full(shape, value)
    flat = [count for pair in reversed(pads) for count in pair]
    return F.pad(tensor, flat, value=value)


def _halves(x: Tensor, instruction: Instruction, taps: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Operand 0, padded as far as its padding is not symmetric, and the symmetric rest for the kernel."""
    operand = instruction.operands[0]
    pads = spatial_pads(operand)
    if operand.pads is None:
        return x, [0] * len(pads)
    if x.numel() == 0 or any(map(any, operand.pads[:2])):
        return _padded([x], instruction, 0), [0] * len(pads)
    strides, dilations = (_ints(instruction, name, len(pads)) for name in ("strides", "dilations"))
    common, rest = shared(evened(pads, x.shape[2:], taps, strides, dilations))
    return pad(x, rest, instruction.fill), common


def _padded(args: list[Tensor], instruction: Instruction, index: int, fill: float | None = None) -> Tensor:
    """An operand with its padding of ``fill``; None: that of the instruction."""
    pads = pads_of(instruction.operands[index])
    fill = instruction.fill if fill is None else fill
    return args[index] if pads is None else pad(args[index], pads, fill)


def _ints(instruction: Instruction, name: str, rank: int) -> list[int]:
    """An attribute with one number for each axis; ones where it is left out."""
    return list(instruction.attrs.get(name) or (1,) * rank)


def take(tensor: Tensor, crop: Sequence[int], shape: Shape) -> Tensor:
    """The box of ``shape`` that starts at ``crop``; zeros where ``tensor`` has nothing."""
    pads = []
    for axis, (start, extent) in enumerate(zip(crop, shape, strict=True)):
        first, last = max(start, 0), min(start + extent, tensor.shape[axis])
        if last <= first:
            return tensor.new_zeros(shape)
        if (first, last) != (0, tensor.shape[axis]):
            tensor = tensor.narrow(axis, first, last - first)
        pads.append((first - start, start + extent - last))
    return pad(tensor, pads, 0.0)


def _convolve(
    x: Tensor,
    w: Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    out: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    if groups > 1:
        return grouped.convolve(x, w, strides, padding, dilations, groups)
    if out is not None:
        return points.into(out, x, w, strides, padding, dilations)
    if _is_thin(x, w.shape[2:]):
        thin: Tensor = aten.mkldnn_convolution(x, w, None, padding, strides, dilations, 1)
        return thin
    result: Tensor = _CONV[w.dim() - 3](x, w, None, strides, padding, dilations)
    return result


def _slide(
    x: Tensor,
    w: Tensor,
    strides: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilations: Sequence[int],
    out: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    """A convolution with ``pads`` (before, after) of the axes of space."""
    pads = evened(pads, x.shape[2:], w.shape[2:], strides, dilations)
    if alone := _rows_alone(x, w, pads, strides, dilations):
        return _row_by_row(x, w, pads, dilations, alone, out, groups)
    more = surplus(pads, x.shape[2:], w.shape[2:], strides, dilations)
    before, most = pads[0][0], max(pads[0])
    common, rest = shared([(most, most), *pads[1:]] if more else pads)
    result = _convolve(pad(x, rest, 0.0), w, strides, common, dilations, out, groups)
    return result.narrow(2, most - before, result.shape[2] - more) if more else result


def _rows_alone(
    x: Tensor,
    w: Tensor,
    pads: Sequence[tuple[int, int]],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> int:
    """``rows_alone``, where oneDNN convolves."""
    if x.dtype == torch.float64 or x.shape[1] == 1 or not has_channels_last(x) or not points.has_onednn():
        return 0
    rows = x.shape[2] + sum(pads[0]) - w.shape[2] + 1
    return rows_alone(x.shape, w.shape[2], pads, strides, dilations, rows)


def _row_by_row(
    x: Tensor,
    w: Tensor,
    pads: Sequence[tuple[int, int]],
    dilations: Sequence[int],
    more: int,
    out: Tensor | None,
    groups: int,
) -> Tensor:
    """``_slide`` of one sample: the ``more`` rows that see more of the padding than the other end does are
    made by themselves, with those taps that see ``x``."""
    ones, padding = [1] * len(pads), [pair[0] for pair in pads[1:]]
    if out is None:
        sizes = zip(x.shape[2:], pads, w.shape[2:], dilations, strict=True)
        out = empty_as((1, w.shape[0], *(n + sum(p) - d * (k - 1) for n, p, k, d in sizes)), x)
    first, alone = end_rows(pads[0], more, x.shape[2], w.shape[2], out.shape[2])
    inner = channels_last(out.narrow(2, first, out.shape[2] - more))
    points.into(inner, x, w, ones, [min(pads[0]), *padding], dilations, groups)
    for row in alone:
        part, kernel = x.narrow(2, row.start, row.seen), w.narrow(2, row.tap, row.seen)
        one = channels_last(out.narrow(2, row.place, 1))
        points.into(one, channels_last(part), _like(kernel, x), ones, [0, *padding], dilations, groups)
    return out


def _like(w: Tensor, x: Tensor) -> Tensor:
    """Weights in the order of the data that they meet: kernels would make a copy of their own."""
    return channels_last(w) if has_channels_last(x) else w.contiguous()


def conv(
    args: list[Tensor], instruction: Instruction, out: Tensor | None = None, tuned: bool = True
) -> list[Tensor]:
    """A convolution."""
    w, groups = _padded(args, instruction, 1), groups_of(instruction)
    rank = w.dim() - 2
    strides, dilations = (_ints(instruction, name, rank) for name in ("strides", "dilations"))
    if not tuned:
        x, padding = _halves(args[0], instruction, w.shape[2:])
        return [_CONV[rank - 1](x, w, None, strides, padding, dilations, groups)]
    operand = instruction.operands[0]
    if instruction.fill or args[0].numel() == 0 or (operand.pads and any(map(any, operand.pads[:2]))):
        x, padding = _halves(args[0], instruction, w.shape[2:])
        return [_convolve(x, w, strides, padding, dilations, groups=groups)]
    pads = spatial_pads(operand)
    if groups == 1 and points.is_point(w.shape, pads):
        return [points.convolve(args[0], w, strides, out)]
    if (
        groups == 1
        and has_few_taps(w.shape, strides)
        and w.shape[0] >= points.REGISTER_CHANNELS
        and w.dtype != torch.bfloat16
    ):
        return [columns.convolve(pad(args[0], [(0, 0), (0, 0), *pads], 0.0), w, dilations)]
    # A part of larger weights (``split_concat``) would be sorted anew by each kernel that sees it.
    w = w if w.is_contiguous() else _like(w, args[0])
    return [_slide(args[0], w, strides, pads, dilations, out, groups)]


def _conv_flipped(
    x: Tensor, w: Tensor, instruction: Instruction, dilations: Sequence[int], out: Tensor | None
) -> Tensor:
    """A transposed convolution of stride one: a convolution with flipped weights.

    oneDNN has the faster kernels for it (4 x 7 x 128 x 128 to 16 channels, 1^3: 0.5 ms, not 1.8;
    16 to 16 channels, 3^3: 6.5, not 8.0), and it makes the wanted box alone.
    """
    shape, crop = instruction.kernel_shapes[0], crop_of(instruction)
    pads = []
    for axis, (left, right) in enumerate(flipped_pads(instruction, dilations), start=2):
        extent = x.shape[axis]
        first, last = max(-left, 0), min(extent, extent + right)
        if last <= first:
            return x.new_zeros(shape)
        x = x.narrow(axis, first, last - first)
        pads.append((max(left, 0), max(right, 0)))
    ones, groups = (1,) * len(pads), groups_of(instruction)
    exchanged = w.view(groups, -1, *w.shape[1:]).transpose(1, 2).flatten(0, 1)
    flipped = exchanged.flip(tuple(range(2, w.dim())))
    result = _slide(x, _like(flipped, x), ones, pads, dilations, out, groups)
    return take(result, (*crop[:2], *(0,) * len(pads)), shape)


def conv_transpose(
    args: list[Tensor], instruction: Instruction, out: Tensor | None = None, tuned: bool = True
) -> list[Tensor]:
    """A transposed convolution: the wanted box of its result, cut by the kernel's own padding if it can."""
    x, w = args[0], _padded(args, instruction, 1)
    rank = w.dim() - 2
    shape, crop = instruction.kernel_shapes[0], list(crop_of(instruction))
    if x.numel() == 0:
        return [x.new_zeros(shape)]
    strides, dilations = (_ints(instruction, name, rank) for name in ("strides", "dilations"))
    groups = groups_of(instruction)
    if tuned and groups == 1 and points.is_point(w.shape):
        befores = [before for before, _ in spatial_pads(instruction.operands[0])]
        starts = [c - b * s for c, b, s in zip(crop[2:], befores, strides, strict=True)]
        made = points.transposed(x, w, strides, starts, shape, out)
        return [take(made, (*crop[:2], *(0,) * rank), shape)]
    if tuned and set(strides) == {1} and (groups == 1 or rank > 1):
        return [_conv_flipped(x, w, instruction, dilations, out)]
    paddings, extras = [], []
    for axis, (before, _) in enumerate(spatial_pads(instruction.operands[0])):
        stride, dilation = strides[axis], dilations[axis]
        # Zeros before the operand only move the result.
        start = crop[axis + 2] - before * stride
        full = (x.shape[axis + 2] - 1) * stride + dilation * (w.shape[axis + 2] - 1) + 1
        stop = start + shape[axis + 2]
        # Padding p drops p elements on both sides; an output padding gives some back at the end.
        most = max(stride, dilation) - 1
        padding = max(0, min(start, full + most - stop))
        extra = max(0, min(most, stop + padding - full))
        paddings.append(padding)
        extras.append(extra)
        crop[axis + 2] = start - padding
    kernel: Callable[..., Tensor] = _CONV_TRANSPOSE[rank - 1]
    # oneDNN does not know output paddings as large as the stride.
    thin = tuned and groups == 1 and _is_thin(x, w.shape[2:])
    thin = thin and all(e < s for e, s in zip(extras, strides, strict=True))
    x = x.to_mkldnn() if thin else x
    full_result = kernel(x, w, None, strides, paddings, extras, groups, dilations)
    return [take(full_result.to_dense() if thin else full_result, crop, shape)]


def conv_weight_grad(args: list[Tensor], instruction: Instruction, tuned: bool = True) -> list[Tensor]:
    """The gradient of a convolution's weights."""
    dy = _padded(args, instruction, 1)
    strides, dilations = (_ints(instruction, name, dy.dim() - 2) for name in ("strides", "dilations"))
    shape, x = instruction.kernel_shapes[0], args[0]
    dtype = getattr(torch, instruction.dtypes[0])  # products of bfloat16 are summed in float32
    pads, groups = spatial_pads(instruction.operands[0]), groups_of(instruction)
    if tuned and groups == 1 and points.is_point(shape, pads) and 0 not in (x.numel(), dy.numel()):
        return [points.weight_gradient(dy, x, strides, shape).to(dtype)]

    def gradient(dy: Tensor, x: Tensor, shape: Sequence[int], padding: Sequence[int]) -> Tensor:
        # Only the shape of the weights matters; their memory is never touched, if they lie as the data does.
        w, none = empty_as(shape, x), [0] * len(strides)
        if tuned and groups > 1:
            return grouped.weight_gradient(x, dy, shape, strides, padding, dilations, groups).to(dtype)
        if tuned and _is_thin(x, shape[2:]):
            return thin_slab.weight_gradient(x, dy, shape, strides, padding, dilations)
        made: Tensor = aten.convolution_backward(
            dy, x, w, None, strides, padding, dilations, False, none, groups, [False, True, False]
        )[1]
        return made.to(dtype)

    few = tuned and groups == 1 and has_few_taps(shape, strides) and x.dtype != torch.bfloat16
    if few and 0 not in (x.numel(), dy.numel()):
        padded = _padded(args, instruction, 0)
        return [columns.weight_gradient(padded, dy, shape, dilations)]
    if tuned and _ends_apart(instruction, pads, strides, dilations, dy):
        return [_with_ends(gradient, dy, x, shape, pads)]
    x, padding = _halves(x, instruction, shape[2:])
    return [gradient(dy, x, shape, padding)]


def _ends_apart(
    instruction: Instruction,
    pads: Sequence[tuple[int, int]],
    strides: Sequence[int],
    dilations: Sequence[int],
    dy: Tensor,
) -> bool:
    """Whether rows at one end of ``dy`` see more of the padding than those at the other."""
    operand = instruction.operands[0]
    if operand.pads is None or any(map(any, operand.pads[:2])) or 0 in (*operand.shape, *dy.shape):
        return False
    alone, taps = (1, *operand.shape[1:]), instruction.kernel_shapes[0][2]
    return rows_alone(alone, taps, pads, strides, dilations, dy.shape[2]) > 0


def _with_ends(
    gradient: Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], Tensor],
    dy: Tensor,
    x: Tensor,
    shape: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> Tensor:
    """The gradient of the weights without a padded copy of ``x``: the few rows of ``dy`` that see more
    of the padding than the other end does are taken by themselves, with those taps that see ``x``."""
    ends, padding = pads[0], [pair[0] for pair in pads[1:]]
    more = abs(ends[0] - ends[1])
    first, alone = end_rows(ends, more, x.shape[2], shape[2], dy.shape[2])
    total = gradient(dy.narrow(2, first, dy.shape[2] - more), x, shape, [min(ends), *padding])
    for row in alone:
        part = x.narrow(2, row.start, row.seen)
        made = gradient(dy.narrow(2, row.place, 1), part, [*shape[:2], row.seen, *shape[3:]], [0, *padding])
        total.narrow(2, row.tap, row.seen).add_(made)
    return total


def _windows(instruction: Instruction, rank: int) -> list[Window]:
    kernel = instruction.attrs["kernel_shape"]
    strides, dilations = (_ints(instruction, name, rank) for name in ("strides", "dilations"))
    return list(zip(kernel, strides, dilations, strict=True))


def pool(args: list[Tensor], instruction: Instruction, chunk: int = CHUNK_ELEMENTS) -> list[Tensor]:
    """Max pooling; ``chunk`` elements are taken at a time."""
    x = _padded(args, instruction, 0)
    return [max_pool(x, _windows(instruction, x.dim() - 2), chunk)]


def pool_grad(
    args: list[Tensor], instruction: Instruction, out: Tensor | None = None, chunk: int = CHUNK_ELEMENTS
) -> list[Tensor]:
    """The gradient of ``pool``, which goes to the first of the largest elements of each window."""
    x = _padded(args, instruction, 0)
    dy = _padded(args, instruction, 1, 0.0)  # a window that does not exist has no gradient
    dx = max_pool_grad(x, dy, _windows(instruction, x.dim() - 2), out, chunk)
    return [take(dx, crop_of(instruction), instruction.kernel_shapes[0])]
