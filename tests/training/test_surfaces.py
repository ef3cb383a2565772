"""Distances of surfaces: those of MONAI on the same labels, for samples of any size and spacing."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import oocdl
from oocdl.errors import BudgetError, DatasetError, InputError, StoreError
from oocdl.host import optional
from oocdl.metrics import ASD, HD95
from oocdl.training.prediction import surfaces
from tests.kit import nets, settings

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")
Trained = tuple[oocdl.Run, torch.nn.Module, Path]

pytest.importorskip("scipy")
CLASSES = 3
SHAPES = ((9, 7, 8), (6, 9, 5), (8, 8, 8))
SPACINGS = ((3.0, 0.5, 1.25), (1.0, 1.0, 1.0), (2.0, 0.7, 0.7))
OPTIONS: dict[str, Any] = {**settings.EXACT, "optimizer": "sgd", "lr": 0.0, "steps": 1}
Array = np.ndarray


def blocks(values: Array, shape: tuple[int, ...]) -> Array:
    """Make each value a block of 4 x 4 x 4, so that there are voxels inside of a class."""
    return np.kron(values, np.ones((4, 4, 4)))[tuple(slice(extent) for extent in shape)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A network cut in space, and samples of several sizes, of which one lacks a class."""
    folder = tmp_path_factory.mktemp("surfaces")
    data = nets.write_samples(folder / "data.zarr", SHAPES, classes=CLASSES)
    group = zarr.open_group(str(data))
    for number, spacing in enumerate(SPACINGS):
        group[f"case_{number:03}"].attrs["spacing"] = list(spacing)
        labels, image = (group[f"case_{number:03}/{name}"] for name in "yx")
        random, classes = np.random.default_rng(number), 2 if number == 1 else CLASSES
        labels[...] = blocks(random.integers(0, classes, (4, 4, 4)), labels.shape)
        image[...] = blocks(random.normal(size=(4, 4, 4)), labels.shape)[None]
    torch.manual_seed(2)
    module = torch.nn.Conv3d(1, CLASSES, 3, padding=1, bias=False).double()
    given = {**OPTIONS, "loss": "cross_entropy", "parallel": {"space": (2, 2)}}
    return oocdl.fit(module, data, workdir=folder / "run", **given), module, data


def labels_of(module: torch.nn.Module, data: Path) -> list[tuple[Array, Array]]:
    """Predicted and true labels of each sample."""
    group, found = zarr.open_group(str(data), mode="r"), []
    for name in group.attrs["oocdl"]["samples"]:
        with torch.no_grad():
            logits = module(torch.as_tensor(group[f"{name}/x"][...]).double()[None])
        found.append((logits[0].argmax(0).numpy(), group[f"{name}/y"][...]))
    return found


def edge(mask: Array) -> Array:
    """Places of voxels of which one of the neighbours, or of what is outside, is not in the mask."""
    wide = np.pad(mask, 1)
    inner = tuple(slice(1, -1) for _ in mask.shape)
    shifts = [np.roll(wide, step, axis)[inner] for axis in range(mask.ndim) for step in (1, -1)]
    return np.argwhere(mask & ~np.logical_and.reduce(shifts))


def expected(predicted: Array, true: Array, spacing: tuple[float, ...], number: int) -> tuple[float, float]:
    """HD95 and ASD of a class, of the distances of all pairs."""
    one, two = edge(predicted == number), edge(true == number)
    if not len(one) or not len(two):
        return math.nan, math.inf if len(one) + len(two) else math.nan
    each = np.sqrt((((one[:, None] - two[None]) * spacing) ** 2).sum(2))
    there, back = each.min(1), each.min(0)
    return max(np.percentile(there, 95), np.percentile(back, 95)), float(np.concatenate([there, back]).mean())


def test_distances_of_volumes_of_any_size_and_spacing(
    run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, module, data = run
    monkeypatch.setattr(surfaces, "SLAB_VOXELS", 130)  # volumes are read in pieces of one and two planes
    found = trained.evaluate(data, metrics=["dice", "hd95", "asd"], per_sample=tmp_path / "table.csv")
    pairs = zip(labels_of(module, data), SPACINGS, strict=True)
    values = np.array([[expected(*pair, spacing, number) for number in (1, 2)] for pair, spacing in pairs])
    predicted, true = labels_of(module, data)[0]
    assert all(len(edge(one == 1)) < (one == 1).sum() for one in (predicted, true))
    assert np.isnan(values[1, 1, 0]) and np.isinf(values[1, 1, 1])
    for place, name in enumerate(("hd95", "asd")):
        each = values[:, :, place]
        assert math.isclose(found[name], float(np.nanmean(np.nanmean(each, 1))), rel_tol=1e-12), name
        for number in (1, 2):
            assert math.isclose(found[f"{name}/{number}"], np.nanmean(each[:, number - 1]), rel_tol=1e-12)
    with (tmp_path / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["sample"] for row in rows] == ["case_000", "case_001", "case_002"]
    assert rows[1]["hd95/2"] == "" and rows[1]["asd/2"] == "inf"
    for row, each in zip(rows, values, strict=True):
        assert math.isclose(float(row["hd95/1"]), each[0, 0], rel_tol=1e-12)
        assert math.isclose(float(row["asd/1"]), each[0, 1], rel_tol=1e-12)
    table = tmp_path / "table.json"
    trained.evaluate(data, metrics=["hd95", "asd"], per_sample=table)
    strict = json.loads(table.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict[1]["hd95/2"] is strict[1]["asd/2"] is None and strict[1]["loss"] == float(rows[1]["loss"])
    alone = trained.evaluate(data, metrics="dice")
    assert {name: found[name] for name in alone} == alone
    assert sum(float(row["loss"]) for row in rows) / 3 == pytest.approx(alone["loss"], rel=1e-12)
    assert [path.name[:4] for path in (trained.path / "spill").iterdir()] == ["LOCK"]


@pytest.mark.filterwarnings("ignore")
def test_distances_are_those_of_monai(run: Trained) -> None:
    theirs = pytest.importorskip("monai.metrics")
    trained, module, data = run
    mine = trained.evaluate(data, metrics=[HD95(include_background=True), ASD(include_background=True)])
    how = {"include_background": True}
    for name, other in {
        "hd95": theirs.HausdorffDistanceMetric(percentile=95, **how),
        "asd": theirs.SurfaceDistanceMetric(symmetric=True, **how),
    }.items():
        for (predicted, true), spacing in zip(labels_of(module, data), SPACINGS, strict=True):
            both = (torch.as_tensor(np.eye(CLASSES)[one]).movedim(-1, 0)[None] for one in (predicted, true))
            other(*both, spacing=spacing)
        assert math.isclose(mine[name], float(other.aggregate("mean")), rel_tol=1e-6), name
        for number, value in enumerate(other.aggregate("mean_batch")):
            assert math.isclose(mine[f"{name}/{number}"], float(value), rel_tol=1e-6), (name, number)


def evaluated(
    folder: Path, x: Array, y: Array, channels: int = 1, batch: int = 1, **given: Any
) -> tuple[dict[str, Any], Array]:
    """Distances of images and labels that are stacked, and the labels that a small network predicts."""
    data = nets.write_data(folder / "data.zarr", {"x": x, "y": y})
    zarr.open_group(str(data)).attrs.put(given.pop("facts", {}))
    torch.manual_seed(3)
    module = torch.nn.Conv2d(x.shape[1], channels, 1, bias=False).double()
    with torch.no_grad():
        logits = module(torch.as_tensor(x).double()).numpy()
    run = oocdl.fit(module, data, workdir=folder / "run", **OPTIONS, **given)
    predicted = logits.argmax(1) if channels > 1 else (logits[:, 0] > 0).astype(int)
    return run.evaluate(data, metrics=["hd95", "asd"], batch_size=batch), predicted


def test_one_channel_of_images_and_labels_that_are_ignored(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    labels = (random.uniform(size=(3, 12, 9)) > 0.6).astype(np.int16)
    labels[1, :4] = -1
    x = random.normal(size=(3, 2, 12, 9)).astype(np.float32)
    found, predicted = evaluated(tmp_path, x, labels, batch=2, loss=oocdl.losses.Dice(ignore_index=-1))
    pairs = zip(np.where(labels < 0, 0, predicted), labels, strict=True)
    values = np.array([expected(p, y, (1.0, 1.0), 1) for p, y in pairs])
    assert math.isclose(found["hd95"], values[:, 0].mean(), rel_tol=1e-12)
    assert math.isclose(found["asd"], values[:, 1].mean(), rel_tol=1e-12)
    assert found.keys() == {"loss", "hd95", "asd"}


def test_images_of_an_affine_lie_in_its_x_and_y(tmp_path: Path) -> None:
    data, found = nets.write_samples(tmp_path / "data.zarr", ((16, 12), (12, 16)), classes=2), []
    torch.manual_seed(4)
    run = oocdl.fit(torch.nn.Conv2d(1, 2, 1).double(), data, workdir=tmp_path / "run", **OPTIONS)
    for facts in ({"affine": np.diag([0.5, 2.0, 9.0, 1.0]).tolist()}, {"spacing": [2.0, 0.5]}):
        for _, sample in zarr.open_group(str(data)).groups():
            sample.attrs.put(facts)
        found.append(run.evaluate(data, metrics=["hd95", "asd"]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "facts",
    [
        {"spacing": [2.0, 0.5]},
        {"spacing": [[2.0, 0.5]] * 3},
        {"affine": np.diag([0.5, 2.0, 9.0, 1.0]).tolist()},
    ],
)
def test_stacked_images_have_the_spacing_of_their_group(facts: dict[str, Any], tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    labels = random.integers(0, 2, (3, 12, 16)).astype(np.int16)
    x = random.normal(size=(3, 1, 12, 16)).astype(np.float32)
    found, predicted = evaluated(tmp_path, x, labels, 2, loss="cross_entropy", facts=facts)
    pairs = zip(predicted, labels, strict=True)
    values = np.array([expected(*pair, (2.0, 0.5), 1) for pair in pairs]).mean(0)
    assert [found["hd95"], found["asd"]] == pytest.approx(values, rel=1e-12)


def test_masks_that_are_scaled(tmp_path: Path) -> None:
    """A voxel is of the class where its number, as the loss reads it, is above a half."""
    random = np.random.default_rng(6)
    masks = random.choice([0, 100, 255], (2, 1, 9, 8)).astype(np.uint8)
    x = random.normal(size=(2, 1, 9, 8)).astype(np.float32)
    given = {"loss": "bce", "inputs": {"input": "x"}}
    with pytest.raises(DatasetError, match=r"'y' .* target 100 in .*; targets are 0 to 1 here; .* scale="):
        evaluated(tmp_path, x, masks, **given)
    found, predicted = evaluated(tmp_path, x, masks, scale={"y": 1 / 255}, resume="restart", **given)
    pairs = zip(predicted, (masks[:, 0] == 255).astype(int), strict=True)
    assert math.isclose(found["asd"], np.mean([expected(p, y, (1.0, 1.0), 1)[1] for p, y in pairs]))


def test_what_cannot_be_is_refused(run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, module, data = run
    with pytest.raises(InputError, match=r"'hd95' is no metric of validations; pass it to Run\.evaluate"):
        oocdl.fit(module, data, metrics="hd95", validation=data, workdir=tmp_path / "other", **OPTIONS)
    with pytest.raises(InputError, match=r"ends in \.csv or \.json"):
        trained.evaluate(data, per_sample=tmp_path / "table.xlsx")
    with pytest.raises(StoreError, match="nothing may be written beside it"):
        trained.evaluate(data, per_sample=tmp_path / "none" / "table.csv")
    with pytest.raises(InputError, match="per_sample has losses with batch_size=1 only"):
        trained.evaluate(data, per_sample=tmp_path / "table.csv", batch_size=2)
    monkeypatch.setattr(surfaces, "POINT_BYTES", 1 << 30)
    with pytest.raises(BudgetError, match="surfaces of sample 0 need .* edge voxels, and may take .*memory="):
        trained.evaluate(data, metrics="asd", per_sample=tmp_path / "table.csv")
    monkeypatch.setattr(surfaces, "FILE_BYTES", 1 << 50)
    with pytest.raises(BudgetError, match="may take 0"):
        trained.evaluate(data, metrics="asd")
    with monkeypatch.context() as patch:
        absent = ImportError("no", name="scipy")
        patch.setattr(optional.importlib, "import_module", lambda name: (_ for _ in ()).throw(absent))
        with pytest.raises(InputError, match=r"'asd' needs scipy, .* 'oocdl\[surface\]'"):
            trained.evaluate(data, metrics="asd")
    wrong = zarr.open_group(str(nets.write_samples(tmp_path / "data.zarr", SHAPES, classes=CLASSES)))
    wrong["case_001"].attrs["spacing"] = [1.0, 0.0, 2.0]
    with pytest.raises(DatasetError, match="the spacing of sample 'case_001' is to be 3 positive numbers"):
        trained.evaluate(tmp_path / "data.zarr", metrics="asd")
    assert not (tmp_path / "table.csv").exists()


def test_places_of_several_classes_are_refused(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(2, 2, 6, 6)).astype(np.float32)
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": (x > 0).astype(np.uint8)})
    given = {**OPTIONS, "loss": "bce", "inputs": {"input": "x"}}
    run = oocdl.fit(torch.nn.Conv2d(2, 2, 1).double(), data, workdir=tmp_path / "run", **given)
    for name in ("asd", "topk", "confusion"):
        with pytest.raises(InputError, match=f"'{name}' takes a loss with one class .* BCE of"):
            run.evaluate(data, metrics=name)
    table = tmp_path / "table.json"
    found = run.evaluate(data, metrics="dice", per_sample=table)
    rows = json.loads(table.read_text())
    assert [row["sample"] for row in rows] == [0, 1] and rows[0].keys() == {"sample", *found}
