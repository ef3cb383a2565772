"""Kernels of the torch engine's own for float32 volumes with their channels last, against float64 autograd.

First layers as matrix products of columns, and convolutions padded on one side more than on the other,
as at the ends of a volume. Each case asserts that it has gone the way that is meant.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from oocdl.engines.torch.conv import dispatch, im2col
from oocdl.graph.ir.graph import Shape
from tests.kit.kernels import counting
from tests.kit.programs import Pads
from tests.kit.random_convolutions import Convolution, check, runs

ONES = (1, 1, 1)
EVEN: Pads = ((1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize("pads", [EVEN, ((1, 0), (0, 2), (1, 1)), ((0, 0),) * 3], ids=("even", "odd", "none"))
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("channels", [1, 2])
def test_first_layers(channels: int, dilation: int, pads: Pads, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [counting(monkeypatch, im2col, name) for name in ("convolve", "weight_gradient")]
    case = Convolution((channels, 16), (7, 8, 9), (3, 3, 3), pads, ONES, (dilation,) * 3, batch=2)
    for run in runs(case, "float32"):
        check(run)
    assert [len(calls) for calls in made] == [1, 1]


# Windows of three and of five along the depth; wide enough for oneDNN by our hand, and by PyTorch's.
ENDS = [
    pytest.param((batch, 3, 20, 9, width), window, pads, id=f"{batch}x{width}-{window}-{pads[0]}{pads[1]}")
    for batch, width in ((1, 64), (2, 9))
    for window, pads in (
        (3, (1, 0)), (3, (0, 1)), (3, (2, 1)), (5, (2, 0)), (5, (0, 2)), (5, (1, 2)), (5, (2, 1)),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "window", "pads"),
    [(1, 2, (2, 0)), (1, 3, (2, 1)), (2, 3, (0, 2)), (3, 2, (0, 3)), (4, 5, (4, 1)), (1, 1, (1, 0))],
)
def test_windows_that_see_nothing_but_padding(depth: int, window: int, pads: tuple[int, int]) -> None:
    """At ends of a volume that are thinner than a window, or padded by more than one sees."""
    around = (pads, (1, 1), (1, 1))
    for run in runs(Convolution((16, 16), (depth, 6, 7), (window, 3, 3), around, ONES, ONES), "float32"):
        check(run)


def check_ends(made: list[Tensor], ends: list[Tensor], wanted: Shape, depth: tuple[int, int]) -> None:
    """No operand was padded by a copy."""
    if wanted[0] == 1:
        assert len(ends) == 1 and not made, "one sample is made where it belongs, its ends by themselves"
    else:
        assert made[0].shape[2] == wanted[2] + abs(depth[0] - depth[1]), "too much is made, and cut off"


@pytest.mark.parametrize(("shape", "window", "depth"), ENDS)
def test_convolution_and_gradient_of_the_weights_at_the_end_of_a_volume(
    shape: Shape, window: int, depth: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("_convolve", "_row_by_row", "_with_ends")
    made, ends, apart = (counting(monkeypatch, dispatch, name) for name in names)
    pads = (depth, (1, 1), (1, 1))
    case = Convolution((3, 16), shape[2:], (window, 3, 3), pads, ONES, ONES, shape[0])
    convolved, _, weight_grad = runs(case, "float32")
    check(convolved)
    check_ends(made, ends, convolved.wanted.shape, depth)
    check(weight_grad)
    assert len(apart) == 1


@pytest.mark.parametrize(("shape", "window", "depth"), ENDS)
def test_gradient_of_the_data_at_the_end_of_a_volume(
    shape: Shape, window: int, depth: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab at an end sees fewer windows there than at its other end: the crop is uneven."""
    made, ends = (counting(monkeypatch, dispatch, name) for name in ("_convolve", "_row_by_row"))
    reach = window - 1
    pads = ((reach - depth[0], reach - depth[1]), (1, 1), (1, 1))
    space = (20 + reach - sum(pads[0]), *shape[3:])
    case = Convolution((3, 16), space, (window, 3, 3), pads, ONES, ONES, shape[0])
    transposed = runs(case, "float32")[1]
    check(transposed)
    check_ends(made, ends, transposed.wanted.shape, depth)
