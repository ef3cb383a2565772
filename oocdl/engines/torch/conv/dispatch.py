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

from oocdl.engines.convolution import Slide, clipped, flipped_pads, slide_of
from oocdl.engines.torch.conv import block_transpose, compiled_gradient, thin_slab
from oocdl.engines.torch.conv import im2col as columns
from oocdl.engines.torch.conv import one_by_one as points
from oocdl.engines.torch.conv.conv_calls import (
    by_onednn,
    convolve,
    has_onednn,
    in_one_step,
    into,
    takes_planes,
    weight_gradient,
)
from oocdl.engines.torch.conv.conv_padding import end_rows, evened, rows_alone, shared, surplus
from oocdl.engines.torch.conv.im2col import has_few_taps
from oocdl.engines.torch.layout import channels_last, empty_as, has_channels_last, like
from oocdl.engines.torch.torch_pooling import CHUNK_ELEMENTS, Window, max_pool, max_pool_grad
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import Pads, crop_of, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.slabs import is_thin

Gradient = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]


def _is_thin(x: Tensor, kernel_shape: Sequence[int]) -> bool:
    """Whether oneDNN has to be called by hand for a large convolution.

    By itself PyTorch takes thin slabs, however wide, by im2col: 27 times their memory and 8 times as long.
    """
    if x.dtype != torch.float32 or math.prod(kernel_shape) == 1 or not is_thin(tuple(x.shape)):
        return False
    return has_onednn()


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


def _in_space(x: Tensor, pads: Pads) -> Tensor:
    """``x`` with zeros around its axes of space."""
    return pad(x, ((0, 0), (0, 0), *pads), 0.0)


def _data(args: list[Tensor], item: Instruction) -> tuple[Tensor, Pads]:
    """Operand 0 of a convolution, and its padding; it is padded already where no kernel takes it as it is."""
    x, pads = args[0], spatial_pads(item.operands[0])
    return (x, pads) if x.numel() else (_in_space(x, pads), ((0, 0),) * len(pads))


def _halves(x: Tensor, taps: Sequence[int], pads: Pads, slide: Slide) -> tuple[Tensor, list[int]]:
    """``x``, padded as far as its padding is not symmetric, and the symmetric rest for the kernel."""
    common, rest = shared(evened(pads, x.shape[2:], taps, slide))
    return _in_space(x, rest), common


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
    x: Tensor, w: Tensor, padding: Sequence[int], slide: Slide, out: Tensor | None = None
) -> Tensor:
    """A convolution by the kernel that is the fastest on a processor.

    With groups, lines are images of one row with their channels last (4 x 256 channels of 500, 15: 1.9 ms,
    not 3.8).
    """
    if out is not None:
        return into(out, x, w, padding, slide)
    if slide.groups > 1 and w.dim() == 3:
        wide = Slide((1, *slide.strides), (1, *slide.dilations), slide.groups)
        return convolve(channels_last(x.unsqueeze(2)), w.unsqueeze(2), [0, *padding], wide).squeeze(2)
    thin = slide.groups == 1 and _is_thin(x, w.shape[2:])
    return (by_onednn if thin else convolve)(x, w, padding, slide)


def _slide(x: Tensor, w: Tensor, pads: Pads, slide: Slide, out: Tensor | None) -> Tensor:
    """A convolution with ``pads`` of the axes of space."""
    sorts = has_channels_last(x) and (x.shape[1] > 1 or out is not None)  # one channel lies as a plane does
    if sorts and x.dtype != torch.float64 and has_onednn() and rows_alone(x.shape, w.shape[2], pads, slide):
        return _row_by_row(x, w, pads, slide, out)
    pads = evened(pads, x.shape[2:], w.shape[2:], slide)
    before, most = pads[0][0], max(pads[0])
    more = surplus(pads, x.shape[2:], w.shape[2:], slide)
    x, padding = _halves(x, w.shape[2:], ((most, most), *pads[1:]) if more else pads, slide)
    made = _convolve(x, w, padding, slide, out)
    return made.narrow(2, most - before, made.shape[2] - more) if more else made


def _row_by_row(x: Tensor, w: Tensor, pads: Pads, slide: Slide, out: Tensor | None) -> Tensor:
    """``_slide`` of one sample: rows that see more of the padding than the other end does are made by
    themselves, with those taps that see ``x``."""
    padding = [before for before, _ in pads[1:]]
    if out is None:
        sizes = zip(x.shape[2:], pads, w.shape[2:], slide.dilations, strict=True)
        out = empty_as((1, w.shape[0], *(n + sum(p) - d * (k - 1) for n, p, k, d in sizes)), x)
    first, alone = end_rows(pads[0], x.shape[2], w.shape[2], out.shape[2])
    inner = channels_last(out.narrow(2, first, out.shape[2] - len(alone)))
    into(inner, x, w, [min(pads[0]), *padding], slide)
    for row in alone:
        part, kernel = x.narrow(2, row.start, row.seen), w.narrow(2, row.tap, row.seen)
        one = channels_last(out.narrow(2, row.place, 1))
        into(one, channels_last(part), like(kernel, x), [0, *padding], slide)
    return out


def conv(
    args: list[Tensor], item: Instruction, out: Tensor | None = None, tuned: bool = True
) -> list[Tensor]:
    """A convolution."""
    (x, pads), w, slide = _data(args, item), args[1], slide_of(item)
    if x.numel() == 0:
        return [x.new_zeros(item.kernel_shapes[0])]
    if tuned and points.is_point(w.shape, slide, pads):
        return [points.convolve(x, w, slide.strides, out)]
    if tuned and has_few_taps(w.shape, slide, w.dtype) and w.shape[0] >= points.REGISTER_CHANNELS:
        return [columns.convolve(_in_space(x, pads), w, slide.dilations)]
    x, pads, slide = in_one_step(x, pads, w.shape[2:], item.kernel_shapes[0][2:], slide)
    if not tuned:
        x, padding = _halves(x, w.shape[2:], pads, slide)
        return [convolve(x, w, padding, slide)]
    # A part of larger weights (``split_concat``) would be sorted anew by each kernel that sees it.
    w = w if w.is_contiguous() else like(w, x)
    return [_slide(x, w, pads, slide, out)]


def _conv_flipped(x: Tensor, w: Tensor, item: Instruction, out: Tensor | None) -> Tensor:
    """A transposed convolution of stride one: a convolution with flipped weights.

    oneDNN has the faster kernels for it (4 x 7 x 128 x 128 to 16 channels, 1^3: 0.5 ms, not 1.8;
    16 to 16 channels, 3^3: 6.5, not 8.0), and it makes the wanted box alone.
    """
    box, pads = clipped(x.shape[2:], flipped_pads(item))
    for axis, (start, stop) in enumerate(box, start=2):
        if stop <= start:
            return x.new_zeros(item.kernel_shapes[0])
        x = x.narrow(axis, start, stop - start)
    slide = slide_of(item)
    exchanged = w.view(slide.groups, -1, *w.shape[1:]).transpose(1, 2).flatten(0, 1)
    flipped = exchanged.flip(tuple(range(2, w.dim())))
    return _slide(x, like(flipped, x), pads, slide, out)


def conv_transpose(
    args: list[Tensor], item: Instruction, out: Tensor | None = None, tuned: bool = True
) -> list[Tensor]:
    """A transposed convolution: the wanted box of its result, cut by the kernel's own padding if it can."""
    (x, w), slide, rank = args, slide_of(item), args[1].dim() - 2
    shape, crop = item.kernel_shapes[0], list(crop_of(item))
    if x.numel() == 0:
        return [x.new_zeros(shape)]
    strides, dilations, groups = slide
    # Zeros before the operand only move the result.
    befores = [before for before, _ in spatial_pads(item.operands[0])]
    starts = [c - b * s for c, b, s in zip(crop[2:], befores, strides, strict=True)]
    if tuned and points.is_point(w.shape, slide):
        return [points.transposed(x, w, strides, starts, shape, out)]
    if tuned and has_onednn() and block_transpose.makes_blocks(item):
        return [block_transpose.convolve(x, w, out)]
    if tuned and set(strides) == {1} and (groups == 1 or rank > 1):
        return [_conv_flipped(x, w, item, out)]
    paddings, extras = [], []
    for axis, start in enumerate(starts):
        stride, dilation = strides[axis], dilations[axis]
        full = (x.shape[axis + 2] - 1) * stride + dilation * (w.shape[axis + 2] - 1) + 1
        stop = start + shape[axis + 2]
        # Padding p drops p elements on both sides; an output padding gives some back at the end.
        most = max(stride, dilation) - 1
        padding = max(0, min(start, full + most - stop))
        extra = max(0, min(most, stop + padding - full))
        paddings.append(padding)
        extras.append(extra)
        crop[axis + 2] = start - padding
    # oneDNN does not know output paddings as large as the stride.
    thin = tuned and groups == 1 and _is_thin(x, w.shape[2:])
    thin = thin and all(e < s for e, s in zip(extras, strides, strict=True))
    x = x.to_mkldnn() if thin else x
    full_result = torch.convolution(x, w, None, strides, paddings, dilations, True, extras, groups)
    return [take(full_result.to_dense() if thin else full_result, crop, shape)]


def conv_weight_grad(args: list[Tensor], item: Instruction, tuned: bool = True) -> list[Tensor]:
    """The gradient of a convolution's weights."""
    (x, pads), dy, slide, shape = _data(args, item), args[1], slide_of(item), item.kernel_shapes[0]
    dtype = getattr(torch, item.dtypes[0])  # products of bfloat16 are summed in float32
    if 0 in (*x.shape, *dy.shape):
        return [x.new_zeros(shape, dtype=dtype)]
    if tuned and points.is_point(shape, slide, pads):
        return [points.weight_gradient(dy, x, slide.strides, shape).to(dtype)]
    if tuned and has_few_taps(shape, slide, x.dtype):
        return [columns.weight_gradient(_in_space(x, pads), dy, shape, slide.dilations)]
    if tuned and (loop := compiled_gradient.loop_of(x, dy, shape, slide)) is not None:
        return [compiled_gradient.weight_gradient(loop, x, dy, shape, pads, slide)]

    x, pads, slide = in_one_step(x, pads, shape[2:], dy.shape[2:], slide)

    def gradient(dy: Tensor, x: Tensor, shape: Sequence[int], padding: Sequence[int]) -> Tensor:
        by_planes = x.device.type == "cpu" and takes_planes(x.shape[2:], shape[2:], slide, str(x.dtype)[6:])
        if by_planes or (tuned and slide.groups == 1 and _is_thin(x, shape[2:])):
            made = thin_slab.weight_gradient(x, dy, shape, padding, slide)
        elif tuned and slide.groups > 1:
            made = thin_slab.of_groups(x, dy, shape, padding, slide)
        else:
            made = weight_gradient(dy, x, empty_as(shape, x), padding, slide)
        return made.to(dtype)

    if tuned and rows_alone((1, *x.shape[1:]), shape[2], pads, slide):
        return [_with_ends(gradient, dy, x, shape, pads)]
    x, padding = _halves(x, shape[2:], pads, slide)
    return [gradient(dy, x, shape, padding)]


def _with_ends(gradient: Gradient, dy: Tensor, x: Tensor, shape: Shape, pads: Pads) -> Tensor:
    """The gradient of the weights without a padded copy of ``x``: the few rows of ``dy`` that see more
    of the padding than the other end does are taken by themselves, with those taps that see ``x``."""
    padding = [before for before, _ in pads[1:]]
    first, alone = end_rows(pads[0], x.shape[2], shape[2], dy.shape[2])
    total = gradient(dy.narrow(2, first, dy.shape[2] - len(alone)), x, shape, [min(pads[0]), *padding])
    for row in alone:
        part = x.narrow(2, row.start, row.seen)
        made = gradient(dy.narrow(2, row.place, 1), part, [*shape[:2], row.seen, *shape[3:]], [0, *padding])
        total.narrow(2, row.tap, row.seen).add_(made)
    return total


def _padded(args: list[Tensor], item: Instruction, index: int, fill: float) -> Tensor:
    pads = pads_of(item.operands[index])
    return args[index] if pads is None else pad(args[index], pads, fill)


def _windows(item: Instruction) -> list[Window]:
    strides, dilations, _ = slide_of(item)
    return list(zip(item.attrs["kernel_shape"], strides, dilations, strict=True))


def pool(args: list[Tensor], item: Instruction, chunk: int = CHUNK_ELEMENTS) -> list[Tensor]:
    """Max pooling; ``chunk`` elements are taken at a time."""
    return [max_pool(_padded(args, item, 0, item.fill), _windows(item), chunk)]


def pool_grad(
    args: list[Tensor], item: Instruction, out: Tensor | None = None, chunk: int = CHUNK_ELEMENTS
) -> list[Tensor]:
    """The gradient of ``pool``, which goes to the first of the largest elements of each window."""
    x = _padded(args, item, 0, item.fill)
    dy = _padded(args, item, 1, 0.0)  # a window that does not exist has no gradient
    return [take(max_pool_grad(x, dy, _windows(item), out, chunk), crop_of(item), item.kernel_shapes[0])]
