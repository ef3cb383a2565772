"""Convolutions of one tap, and strided ones whose regions end unevenly, as in residual networks: the torch
engine's own ways for them, in float32 with their channels last, against float64 autograd."""

from __future__ import annotations

import ctypes

import pytest
import torch

from oocdl.engines.torch.conv import compiled_gradient, dispatch, one_by_one
from oocdl.graph.ir.graph import Shape
from tests.kit.channels_last import Pads, counting, gradients, noise, ran
from tests.kit.kernels import error

TOLERANCE = 1e-5


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [(32, 16), (8, 24), (16, 4)], ids=str)
@pytest.mark.parametrize("space", [(7, 10), (4, 7, 5)], ids=str)
def test_one_tap(
    space: Shape, channels: tuple[int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("convolve", "transposed", "weight_gradient")
    made = [counting(monkeypatch, one_by_one, name) for name in names]
    inside, outside = channels
    rank = len(space)
    out = tuple((extent - 1) // stride + 1 for extent in space)
    seen = tuple((extent - 1) * stride + 1 for extent in out)  # as the cutter has it: what windows see
    x, w, dy = noise(2, inside, *seen), noise(outside, inside, *(1,) * rank), noise(2, outside, *out)
    pads: Pads = ((0, 0),) * rank
    wanted, dx, dw = gradients(x, w, dy, pads, stride)
    attrs = {"strides": (stride,) * rank, "dilations": (1,) * rank, "pads": (0,) * (2 * rank)}
    if outside >= 8:  # what has fewer channels is made as planes
        assert error(ran("Conv", [x, w], wanted.shape, attrs, pads), wanted) <= TOLERANCE
        grad = ran("ConvWeightGrad", [x, dy], w.shape, {**attrs, "kernel_shape": (1,) * rank}, pads)
        assert error(grad, dw) <= TOLERANCE
    for start, extent in ((0, seen[-1]), (1, 3), (2, 1)):  # boxes along the last axis
        shape = (*x.shape[:-1], extent)
        told = {**attrs, "spatial": x.shape[2:], "crop": (*(0,) * (rank + 1), start)}
        found = ran("ConvTranspose", [dy, w], shape, told, pads)
        assert error(found, dx[..., start : start + extent]) <= TOLERANCE
    assert len(made[1]) == 3 and len(made[0]) >= 1 and len(made[2]) == (outside >= 8)


@pytest.mark.parametrize(
    "pads", [((1, 0), (1, 0)), ((1, 0), (1, 1)), ((0, 1), (1, 0)), ((1, 0), (2, 0))], ids=str
)
def test_strided_window_at_an_uneven_end(pads: Pads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of three at every second place does not see the last padding: no padded copy is made."""
    monkeypatch.setattr(compiled_gradient, "loop_by_shape", lambda *_: None)
    copies = counting(monkeypatch, dispatch.F, "pad")
    x, w, dy = noise(2, 16, 8, 8), noise(16, 16, 3, 3), noise(2, 16, 4, 4)
    x = noise(2, 16, *(9 - sum(pair) for pair in pads))
    wanted, _, grad = gradients(x, w, dy, pads, 2)
    copies.clear()
    attrs = {"strides": (2, 2), "dilations": (1, 1), "pads": (99,) * 4}
    assert error(ran("Conv", [x, w], wanted.shape, attrs, pads), wanted) <= TOLERANCE
    found = ran("ConvWeightGrad", [x, dy], w.shape, {**attrs, "kernel_shape": (3, 3)}, pads)
    assert error(found, grad) <= TOLERANCE
    assert len(copies) == (0 if pads[0] == (1, 0) and pads[1] in ((1, 0), (1, 1)) else 2)


def test_few_samples_go_to_onednn_as_many_do(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch on one thread would take a product for one tap and fewer than 16 samples."""
    x, w, dy = noise(2, 32, 20, 20), noise(64, 32, 1, 1), noise(2, 64, 20, 20)
    attrs = {"strides": (1, 1), "dilations": (1, 1), "pads": (0,) * 4}
    pads: Pads = ((0, 0),) * 2
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
        ran("Conv", [x, w], dy.shape, attrs, pads)
        ran("ConvTranspose", [dy, w], x.shape, {**attrs, "spatial": x.shape[2:], "crop": (0,) * 4}, pads)
        ran("ConvWeightGrad", [x, dy], w.shape, {**attrs, "kernel_shape": (1, 1)}, pads)
        ctypes.CDLL(None).fflush(None)
    kinds = [
        line.split(",")[7].split("_")[0]
        for line in capfd.readouterr().out.splitlines()
        if ",exec,cpu,convolution" in line
    ]
    assert kinds == ["forward", "forward", "backward"]
