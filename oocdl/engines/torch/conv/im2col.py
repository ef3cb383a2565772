"""3D convolutions of very few channels as matrix products, a plane of the result at a time.

Where there is next to nothing to sum over but the window itself, as on the first layer of a network,
oneDNN reaches 12 GFLOP/s of a core (1 to 16 channels, 3^3). What the windows of one plane see is put side
by side instead (im2col), which stays in the cache, and is multiplied with all weights at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from oocdl.engines.convolution import Slide

MOST_TAPS = 64
"""Channels x elements of the window up to which this is faster: 3^3 of one or two channels."""


def has_few_taps(weight_shape: Sequence[int], slide: Slide, dtype: object) -> bool:
    """Whether a convolution with such weights, of data of ``dtype``, is faster by im2col."""
    if len(weight_shape) != 5 or set(slide.strides) != {1} or slide.groups > 1 or "bfloat16" in str(dtype):
        return False
    return prod(weight_shape[2:]) > 1 and prod(weight_shape[1:]) <= MOST_TAPS


def _planes(x: Tensor, kernel: Sequence[int], dilations: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """(sample, plane, what its windows see) of ``x[n, c, *space]``, padded: [taps, places], in one buffer."""
    spans = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    depth, *plane = (extent - span for extent, span in zip(x.shape[2:], spans, strict=True))
    shape = (x.shape[1], *kernel, *plane)
    steps = x.stride()[2:]
    apart = [step * dilation for step, dilation in zip(steps, dilations, strict=True)]
    columns = x.new_empty(shape)
    for sample in range(x.shape[0]):
        for place in range(depth):
            seen = x[sample, :, place:]
            columns.copy_(seen.as_strided(shape, (x.stride(1), *apart, *steps[1:])))
            yield sample, place, columns.view(shape[0] * prod(kernel), -1)


def convolve(x: Tensor, w: Tensor, dilations: Sequence[int]) -> Tensor:
    """The convolution of padded ``x`` with ``w[d, c, *window]``; the result has its channels last."""
    weights = w.flatten(1).t()
    extents = [n - d * (k - 1) for n, k, d in zip(x.shape[2:], w.shape[2:], dilations, strict=True)]
    result = x.new_empty((x.shape[0], *extents, w.shape[0]))
    for sample, place, columns in _planes(x, w.shape[2:], dilations):
        torch.mm(columns.t(), weights, out=result[sample, place].flatten(0, 1))
    return result.movedim(-1, 1)


def weight_gradient(x: Tensor, dy: Tensor, shape: Sequence[int], dilations: Sequence[int]) -> Tensor:
    """The gradient of weights of ``shape``; ``dy[n, d, *space]`` is best with its channels last."""
    total = x.new_zeros((shape[0], prod(shape[1:])))
    grads = dy.movedim(1, -1)
    for sample, place, columns in _planes(x, shape[2:], dilations):
        total.addmm_(grads[sample, place].flatten(0, 1).t(), columns.t())
    return total.reshape(tuple(shape))
