"""Small networks that do something with the sizes of their inputs, most of them what exporters get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, OTHER = (8, 8), (16, 12)
"""Of the images that a network is exported for, and of others."""


class Sized(nn.Module):
    """A convolution, a function of what it makes, and a convolution of one voxel."""

    def __init__(self, middle: Callable[[Tensor], Tensor], channels: int = 3) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(1, 3, 3, padding=1), middle
        self.last = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.middle(self.first(x)))
        return made


def _attention(x: Tensor) -> Tensor:
    rows = x.flatten(2).transpose(1, 2)
    made = F.scaled_dot_product_attention(rows, rows, rows)
    return made.transpose(1, 2).reshape(x.shape)


def _levels(x: Tensor) -> Tensor:
    small = F.relu(F.max_pool2d(x, 2))
    return x + F.interpolate(small, size=x.shape[2:], mode="bilinear", align_corners=False)


def _to_sixteen(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[3] % 16, 0, -x.shape[2] % 16))


def _columns(x: Tensor) -> Tensor:
    return torch.stack([x[..., column] for column in range(x.shape[3])]).cumsum(0).movedim(0, 3)


NETWORKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a sum divided by h w": lambda x: x * (x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3])),
    "divided by the root of h w": lambda x: x / math.sqrt(x.shape[2] * x.shape[3]),
    "AdaptiveAvgPool2d(4)": lambda x: F.adaptive_avg_pool2d(x, 4),
    "AdaptiveAvgPool2d(1)": lambda x: x * F.adaptive_avg_pool2d(x, 1),
    "AdaptiveMaxPool2d(2)": lambda x: F.adaptive_max_pool2d(x, 2),
    "the upper half": lambda x: x[:, :, : x.shape[2] // 2],
    "without a border": lambda x: x[:, :, 1:-1, 1:-1],
    "the first five": lambda x: x[:, :, :5, :5],
    "a reflecting border": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
    "a circular border": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "half the size, by size": lambda x: F.interpolate(x, size=(x.shape[2] // 2, x.shape[3] // 2)),
    "twice the size, by scale": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "down and up again": _levels,
    "padded to a multiple of 16": _to_sixteen,
    "twice where it is large": lambda x: 2 * x if x.shape[2] > 12 else x,
    "a loop over columns": _columns,
    "LayerNorm over space": lambda x: F.layer_norm(x, x.shape[2:]),
    "attention over places": _attention,
    "a grid of places": lambda x: x + torch.linspace(-1, 1, x.shape[3], dtype=x.dtype),
    "rolled by half": lambda x: x.roll(x.shape[2] // 2, 2),
    "the last row": lambda x: x + x[:, :, x.shape[2] - 1 :],
}
"""By what the middle does; it keeps three channels."""


def network(name: str) -> nn.Module:
    """One of them, in float64."""
    torch.manual_seed(0)
    return Sized(NETWORKS[name]).double()
