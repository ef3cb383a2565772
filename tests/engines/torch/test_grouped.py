"""Gradients of convolutions with groups, of data that lie in any order in memory."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.engines.torch.conv import thin_slab


def lying(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """``x`` with its axes from outermost to innermost in memory; one sample has the stride of its place."""
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("taps", [(3, 3), (1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("samples", [1, 2])
def test_any_order_in_memory_gives_the_same_numbers(
    samples: int, taps: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(samples, 6, 5, 5, dtype=torch.float64)
    w = torch.randn(4, 3, *taps, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, stride=2, groups=2)
    dy = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, w, dy)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    for order in permutations(range(4)):
        lies = lying(x, order).to(dtype), dy.to(dtype)
        found = thin_slab.of_groups(*lies, w.shape, (0, 0), Slide((2, 2), (1, 1), 2))
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
