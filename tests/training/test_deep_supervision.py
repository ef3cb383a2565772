"""Deep supervision and weights of samples in whole runs, beside PyTorch, in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oocdl
from oocdl.errors import DatasetError, InputError
from oocdl.losses import CrossEntropy, DeepSupervision
from oocdl.optim import SGD
from tests.kit.nets import vectors, write_data
from tests.kit.runs import in_torch, losses_of, trained_as
from tests.kit.settings import EXACT

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")

CUTS: dict[str, Any] = {"whole": "auto", "batch": {"batch": 2}, "space": {"space": (3,)}}


class Levels(nn.Module):
    """A U-Net in small: outputs of the whole size, a half and a quarter (rounded up), the largest first."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Conv2d(inside, 4, 3, stride=stride, padding=1) for inside, stride in ((1, 1), (4, 2), (4, 2))
        )
        self.heads = nn.ModuleList(nn.Conv2d(4, 3, 1) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for down, head in zip(self.down, self.heads, strict=True):
            x = torch.tanh(down(x))
            found.append(head(x))
        return found


def levels(folder: Path, height: int = 8, width: int = 8) -> tuple[Levels, dict[str, np.ndarray]]:
    """The network, and data for it, which are also in the folder."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 1, height, width))
    arrays = {"x": x, "seg": random.integers(3, size=(3, height, width)).astype(np.uint8)}
    write_data(folder / "data.zarr", arrays)
    torch.manual_seed(0)
    return Levels().double(), arrays


def dice_ce(x: Tensor, y: Tensor) -> Tensor:
    p, t = F.softmax(x, 1), F.one_hot(y, 3).movedim(-1, 1).to(x.dtype)
    score = (2 * (p * t).sum((0, 2, 3)) + 1e-5) / ((p + t).sum((0, 2, 3)) + 1e-5)
    return 1 - score.mean() + F.cross_entropy(x, y)


def smaller(y: Tensor, size: Any) -> Tensor:
    """As nnU-Net's DownsampleSegForDSTransform."""
    return F.interpolate(y[:, None].double(), tuple(size), mode="nearest-exact")[:, 0].long()


def train(module: nn.Module, arrays: Mapping[str, np.ndarray], weights: Any) -> list[list[float]]:
    """Losses of each step of PyTorch: of all, and of each output that has a weight."""
    optimizer, rows = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), []
    x, y = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["seg"]).long()

    def loss() -> Tensor:
        pairs = zip(module(x), weights, strict=True)
        parts = [(w, dice_ce(out, smaller(y, out.shape[2:]))) for out, w in pairs if w]
        found = torch.stack([w * part for w, part in parts]).sum()
        rows.append([found.item(), *(part.item() for _, part in parts)])
        return found

    in_torch(optimizer, 3 * [[loss]])
    return rows


def fit(module: Any, folder: Path, **options: Any) -> oocdl.Run:
    given = {
        "optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.1), "batch_size": 3, "steps": 3,
        "inputs": {"x": "x"}, "workdir": folder / "run", **EXACT,
    }  # fmt: skip
    return oocdl.fit(module, folder / "data.zarr", **{**given, **options})


@pytest.mark.parametrize(("size", "cut"), [((12, 8), "whole"), *(((11, 7), cut) for cut in CUTS)])
def test_is_exact_whole_and_cut(size: tuple[int, int], cut: str, tmp_path: Path) -> None:
    module, arrays = levels(tmp_path, *size)
    twin = copy.deepcopy(module)
    run = fit(module, tmp_path, loss="deep_supervision", parallel=CUTS[cut])
    rows = train(twin, arrays, (2 / 3, 1 / 3, 0))
    outputs = [name for name in run.history[0] if name.startswith("loss")]
    assert len(outputs) == 3
    found = [[row[name] for name in outputs] for row in run.history]
    np.testing.assert_allclose(found, rows, rtol=1e-9)
    trained_as(run, twin, atol=1e-12)
    # What only the smallest output needs stays: PyTorch gives it no gradient, and does not decay it.
    np.testing.assert_array_equal(run.weights["heads.2.weight"][...], module.heads[2].weight.detach().numpy())


def test_weights_modes_and_losses_are_taken(tmp_path: Path) -> None:
    weights = {"two": (1, 0.5, 0.5), "same": (1, 1, 1), "given": (0.5, 0.0, 2.0)}
    for name, wanted in weights.items():
        module, arrays = levels(tmp_path)
        given = {"weights": wanted} if name == "given" else {"weight_mode": name}
        run = fit(module, tmp_path, loss=DeepSupervision("dice_ce", **given), workdir=tmp_path / name)
        rows = train(module, arrays, wanted)
        np.testing.assert_allclose(losses_of(run), [row[0] for row in rows], rtol=1e-9)
    again = oocdl.open(run.path)
    assert again.settings.loss == run.settings.loss
    assert again.evaluate(tmp_path / "data.zarr", metrics="dice")["loss"] > 0


def test_labels_of_their_own_size_are_used_where_they_are(tmp_path: Path) -> None:
    """Labels of the second output stand in the dataset, and are others than those made smaller."""
    module, arrays = levels(tmp_path)
    half = np.random.default_rng(1).integers(3, size=(3, 4, 4)).astype(np.uint8)
    twin = copy.deepcopy(module)
    x, y = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["seg"]).long()
    outs = twin(x)
    write_data(tmp_path / "data.zarr", {**arrays, "half": half})
    loss = DeepSupervision("cross_entropy", weight_mode="same")
    run = fit(module, tmp_path, loss=loss, steps=1, targets={"output_0": "seg", "output_1": "half"})
    wanted = [
        F.cross_entropy(outs[0], y),
        F.cross_entropy(outs[1], torch.as_tensor(half).long()),
        F.cross_entropy(outs[2], smaller(y, (2, 2))),
    ]
    row = run.history[0]
    assert [row[f"loss/output_{n}"] for n in range(3)] == pytest.approx([w.item() for w in wanted], rel=1e-9)
    write_data(tmp_path / "data.zarr", {**arrays, "output_1": half})
    named = fit(module, tmp_path, loss=loss, steps=1, workdir=tmp_path / "named")
    assert named.history[0]["loss"] == row["loss"]


@pytest.mark.parametrize("cut", ["whole", "space"])
def test_smaller_outputs_have_losses_and_no_metrics(cut: str, tmp_path: Path) -> None:
    """Metrics are those of the first output, by plain names; an output of its size has its own."""
    module, arrays = levels(tmp_path, 12)
    given = {"steps": 1, "validation": tmp_path / "data.zarr", "parallel": CUTS[cut]}
    loss = DeepSupervision(weight_mode="same")
    best = oocdl.callbacks.ModelCheckpoint("val_dice/1")
    run = fit(module, tmp_path, loss=loss, metrics=["dice", "iou"], callbacks=[best], **given)
    run.load_into(module)
    predicted = module(torch.as_tensor(arrays["x"]))[0].argmax(1).numpy()
    there = [(predicted == number, arrays["seg"] == number) for number in range(3)]
    dice = [2 * (p & y).sum((1, 2)) / (p.sum((1, 2)) + y.sum((1, 2))) for p, y in there]
    row = run.history[-1]
    scores = [name for name in row if name.startswith(("val_dice", "val_iou", "val_output"))]
    assert scores == [f"val_{name}{end}" for name in ("dice", "iou") for end in ("", "/0", "/1", "/2")]
    assert row["val_dice"] == pytest.approx(np.mean(dice), rel=1e-12)
    assert {f"val_loss/output_{number}" for number in range(3)} < row.keys() and run.best == row
    found = run.evaluate(tmp_path / "data.zarr", metrics=["dice", "hd95"], per_sample=tmp_path / "table.json")
    assert found["dice"] == row["val_dice"] and found["hd95"] > 0
    names = json.loads((tmp_path / "table.json").read_text())[0].keys()
    assert "hd95/1" in names and not any(name.startswith("output") for name in names)
    monitor = oocdl.callbacks.EarlyStopping("val_output_0/dice")
    with pytest.raises(InputError, match="no 'val_output_0/dice' to monitor, but .*, val_dice$"):
        fit(module, tmp_path, loss=loss, metrics="dice", callbacks=[monitor], workdir=tmp_path / "b", **given)
    assert not (tmp_path / "b" / "run.json").exists()


class Twins(nn.Module):
    """Two outputs of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(1, 3, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def test_outputs_of_one_size_have_metrics_each(tmp_path: Path) -> None:
    levels(tmp_path)
    given = {"loss": DeepSupervision(weight_mode="same"), "validation": [0], "batch_size": 2, "steps": 1}
    run = fit(Twins().double(), tmp_path, metrics="dice", **given)
    assert {"val_output_0/dice", "val_output_1/dice/2"} < run.history[-1].keys()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (DeepSupervision(weights=(1.0, 0.5)), "has 2 weights for 3 outputs; give one each"),
        ({"output_0": DeepSupervision()}, "a loss of all outputs together"),
        (DeepSupervision("dise"), "no loss 'dise'.*did you mean 'dice'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(loss: Any, words: str, tmp_path: Path) -> None:
    module, _ = levels(tmp_path)
    with pytest.raises(InputError, match=words):
        fit(module, tmp_path, loss=loss)


def test_scaled_weights_of_samples_are_scaled_in_evaluations_too(tmp_path: Path) -> None:
    arrays = {**vectors(6), "w": np.arange(1, 7).astype("f4")}
    loss = CrossEntropy(sample_weights="w")
    how = {"loss": loss, "scale": {"w": 0.25}, "steps": 1, "inputs": {"input": "x"}, "validation": arrays}
    run = oocdl.fit(nn.Linear(6, 3).double(), arrays, workdir=tmp_path / "run", **{**EXACT, **how})
    assert run.evaluate(arrays)["loss"] == pytest.approx(run.history[-1]["val_loss"], rel=1e-12)


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "data.zarr", {"x": np.zeros((3, 6)), "y": np.zeros(3, np.int64)})
    with pytest.raises(DatasetError, match="sample_weights of the loss of 'output' is to be array 'age'"):
        fit(nn.Linear(6, 3), tmp_path, inputs={"input": "x"}, loss=CrossEntropy(sample_weights="age"))
