"""Convolutions with groups in PyTorch, whose kernels are fastest for images with their channels last.

Depthwise, 96 channels of 112 x 112, 3 x 3: 0.22 ms, and 6.5 of planes. Lines are images of one row, which is
faster (4 x 256 channels of 500, 15: 1.9 ms, not 3.8). The gradient of weights of volumes that see each
channel alone is taken by planes of taps (``thin_slab``; 32 channels of 48^3: 7 ms, not 42).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oocdl.engines.torch.conv import thin_slab
from oocdl.engines.torch.layout import channels_last, empty_as, has_channels_last

aten = torch.ops.aten


def convolve(
    x: Tensor,
    w: Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Tensor:
    """The convolution of ``x[n, g c, *space]`` with ``w[g d, c, *window]``."""
    if w.dim() == 3:
        image = channels_last(x.unsqueeze(2))
        wide = convolve(image, w.unsqueeze(2), [1, *strides], [0, *padding], [1, *dilations], groups)
        return wide.squeeze(2)
    kernel = F.conv2d if w.dim() == 4 else F.conv3d
    return kernel(x, w, None, strides, padding, dilations, groups)


def weight_gradient(
    x: Tensor,
    dy: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of weights of ``shape``, [g d, c, *window]."""
    if len(shape) == 5 and shape[1] == 1 and x.dtype != torch.float64:
        total = x.new_zeros(tuple(shape), dtype=torch.float32)
        for sample in range(x.shape[0]):
            one = slice(sample, sample + 1)
            total += thin_slab.weight_gradient(x[one], dy[one], shape, strides, padding, dilations, groups)
        return total
    # By the strides of one sample PyTorch may take x for planes, w not, and mix their orders up.
    x = channels_last(x) if has_channels_last(x) else x
    made: Tensor = aten.convolution_backward(
        *(dy, x, empty_as(shape, x), None, strides, padding, dilations, False, [0] * len(strides)),
        *(groups, [False, True, False]),
    )[1]
    return made
