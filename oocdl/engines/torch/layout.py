"""Tensors with their channels last, in strides by which PyTorch recognizes them.

The stride of an axis of one element does not matter to memory, but PyTorch goes by it, and takes a
tensor of one sample for planes if the stride is not what it would be with more samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def has_channels_last(x: Tensor) -> bool:
    """Whether the channels of each place lie side by side."""
    return x.dim() in _FORMATS and (x.shape[1] == 1 or x.stride(1) == 1)


def channels_last(x: Tensor) -> Tensor:
    """``x[n, c, *space]`` with the channels of a place side by side, copied if they are not."""
    if not has_channels_last(x):
        x = x.contiguous(memory_format=_FORMATS[x.dim()])
    shape = x.shape
    if 1 not in shape:
        return x
    strides, next_one = list(x.stride()), 1
    for axis in (1, *range(x.dim() - 1, 1, -1), 0):
        if shape[axis] == 1:
            strides[axis] = next_one
        next_one = strides[axis] * shape[axis]
    return x.as_strided(shape, strides)


def dense(x: Tensor) -> Tensor:
    """``x`` without gaps, copied if it has any, its channels where they are."""
    if has_channels_last(x):
        return channels_last(x.contiguous(memory_format=_FORMATS[x.dim()]))
    return x.contiguous()


def like(w: Tensor, x: Tensor) -> Tensor:
    """Weights in the order of the data that they meet: kernels would make a copy of their own."""
    return channels_last(w) if has_channels_last(x) else w.contiguous()


def empty_as(shape: Sequence[int], like: Tensor) -> Tensor:
    """A new tensor of ``shape`` in the memory order of ``like``, not set."""
    if not has_channels_last(like):
        return like.new_empty(tuple(shape))
    return like.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)
