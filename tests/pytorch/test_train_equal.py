"""Modules trained by ``fit(module)`` are what PyTorch makes of them: losses, state_dict, predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import oocdl
from oocdl.graph.onnx.lower import lower_sequences
from oocdl.losses import CrossEntropy
from tests.kit.nets import write_data
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT
from tests.kit.torch_modules import CASES, Arrays, Case, check, sequences


@pytest.mark.parametrize("name", CASES)
def test_trains_as_pytorch_does(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


@pytest.mark.parametrize(("groups", "engine"), [(1, "torch"), (2, "torch"), (4, "onnxruntime")])
def test_groups_of_channels_in_volumes_may_be_normalised(groups: int, engine: str, tmp_path: Path) -> None:
    # In float32, eight channels and more lie last in memory, where a norm of groups sees them in two axes.
    convolutions = nn.Conv3d(1, 16, 3, padding=1), nn.Conv3d(16, 1, 3, padding=1)
    module = nn.Sequential(convolutions[0], nn.GroupNorm(groups, 16), nn.ReLU(), convolutions[1])
    x = torch.randn(3, 1, 9, 10, 11)
    write_data(tmp_path / "data.zarr", {"x": x.numpy(), "target": x.numpy()})
    run = oocdl.fit(
        module, tmp_path / "data.zarr", workdir=tmp_path / "net.run", inputs={"input": "x"},
        **{**EXACT, "loss": "mse", "batch_size": 3, "precision": "float32", "engine": engine},
    )  # fmt: skip
    np.testing.assert_allclose(losses_of(run), mse_loss(module(x), x).item(), rtol=1e-6)


class Translate(nn.Module):
    """``nn.Transformer`` with a causal mask that is made in its forward, and masks for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, padding_idx=0)
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.net.encoder.use_nested_tensor = False  # PyTorch warns that these are a prototype
        self.out = nn.Linear(8, 9)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        made: Tensor = self.out(
            self.net(
                self.words(x),
                self.words(before),
                tgt_mask=torch.ones(before.shape[1], before.shape[1], dtype=torch.bool).triu(1),
                src_key_padding_mask=x == 0,
                tgt_key_padding_mask=before == 0,
                memory_key_padding_mask=x == 0,
            )
        )
        return made


def _sentences(random: np.random.Generator) -> Arrays:
    x, before = random.integers(1, 9, (3, 5)), random.integers(1, 9, (3, 4))
    x[0, 3:], before[1, 2:] = 0, 0
    return {"x": x, "before": before, "target": random.integers(0, 9, (3, 4))}


@pytest.mark.slow
def test_masks_made_by_the_module_are_no_reason_to_refuse_a_transformer(tmp_path: Path) -> None:
    case = Case(
        lambda: Translate().double(),
        _sentences,
        CrossEntropy(ignore_index=0),
        lambda y, data: cross_entropy(y.flatten(0, 1), data["target"].flatten(), ignore_index=0),
        ("x", "before"),
    )
    check(case, tmp_path)


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


RECURRENT = {
    "LSTM": lambda: Layers("LSTM"),
    "GRU": lambda: Layers("GRU"),
    "RNN": lambda: Layers("RNN", nonlinearity="relu"),
    "LSTM from a learnt state": lambda: Started("LSTM"),
    "GRU from a learnt state": lambda: Started("GRU"),
}


SLOW = ("RNN", "GRU from a learnt state")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RECURRENT]
)
def test_trains_as_pytorch_does_by_segments_of_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_sequences, "SEGMENT_ELEMENTS", 30)
    check(Case(RECURRENT[name], sequences(length=4)), tmp_path)


def test_trains_as_pytorch_does_cut_in_the_batch(tmp_path: Path) -> None:
    check(Case(RECURRENT["LSTM"], sequences(), options={"parallel": {"batch": 3}}), tmp_path)
