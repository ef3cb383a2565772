"""Thin slabs of large volumes go to oneDNN: PyTorch alone would take im2col, 27 times their memory.

Gradients of weights with groups go there by the same planes, however the data lie in memory.
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from oocdl.engines.convolution import Slide
from oocdl.engines.torch.conv import thin_slab
from oocdl.graph.ir.program_cost import program_scratch_bytes
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.ops.registry import RULES
from tests.kit.random_convolutions import Convolution, check, plain, runs

ONES = (1, 1, 1)
SLAB = Convolution((4, 2), (3, 40, 64), (3, 3, 3), ((0, 0), (1, 1), (1, 1)), ONES, ONES, is_turned=False)
BLOCKS = plain((2, 4), (6, 80, 128), (2, 2, 2), 0, 2)._replace(is_turned=False)
CASES = {"Conv": (SLAB, 0), "ConvTranspose": (BLOCKS, 1), "ConvWeightGrad": (SLAB, 2)}


@pytest.mark.parametrize("op", CASES)
def test_thin_slab_is_right_and_takes_no_im2col(op: str) -> None:
    case, place = CASES[op]
    run = runs(case, "float32")[place]
    assert run.arrays[0].shape == (1, 4, 3, 40, 64) and 4 * 3 * 40 <= THIN_SLAB_ELEMENTS < 4 * 3 * 40 * 64
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        check(run)
    names = {event.name for event in profile.events()}
    assert any("mkldnn" in name for name in names)
    assert not any("slow_conv" in name for name in names)


def test_work_space_counts_the_copies_of_thin_slabs() -> None:
    program, (x, dy), _ = runs(SLAB, "float32")[2]
    # Each operand twice, once of them with channels rounded up to 16 by oneDNN.
    operands = x.size * (1 + 16 / 4) + dy.size * (1 + 16 / 2)
    assert program_scratch_bytes(program, RULES) >= 4 * operands


def lying(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
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
