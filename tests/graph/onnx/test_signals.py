"""Transforms by known matrices: values and gradients are PyTorch's, in every cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.graph.onnx.folding.known_arrays import window
from tests.kit import lowered
from tests.kit.one_node import OneNode, check

RANDOM = np.random.default_rng(0)
COMPLEX = RANDOM.normal(size=(2, 6, 3, 2))
REAL = COMPLEX[..., :1]
HALF = COMPLEX[:, :4].copy()
HALF[:, ::3, :, 1] = 0  # as the spectrum of real numbers has it
SIGNAL, HANN = RANDOM.normal(size=(2, 23, 1)), torch.hann_window(8, dtype=torch.float64)


def spectrum(**options: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The transform along axis 1 of what has its parts last."""

    def run(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
        return torch.view_as_real(torch.fft.fft(z, dim=1, **options))

    return run


def back(x: torch.Tensor) -> torch.Tensor:
    """Real numbers, of one half of their spectrum."""
    return torch.fft.irfft(torch.view_as_complex(x.contiguous()), dim=1)[..., None]


def frames(x: torch.Tensor) -> torch.Tensor:
    """Spectra of frames, [N, frames, frequencies, 2]."""
    made = torch.stft(x[..., 0], 8, 3, window=HANN, center=False, return_complex=True)
    return torch.view_as_real(made).transpose(1, 2)


def grid(corners: bool, *size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The grid of PyTorch."""
    return lambda x: F.affine_grid(x, list(size), align_corners=corners)


CASES = [
    OneNode("DFT", spectrum(), [COMPLEX, None, np.array(1)]),
    OneNode("DFT", spectrum(n=4), [COMPLEX, np.array(4), np.array(1)]),
    OneNode("DFT", spectrum(n=9), [REAL, np.array(9), np.array(1)]),
    OneNode("DFT", lambda x: spectrum()(x)[:, :4], [REAL, None, np.array(1)], {"onesided": 1}),
    OneNode(
        "DFT",
        lambda x: torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x.contiguous()), dim=1)),
        [COMPLEX, None, np.array(1)],
        {"inverse": 1},
    ),
    OneNode("DFT", back, [HALF, None, np.array(1)], {"inverse": 1, "onesided": 1}),
    OneNode("DFT", spectrum(), [REAL], {"axis": 1}, opset=17),
    OneNode("AffineGrid", grid(False, 2, 1, 3, 4), [RANDOM.normal(size=(2, 2, 3)), np.array([2, 1, 3, 4])]),
    OneNode(
        "AffineGrid",
        grid(True, 2, 1, 3, 1, 2),
        [RANDOM.normal(size=(2, 3, 4)), np.array([2, 1, 3, 1, 2])],
        {"align_corners": 1},
    ),
]


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_frames_of_a_window_are_pytorchs(tmp_path: Path) -> None:
    constants = {"step": np.array(3), "window": HANN.numpy(), "length": np.array(8)}
    node = helper.make_node("STFT", ["x", *constants], ["y"], name="n")
    model = lowered.model_of([node], {"x": SIGNAL}, ["y"], constants)
    lowered.check(model, {"x": SIGNAL}, frames, tmp_path, counts=(1, 3), tolerances=(1e-7, 2e-5))


@pytest.mark.parametrize("periodic", [True, False])
def test_windows_are_pytorchs(periodic: bool) -> None:
    hann, hamming, blackman = (
        window(op, 9, periodic) for op in ("HannWindow", "HammingWindow", "BlackmanWindow")
    )
    np.testing.assert_allclose(hann, torch.hann_window(9, periodic, dtype=torch.float64), atol=1e-12)
    np.testing.assert_allclose(blackman, torch.blackman_window(9, periodic, dtype=torch.float64), atol=1e-12)
    wanted = torch.hamming_window(9, periodic, 25 / 46, 21 / 46, dtype=torch.float64)  # ONNX's are not 0.54
    np.testing.assert_allclose(hamming, wanted, atol=1e-12)
