"""``fit(loss="ctc")``: lengths are arrays of the dataset, and steps are PyTorch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oocdl
from oocdl.errors import DatasetError
from oocdl.losses import CTC
from oocdl.optim import SGD
from tests.kit.nets import write_data
from tests.kit.runs import in_torch, losses_of, trained_as
from tests.kit.settings import EXACT

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")

SAMPLES, STEPS = 4, 3
LENGTHS = ("labels", "input_lengths", "target_lengths")


class Speech(nn.Module):
    """A convolution, a GRU in both directions, and the scores of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3, stride=2, padding=1)
        self.layer = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(self.conv(x).relu().transpose(1, 2))
        result: Tensor = self.out(y)
        return result


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(SAMPLES, 3, 20)),
        "labels": random.integers(1, 4, (SAMPLES, 4)).astype("u1"),
        "target_lengths": np.array([4, 2, 0, 3], "i4"),
        "input_lengths": np.array([10, 8, 10, 9], "u1"),
    }


def fit(module: nn.Module, folder: Path, **options: Any) -> oocdl.Run:
    settings = {**EXACT, "loss": "ctc", "optimizer": SGD(lr=0.05), "steps": STEPS, "batch_size": SAMPLES}
    settings |= {"parallel": {"batch": 2}, **options}
    return oocdl.fit(module, folder / "data.zarr", workdir=folder / "net.run", **settings)


def trained(module: nn.Module, data: dict[str, np.ndarray]) -> list[float]:
    """Losses of PyTorch's steps."""
    given = {
        name: torch.as_tensor(array.astype("i8" if array.dtype.kind in "iu" else "f8"))
        for name, array in data.items()
    }

    def loss() -> Tensor:
        chances = module(given["x"]).log_softmax(2).transpose(0, 1)
        found: Tensor = nn.CTCLoss()(chances, *(given[name] for name in LENGTHS))
        return found

    return in_torch(torch.optim.SGD(module.parameters(), lr=0.05), STEPS * [[loss]])


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        ("ctc", {}),
        (CTC(target_lengths="n", input_lengths="frames"), {"target_lengths": "n", "input_lengths": "frames"}),
    ],
    ids=["usual names", "given names"],
)
def test_trains_as_pytorch_does(loss: Any, names: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Speech().double()
    write_data(tmp_path / "data.zarr", {names.get(name, name): array for name, array in arrays().items()})
    run = fit(module, tmp_path, loss=loss)
    twin = copy.deepcopy(module)
    np.testing.assert_allclose(losses_of(run), trained(twin, arrays()), rtol=1e-9)
    trained_as(run, twin, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({"labels": np.full((SAMPLES, 4), 4)}, {}, "label 4 in sample"),
        ({"target_lengths": np.full(SAMPLES, 5)}, {}, "length 5 in sample"),
        ({"input_lengths": np.full(SAMPLES, 11)}, {}, "length 11 in sample"),
        ({"input_lengths": np.full(SAMPLES, 9.0)}, {}, "whole-number lengths"),
        ({"input_lengths": np.full(SAMPLES + 1, 9)}, {}, "number of samples"),
        ({}, {"loss": CTC(input_lengths="frames")}, "'frames', the dataset has"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    changes: dict[str, np.ndarray], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    write_data(tmp_path / "data.zarr", {**arrays(), **changes})
    with pytest.raises(DatasetError, match=why):
        fit(Speech().double(), tmp_path, **options)
