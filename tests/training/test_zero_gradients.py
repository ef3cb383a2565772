"""What PyTorch counts and decays, although no gradient comes back: zeros are no None, passes are no steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oocdl
from oocdl.optim import SGD
from tests.kit.nets import write_data
from tests.kit.settings import EXACT
from tests.kit.torch_modules import Case, check, vectors

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")


class Stairs(nn.Module):
    """Linear layers whose gradients are zeros, and one that is only compared, whose gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.stairs = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))
        self.compared = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = (torch.sign, torch.floor, torch.ceil, torch.round, lambda y: y.clamp(2.0, 1.0))
        made: Tensor = self.out(x)
        for step, layer in zip(steps, self.stairs, strict=True):
            made = made + step(layer(x))
        return made + (self.compared(x) > 0).to(x.dtype)


def test_weights_behind_steps_are_decayed_as_pytorch_does(tmp_path: Path) -> None:
    check(Case(Stairs, vectors()), tmp_path)


@pytest.mark.parametrize(
    ("accumulate", "steps", "passes"), [(1, 5, 5), (2, 2, 3), (2, 3, 5), (9, 3, 9)], ids=str
)
def test_batches_are_counted_by_passes(accumulate: int, steps: int, passes: int, tmp_path: Path) -> None:
    """Six samples in batches of two are three passes an epoch, its last step has what is left of them."""
    arrays = {"x": np.ones((6, 6)), "target": np.ones((6, 6))}
    data = write_data(tmp_path / "data.zarr", arrays)
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    options = {**EXACT, "loss": "mse", "optimizer": SGD(lr=0.1), "inputs": {"input": "x"}}
    options |= {"batch_size": 2, "accumulate": accumulate, "steps": steps, "targets": {"output": "target"}}
    oocdl.fit(module, data, workdir=tmp_path / "run", **options).load_into(module)
    assert int(module[0].num_batches_tracked) == passes
