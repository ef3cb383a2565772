"""Thin slabs of large volumes go to oneDNN: PyTorch alone would take im2col, 27 times their memory.

Gradients of weights with groups go there by the same planes, however the data lie in memory.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from oocdl.engines.convolution import Slide
from oocdl.engines.engine import get_engine
from oocdl.engines.torch.conv import thin_slab
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program_cost import program_scratch_bytes
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.ops.registry import RULES
from tests.kit.kernel_cases import noise
from tests.kit.programs import single

SLAB: Shape = (1, 4, 3, 40, 64)
ONES = (1, 1, 1)


def weight_grad(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Of a convolution of 4 to 2 channels, padded along the height and width."""
    w = torch.zeros(2, 4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(functional.conv3d(x, w, None, 1, (0, 1, 1)), w, dy)
    return grad


def attrs(**more: Any) -> dict[str, Any]:
    """Attributes of a window of 3."""
    return {"kernel_shape": (3, 3, 3), "strides": ONES, "pads": (0,) * 6, "dilations": ONES, **more}


Around = ((0, 0), (0, 0), (0, 0), (1, 1), (1, 1))
X = noise(*SLAB).astype("f4")
CASES = {
    "Conv": (
        [X, noise(2, 4, 3, 3, 3, seed=1).astype("f4")], attrs(), [Around, None],
        lambda x, w: functional.conv3d(x, w, None, 1, (0, 1, 1)),
    ),
    "ConvTranspose": (
        [X, noise(4, 2, 2, 2, 2, seed=1).astype("f4")],
        attrs(kernel_shape=(2, 2, 2), strides=(2, 2, 2)), None,
        lambda x, w: functional.conv_transpose3d(x, w, None, 2),
    ),
    "ConvWeightGrad": (
        [X, noise(1, 2, 1, 40, 64, seed=1).astype("f4")], attrs(), [Around, None], weight_grad,
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_thin_slab_is_right_and_takes_no_im2col(op: str) -> None:
    assert np.prod(SLAB[:4]) <= THIN_SLAB_ELEMENTS < np.prod(SLAB)
    arrays, attributes, pads, truth = CASES[op]
    wanted = truth(*(torch.from_numpy(array).double() for array in arrays)).numpy()
    program = single(op, arrays, [(wanted.shape, "float32")], attributes, pads)
    run = get_engine("torch").compile(program)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (found,) = run(arrays)
    names = {event.name for event in profile.events()}
    assert any("mkldnn" in name for name in names)
    assert not any("slow_conv" in name for name in names)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_work_space_counts_the_copies_of_thin_slabs() -> None:
    arrays, attributes, pads, _ = CASES["ConvWeightGrad"]
    program = single("ConvWeightGrad", arrays, [((2, 4, 3, 3, 3), "float32")], attributes, pads)
    # Each operand twice, once of them with channels rounded up to 16 by oneDNN.
    operands = arrays[0].size * (1 + 16 / 4) + arrays[1].size * (1 + 16 / 2)
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
