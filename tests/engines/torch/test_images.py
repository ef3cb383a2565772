"""Convolutions of one tap, and strided ones whose regions end unevenly, as in residual networks: the torch
engine's own ways for them, in float32 with their channels last, against float64 autograd."""

from __future__ import annotations

import ctypes

import pytest
import torch

from oocdl.engines.torch.conv import compiled_gradient, dispatch, one_by_one
from oocdl.graph.ir.graph import Shape
from tests.kit.kernels import counting, turned
from tests.kit.programs import Pads, single
from tests.kit.random_convolutions import Convolution, Run, check, plain, runs


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [(32, 16), (8, 24), (16, 4)], ids=str)
@pytest.mark.parametrize("space", [(7, 10), (4, 7, 5)], ids=str)
def test_one_tap(
    space: Shape, channels: tuple[int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("convolve", "transposed", "weight_gradient")
    made = [counting(monkeypatch, one_by_one, name) for name in names]
    seen = tuple((extent - 1) // stride * stride + 1 for extent in space)  # as the cutter has it
    convolved, (whole, arrays, dx), weight_grad = runs(
        plain(channels, seen, (1,) * len(space), 0, stride)._replace(batch=2), "float32"
    )
    has_blocks = channels[1] >= 8  # what has fewer channels is made as planes
    if has_blocks:
        check(convolved)
        check(weight_grad)
    for start, extent in ((0, seen[-1]), (1, 3), (2, 1)):  # boxes along the last axis
        box = dx[..., start : start + extent]
        attrs = {**whole.instructions[0].attrs, "crop": (*(0,) * (len(space) + 1), start)}
        key = f"{whole.key} from {start}"
        part = single("ConvTranspose", arrays, [(box.shape, "float32")], attrs, key=key)
        check(Run(turned(part), arrays, box))
    assert len(made[1]) == 3 and len(made[0]) >= 1 and len(made[2]) == has_blocks


@pytest.mark.parametrize(
    "pads", [((1, 0), (1, 0)), ((1, 0), (1, 1)), ((0, 1), (1, 0)), ((1, 0), (2, 0))], ids=str
)
def test_strided_window_at_an_uneven_end(pads: Pads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of three at every second place does not see the last padding: no padded copy is made."""
    monkeypatch.setattr(compiled_gradient, "loop_by_shape", lambda *_: None)
    space = tuple(9 - sum(pair) for pair in pads)
    convolved, _, weight_grad = runs(
        Convolution((16, 16), space, (3, 3), pads, (2, 2), (1, 1), batch=2), "float32"
    )
    copies = counting(monkeypatch, dispatch.F, "pad")
    check(convolved)
    check(weight_grad)
    assert len(copies) == (0 if pads[0] == (1, 0) and pads[1] in ((1, 0), (1, 1)) else 2)


def test_few_samples_go_to_onednn_as_many_do(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch on one thread would take a product for one tap and fewer than 16 samples."""
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
        for run in runs(plain((32, 64), (20, 20), (1, 1), 0)._replace(batch=2), "float32"):
            check(run)
        ctypes.CDLL(None).fflush(None)
    called = [line for line in capfd.readouterr().out.splitlines() if ",exec,cpu,convolution" in line]
    kinds = [line.split(",")[7].split("_")[0] for line in called]
    assert kinds == ["forward", "forward", "backward"]
