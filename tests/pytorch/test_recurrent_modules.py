"""Recurrent modules trained by ``fit(module)`` are what PyTorch makes of them, cut in time and batch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oocdl.graph.onnx.lower import lower_sequences
from tests.kit.torch_modules import Case, check, sequences


class Layers(nn.Module):
    """Two layers in both directions; what they return last counts, too."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(8, 5, 2, batch_first=True, bidirectional=True, **options)
        self.out = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.layers(x)
        kept = last[0] * last[1] if isinstance(last, tuple) else last
        result: Tensor = self.out(y) + kept.sum((0, 2))[:, None, None]
        return result


class Started(nn.Module):
    """One direction, time first, from a state that is learnt; only the last state is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(8, 6, bias=False)
        self.start = nn.Parameter(torch.randn(1, 1, 6))
        self.out = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(1, x.shape[0], 6)
        both = (start, torch.tanh(start)) if isinstance(self.layer, nn.LSTM) else start
        _, last = self.layer(x.transpose(0, 1), both)
        h = last[0] if isinstance(last, tuple) else last
        result: Tensor = self.out(h[0])[:, None].expand(x.shape)
        return result


CASES = {
    "LSTM": lambda: Layers("LSTM"),
    "GRU": lambda: Layers("GRU"),
    "RNN": lambda: Layers("RNN", nonlinearity="relu"),
    "LSTM from a learnt state": lambda: Started("LSTM"),
    "GRU from a learnt state": lambda: Started("GRU"),
}


SLOW = ("RNN", "GRU from a learnt state")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_trains_as_pytorch_does_by_segments_of_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_sequences, "SEGMENT_ELEMENTS", 30)
    check(Case(CASES[name], sequences(length=4)), tmp_path)


def test_trains_as_pytorch_does_cut_in_the_batch(tmp_path: Path) -> None:
    check(Case(CASES["LSTM"], sequences(), options={"parallel": {"batch": 3}}), tmp_path)
