"""Convolutions of one tap in PyTorch, with strides or without.

Where there are enough channels oneDNN convolves, else it is a matrix product. With strides, the places that
are seen are copied side by side first: oneDNN's kernels for strides are slower by more than that copy takes,
and PyTorch would enlarge an operand that ends with the last place that is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.engines.torch.conv import conv_calls
from oocdl.engines.torch.layout import channels_last, dense, empty_as, has_channels_last, like
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.transforms.channels_last import has_enough

REGISTER_CHANNELS = 16
"""Channels of float32 that fill a register of 512 bits."""


def is_point(weight_shape: Sequence[int], slide: Slide, pads: Sequence[tuple[int, int]] = ()) -> bool:
    """Whether a convolution sees each place by itself, and nothing but the operand."""
    return slide.groups == 1 and math.prod(weight_shape[2:]) == 1 and not any(map(any, pads))


def _is_product(weight_shape: Sequence[int], x: Tensor) -> bool:
    """Whether a matrix product is faster than oneDNN's convolution.

    oneDNN does without vectors where there are few channels (16 to 4, 1^3: 96 ms, not 8). Where they
    fill its registers it is twice as fast as MKL on AMD processors (256 to 1024: 6.6 ms, not 16.2).
    """
    return min(weight_shape[:2]) < REGISTER_CHANNELS and has_channels_last(x)


def _places(x: Tensor) -> Tensor:
    """``x[n, c, *space]`` as [n, places, c]."""
    return x.movedim(1, -1).reshape(x.shape[0], -1, x.shape[1])


def _product(x: Tensor, w: Tensor) -> Tensor:
    """The product with ``w[c, d]`` for each place; few channels are made as planes, as they are kept."""
    shape = (x.shape[0], *x.shape[2:])
    if not has_enough(w.shape[1]):
        return torch.matmul(w.t(), _places(x).transpose(1, 2)).reshape(shape[0], w.shape[1], *shape[1:])
    return torch.matmul(_places(x), w).reshape(*shape, w.shape[1]).movedim(-1, 1)


def _every(x: Tensor, strides: Sequence[int]) -> Tensor:
    """The places of ``x`` that strides reach, side by side."""
    if set(strides) == {1}:
        return x
    index = [slice(None), slice(None), *(slice(None, None, stride) for stride in strides)]
    return dense(x[tuple(index)])


def _asks_onednn(x: Tensor) -> bool:
    """Whether to call oneDNN's convolution by hand.

    By itself PyTorch takes one tap on one thread for a product of MKL's if there are fewer than 16 samples
    (4 of 256 to 64 channels, 56 x 56: 4.6 ms, not 1.8).
    """
    return x.dtype == torch.float32 and has_channels_last(x) and x.numel() > 0 and conv_calls.has_onednn()


def convolve(x: Tensor, w: Tensor, strides: Sequence[int], out: Tensor | None = None) -> Tensor:
    """The convolution of ``x`` with ``w[d, c, 1, ..]``.

    The result goes to ``out`` where that is given; ``c`` and ``d`` are then at least ``REGISTER_CHANNELS``.
    """
    x, none, ones = _every(x, strides), [0] * len(strides), (1,) * len(strides)
    if out is not None:
        return conv_calls.into(out, dense(x), channels_last(w), none, Slide(ones, ones))
    if _is_product(w.shape, x):
        return _product(x, w.flatten(1).t())
    if not _asks_onednn(x):
        return conv_calls.convolve(x, like(w, x), none, Slide(ones, ones))
    return conv_calls.by_onednn(dense(x), channels_last(w), none, Slide(ones, ones))


def transposed(
    x: Tensor, w: Tensor, strides: Shape, starts: Sequence[int], shape: Shape, out: Tensor | None = None
) -> Tensor:
    """The transposed convolution of ``x`` with ``w[c, d, 1, ..]``: the box of ``shape`` that starts at
    ``starts`` of the axes of space, zeros where no place of ``x`` comes to lie.

    ``out`` where each place of it is one of ``x``.
    """
    box: list[slice] = [slice(None), slice(None)]
    for axis, (stride, start) in enumerate(zip(strides, starts, strict=True), start=2):
        first = max(-(-start // stride), 0)
        stop = min(x.shape[axis], -(-(start + shape[axis]) // stride))
        if stop <= first:
            return empty_as((x.shape[0], w.shape[1], *shape[2:]), x).zero_()
        x = x.narrow(axis, first, stop - first)
        begin = first * stride - start
        box.append(slice(begin, begin + (stop - first - 1) * stride + 1, stride))
    made = convolve(x, w.transpose(0, 1), (1,) * len(starts), out)
    if made.shape[2:] == tuple(shape[2:]):
        return made
    result = empty_as((*made.shape[:2], *shape[2:]), made).zero_()
    result[tuple(box)] = made
    return result


def weight_gradient(dy: Tensor, x: Tensor, strides: Sequence[int], shape: Shape) -> Tensor:
    """The gradient of weights of ``shape``, in the precision of the operands or in a higher one."""
    x = _every(x, strides)
    if x.dtype == torch.bfloat16 and x.dim() == 5:  # oneDNN is not trusted with volumes (``conv_calls``)
        x, dy = x.flatten(2, 3), dy.flatten(2, 3)
        return weight_gradient(dy, x, (1, 1), (*shape[:2], 1, 1)).view(tuple(shape))
    if _is_product(shape, x) and has_channels_last(dy):
        return torch.matmul(_places(dy).flatten(0, 1).t(), _places(x).flatten(0, 1)).reshape(shape)
    # One tap is the same however far others would be, and what is dilated goes to oneDNN, if it is large.
    large = x.shape[0] > 1 or math.prod(x.shape[:4]) > THIN_SLAB_ELEMENTS
    ones, dilation = (1,) * len(strides), 2 if _asks_onednn(x) and large else 1
    slide = Slide(ones, (dilation,) * len(strides))
    return conv_calls.weight_gradient(dy, x, empty_as(shape, x), [0] * len(strides), slide)
