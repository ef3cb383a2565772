"""Modules trained by ``fit(module)`` are what PyTorch makes of them: losses, state_dict, predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import oocdl
from oocdl.losses import CrossEntropy
from tests.kit.nets import write_data
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT
from tests.kit.torch_modules import CASES, Arrays, Case, check


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
