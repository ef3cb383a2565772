"""The gradient of the weights of a 3D convolution of a thin slab, plane by plane of its taps.

PyTorch leaves a thin slab to oneDNN only in a format of its own, into which both operands are copied
(16 channels, 9 x 128 x 128: 33 MiB, and 35 ms of 42). The planes of a slab are a batch to a convolution
of two dimensions, which takes them as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oocdl.engines.torch.layout import channels_last, has_channels_last

aten = torch.ops.aten


def weight_gradient(
    x: Tensor,
    dy: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """The gradient of weights of ``shape`` from one sample, ``x[1, c, *space]`` and ``dy[1, d, *space]``."""
    planes, grads = (tensor[0].movedim(1, 0) for tensor in (x, dy))
    if has_channels_last(x) and has_channels_last(dy):
        planes, grads = channels_last(planes), channels_last(grads)
    total = x.new_zeros(tuple(shape))
    for tap in range(shape[2]):
        # Plane i of the gradient meets plane i * stride + offset of x, where there is one.
        offset, step = tap * dilations[0] - padding[0], strides[0]
        first = max(-(offset // step), 0)
        last = min((len(planes) - 1 - offset) // step + 1, len(grads))
        if first < last:
            seen = planes[first * step + offset : (last - 1) * step + offset + 1 : step]
            total[:, :, tap] = _of_planes(
                seen,
                grads[first:last],
                (*shape[:2], *shape[3:]),
                strides[1:],
                padding[1:],
                dilations[1:],
                groups,
            )
    return total


def _of_planes(
    x: Tensor,
    dy: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Tensor:
    w = x.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)  # its memory is never touched
    if len(x) == 1 and groups == 1:  # a small plane alone would be taken by im2col
        x, dy = x.to_mkldnn(), dy.to_mkldnn()
    made: Tensor = aten.convolution_backward(
        dy, x, w, None, strides, padding, dilations, False, [0, 0], groups, [False, True, False]
    )[1]
    return made
