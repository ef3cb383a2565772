"""The gradient of the weights of a 3D convolution, plane by plane of its taps.

This serves thin slabs, groups, and what ``conv_calls`` names. PyTorch leaves a thin slab to oneDNN only in a
format of its own, into which both operands are copied (16 channels, 9 x 128 x 128: 33 MiB, and 35 ms of 42).
The planes of a slab are a batch to a convolution of two dimensions, which takes them as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.engines.torch.conv import conv_calls
from oocdl.engines.torch.layout import channels_last, empty_as, has_channels_last


def weight_gradient(
    x: Tensor, dy: Tensor, shape: Sequence[int], padding: Sequence[int], slide: Slide
) -> Tensor:
    """The gradient of weights of ``shape`` from ``x[n, c, *space]`` and ``dy[n, d, *space]``."""
    if x.shape[0] > 1:
        total = x.new_zeros(tuple(shape), dtype=torch.float32)
        for sample in zip(torch.split(x, 1), torch.split(dy, 1), strict=True):
            total += weight_gradient(*sample, shape, padding, slide)
        return total
    planes, grads = (tensor[0].movedim(1, 0) for tensor in (x, dy))
    if has_channels_last(x) and has_channels_last(dy):
        planes, grads = channels_last(planes), channels_last(grads)
    total = x.new_zeros(tuple(shape))
    inside = Slide(slide.strides[1:], slide.dilations[1:], slide.groups)
    for tap in range(shape[2]):
        # Plane i of the gradient meets plane i * stride + offset of x, where there is one.
        offset, step = tap * slide.dilations[0] - padding[0], slide.strides[0]
        first = max(-(offset // step), 0)
        last = min((len(planes) - 1 - offset) // step + 1, len(grads))
        if first < last:
            seen = planes[first * step + offset : (last - 1) * step + offset + 1 : step]
            plane = (*shape[:2], *shape[3:])
            total[:, :, tap] = _of_planes(seen, grads[first:last], plane, padding[1:], inside)
    return total


def _of_planes(x: Tensor, dy: Tensor, shape: Sequence[int], padding: Sequence[int], slide: Slide) -> Tensor:
    w = x.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)  # its memory is never touched
    if len(x) == 1 and slide.groups == 1 and x.dtype == torch.float32:  # im2col would take a small plane
        x, dy = x.to_mkldnn(), dy.to_mkldnn()
    return conv_calls.weight_gradient(dy, x, w, padding, slide)


def of_groups(x: Tensor, dy: Tensor, shape: Sequence[int], padding: Sequence[int], slide: Slide) -> Tensor:
    """The gradient of weights of ``shape``, [g d, c, *window].

    Planes of taps are the faster for volumes that see each channel alone (32 channels of 48^3: 7 ms, not 42).
    """
    if len(shape) == 5 and shape[1] == 1 and x.dtype != torch.float64:
        return weight_gradient(x, dy, shape, padding, slide)
    # By the strides of one sample PyTorch may take x for planes, w not, and mix their orders up.
    x = channels_last(x) if has_channels_last(x) else x
    return conv_calls.weight_gradient(dy, x, empty_as(shape, x), padding, slide)
