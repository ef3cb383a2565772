"""Metrics of a validation: those of MONAI and torchmetrics on the same predictions, cut in any way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oocdl
from oocdl.errors import InputError
from oocdl.metrics import PSNR, Accuracy, Confusion, DiceMetric, IoU, TopK
from oocdl.ops.metric_functions import METRICS
from tests.kit import nets, settings

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")

OF_CLASSES = ("dice", "iou", "accuracy", "sensitivity", "specificity", "precision", "f1")
SAMPLES, CLASSES = 5, 3
CUTS: dict[str, Any] = {"whole": {}, "cut": {"parallel": {"batch": 2, "space": (3, 2), "channels": 2}}}
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays]:
    """Two channels; labels of three classes, of which a sample lacks one, and some places are ignored."""
    random = np.random.default_rng(3)
    labels = random.integers(0, CLASSES, (SAMPLES, 6, 5, 4)).astype(np.int16)
    labels[1][labels[1] == 2] = 0
    labels[2, :2] = -100
    arrays = {"x": random.normal(size=(SAMPLES, 2, 6, 5, 4)).astype(np.float32), "y": labels}
    return nets.write_data(tmp_path_factory.mktemp("data") / "data.zarr", arrays), arrays


def validated(tmp_path: Path, module: Any, data: Path, **options: Any) -> tuple[dict[str, float], oocdl.Run]:
    """The results of a validation on the whole dataset, after one step of a rate of zero."""
    given = {**settings.EXACT, "optimizer": "sgd", "lr": 0.0, "steps": 1, "batch_size": 2, **options}
    run = oocdl.fit(module, data, workdir=tmp_path / "run", validation=data, **given)
    row = run.history[-1]
    return {name[4:]: value for name, value in row.items() if name.startswith("val_")}, run


def outputs_of(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = module(torch.as_tensor(x, dtype=next(module.parameters()).dtype)).numpy()
    return found


def counts(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each sample and class: both, predicted, labelled, and all that count."""
    there = labels != -100
    predicted, each = logits.argmax(1), range(CLASSES)
    rows = [
        [[((p == c) & (y == c) & t).sum(), ((p == c) & t).sum(), (y == c).sum(), t.sum()] for c in each]
        for p, y, t in zip(predicted, labels, there, strict=True)
    ]
    return tuple(np.moveaxis(np.array(rows, float), 2, 0))


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_counts_of_classes(volumes: tuple[Path, Arrays], tmp_path: Path, cuts: dict[str, Any]) -> None:
    data, arrays = volumes
    torch.manual_seed(1)
    module = torch.nn.Conv3d(2, CLASSES, 1).double()
    found, run = validated(tmp_path, module, data, metrics=OF_CLASSES, **cuts)
    logits = outputs_of(module, arrays["x"])
    both, predicted, labelled, counted = counts(logits, arrays["y"])
    scores = np.where(labelled > 0, 2 * both / (predicted + labelled), np.nan)
    assert np.isnan(scores).any()
    assert math.isclose(found["dice"], float(np.nanmean(np.nanmean(scores, 1))), rel_tol=1e-12)
    assert math.isclose(found["dice/2"], float(np.nanmean(scores[:, 2])), rel_tol=1e-12)
    overlap = np.where(labelled > 0, both / (predicted + labelled - both), np.nan)
    assert math.isclose(found["iou"], float(np.nanmean(np.nanmean(overlap, 1))), rel_tol=1e-12)
    assert math.isclose(found["accuracy"], both.sum() / labelled.sum(), rel_tol=1e-12)
    b, p, y, n = (one.sum(0) for one in (both, predicted, labelled, counted))
    for name, each in {
        "sensitivity": b / y,
        "precision": b / p,
        "specificity": (n - p - y + b) / (n - y),
        "f1": 2 * b / (p + y),
    }.items():
        assert math.isclose(found[name], float(each.mean()), rel_tol=1e-12), name
        assert math.isclose(found[f"{name}/1"], float(each[1]), rel_tol=1e-12), name
    evaluated = run.evaluate(data, metrics=OF_CLASSES, batch_size=3)
    told = found.keys() - {"loss", "seconds"}
    assert {name: evaluated[name] for name in told} == {name: found[name] for name in told}
    told = run.evaluate(data, metrics=["confusion", TopK(k=2)], batch_size=2)
    there = arrays["y"] != -100
    matrix = np.zeros((CLASSES, CLASSES), int)
    np.add.at(matrix, (arrays["y"][there], logits.argmax(1)[there]), 1)
    assert (told["confusion"] == matrix).all() and told["confusion"].dtype == np.int64
    best = np.argsort(-logits, 1)[:, :2] == arrays["y"][:, None]
    assert math.isclose(told["topk"], best.any(1)[there].mean(), rel_tol=1e-12)
    assert {"val_dice", "val_dice/0"} <= set(run.frame().columns)
    assert oocdl.open(run.path).settings.metrics == tuple(METRICS[name] for name in OF_CLASSES)
    assert oocdl.open(run.path).plan.kinds.keys() == run.plan.kinds.keys()


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_sums_of_errors(tmp_path: Path, cuts: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    arrays = {
        "x": random.normal(size=(SAMPLES, 2, 6, 5, 4)),
        "y": random.normal(size=(SAMPLES, 1, 6, 5, 4)) + 2,
    }
    data = nets.write_data(tmp_path / "data.zarr", {k: v.astype(np.float32) for k, v in arrays.items()})
    module = torch.nn.Conv3d(2, 1, 1).double()
    true = arrays["y"].astype(np.float32)
    e, y = outputs_of(module, arrays["x"].astype(np.float32)) - true, true.astype(float)
    metrics = ("mae", "rmse", "r2", PSNR(max_val=4.0))
    found, _ = validated(tmp_path, module, data, loss="mse", metrics=metrics, inputs={"input": "x"}, **cuts)
    squares = (e**2).reshape(SAMPLES, -1).mean(1)
    expected = {
        "mae": np.abs(e).mean(),
        "rmse": np.sqrt((e**2).mean()),
        "r2": 1 - (e**2).sum() / ((y - y.mean()) ** 2).sum(),
        "psnr": (10 * np.log10(16 / squares)).mean(),
    }
    for name, value in expected.items():
        assert math.isclose(found[name], float(value), rel_tol=1e-9), name


def test_r2_of_numbers_far_from_zero_in_float32(tmp_path: Path) -> None:
    """Onnxruntime sums in float32: deviations from the mean are added, not squares, which cancel."""
    arrays = {"x": np.zeros((6, 1, 9, 9)), "y": np.random.default_rng(0).normal(1000, 1, (6, 1, 9, 9))}
    data = nets.write_data(tmp_path / "data.zarr", {k: v.astype(np.float32) for k, v in arrays.items()})
    module = torch.nn.Conv2d(1, 1, 1)
    torch.nn.init.constant_(module.bias, 1000.5)
    given = {"loss": "mse", "metrics": "r2", "inputs": {"input": "x"}, "engine": "onnxruntime"}
    found, _ = validated(tmp_path, module, data, precision="float32", **given, **CUTS["cut"])
    y = arrays["y"].astype(np.float32).astype(float)
    expected = 1 - ((1000.5 - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    assert math.isclose(found["r2"], expected, rel_tol=1e-4)


@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "numpy"])
def test_float32_on_every_engine(volumes: tuple[Path, Arrays], tmp_path: Path, engine: str) -> None:
    data, arrays = volumes
    torch.manual_seed(1)
    module = torch.nn.Conv3d(2, CLASSES, 1)
    found, _ = validated(tmp_path, module, data, metrics="dice", precision="float32", engine=engine)
    both, predicted, labelled, _ = counts(outputs_of(module, arrays["x"]), arrays["y"])
    scores = np.where(labelled > 0, 2 * both / (predicted + labelled), np.nan)
    assert math.isclose(found["dice"], float(np.nanmean(np.nanmean(scores, 1))), rel_tol=1e-12)


@pytest.mark.parametrize("shape", [(6, 6), ()], ids=["places", "a number a sample"])
def test_one_channel_is_one_class(tmp_path: Path, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(7)
    x = random.normal(size=(8, 2, *shape)).astype("f4")
    y = random.integers(0, 2, (8, *shape)).astype("u1")
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": y})
    torch.manual_seed(2)
    flat = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
    module = torch.nn.Conv2d(2, 1, 1) if shape else flat
    overlap = "dice" if shape else "f1"
    given = {"loss": "bce", "inputs": {"input": "x"}, "metrics": (overlap, "accuracy")}
    found, _ = validated(tmp_path, module.double(), data, **given)
    predicted = outputs_of(module, x).reshape(y.shape) > 0
    axes = (1, 2) if shape else None
    both, there = (predicted & (y == 1)).sum(axes), predicted.sum(axes) + y.sum(axes, dtype=int)
    assert math.isclose(found[overlap], float((2 * both / there).mean()), rel_tol=1e-12) and both.any()
    assert math.isclose(found["accuracy"], float((predicted == y).mean()), rel_tol=1e-12)


def test_a_sample_all_of_whose_labels_are_ignored_has_no_number() -> None:
    none = sums(np.zeros((1, CLASSES, 4)), np.full((1, 4), -100)) | {"ranked": np.zeros((1, CLASSES))}
    for name in (*OF_CLASSES, "topk"):
        assert math.isnan(METRICS[name].of_sample(none)[name]), name


def test_each_output_has_the_metrics_that_suit_its_loss(tmp_path: Path) -> None:
    arrays = nets.vectors(8) | {"size": np.arange(8, dtype=np.float32)[:, None]}
    data = nets.write_data(tmp_path / "data.zarr", {**arrays, "kind": arrays["y"]})
    model = nets.write_two_heads(tmp_path / "net.onnx")
    loss = {"kind": "cross_entropy", "size": "mse"}
    found, _ = validated(tmp_path, model, data, loss=loss, metrics=("accuracy", "mae"), precision="float32")
    both = {name for name in found if name.split("/")[-1] in ("accuracy", "mae")}
    assert both == {"kind/accuracy", "size/mae"}


def sums(logits: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    names = ("both", "predicted", "labelled", "counted")
    return dict(zip(names, counts(logits, labels), strict=True)) | {"exclusive": np.ones((len(labels), 1))}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("empty", [True, False])
def test_overlaps_are_those_of_monai(background: bool, empty: bool) -> None:
    metrics = pytest.importorskip("monai.metrics")
    random = np.random.default_rng(9)
    logits, labels = random.normal(size=(6, CLASSES, 4, 4)), random.integers(0, 2, (6, 4, 4))
    labels[0] = 0
    labels[3, :2] = 2
    one_hot = torch.as_tensor(np.eye(CLASSES)[labels]).movedim(-1, 1)
    predicted = torch.as_tensor(np.eye(CLASSES)[logits.argmax(1)]).movedim(-1, 1)
    how = {"include_background": background, "ignore_empty": empty}
    for mine, theirs in ((DiceMetric(**how), metrics.DiceMetric), (IoU(**how), metrics.MeanIoU)):
        for reduction, name in (("mean", ""), ("mean_batch", "/1")):
            other = theirs(reduction=reduction, **how)
            other(predicted, one_hot)
            expected = other.aggregate()
            expected = expected if reduction == "mean" else expected[1 if background else 0]
            found = mine.numbers(sums(logits, labels))[mine.name + name]
            assert math.isclose(found, float(expected), rel_tol=1e-6), (mine, reduction)


def test_counts_are_those_of_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional")
    random = np.random.default_rng(11)
    logits, labels = random.normal(size=(6, CLASSES, 4, 4)), random.integers(0, CLASSES, (6, 4, 4))
    p, y = torch.as_tensor(logits.argmax(1)), torch.as_tensor(labels)
    given: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
    for name in ("recall", "precision", "specificity", "f1_score"):
        mine = METRICS[{"recall": "sensitivity", "f1_score": "f1"}.get(name, name)]
        expected = float(getattr(functional, name)(p, y, average="macro", **given))
        assert math.isclose(mine.numbers(sums(logits, labels))[mine.name], expected, rel_tol=1e-6), name
    places = torch.as_tensor(logits).movedim(1, -1).reshape(-1, CLASSES)
    for k in (1, 2):
        expected = float(functional.accuracy(places, y.reshape(-1), average="micro", top_k=k, **given))
        rank = (logits > np.take_along_axis(logits, labels[:, None], 1)).sum(1).reshape(len(labels), -1)
        ranked = np.array([np.bincount(row, minlength=CLASSES) for row in rank], float)
        found = TopK(k=k).numbers({"ranked": ranked, "counted": np.full((6, 1), 16.0)})
        assert math.isclose(found["topk"], expected, rel_tol=1e-6), k
    pairs = (labels * 3 + logits.argmax(1)).reshape(6, -1)
    joint = np.stack([np.bincount(one, minlength=9) for one in pairs])
    matrix = functional.confusion_matrix(p, y, **given).numpy()
    assert (Confusion().numbers({"joint": joint.astype(float)})["confusion"] == matrix).all()
    expected = float(functional.accuracy(p, y, average="micro", **given))
    assert math.isclose(Accuracy().numbers(sums(logits, labels))["accuracy"], expected, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        (slice(0, 4), (0.0909091, 0.125, 0.0714286, 0.8166667)),
        (slice(0, 1), (0.3636364, 0.5, 0.2857143, 0.6)),
        (slice(3, 4), (0.0, 0.0, 0.0, 1.0)),
    ],
)
def test_channels_that_exclude_nothing_count_where_they_are_absent(
    channels: slice, expected: tuple[float, ...]
) -> None:
    """The numbers are those of torchmetrics 1.9.0 with ``task="multilabel"``, and of one channel "binary"."""
    random, often = np.random.default_rng(13), np.array([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0]])[..., None]
    predicted, labelled = (random.random((2, 4, 6)) < one for one in often)
    each = ("both", predicted & labelled), ("predicted", predicted), ("labelled", labelled)
    counted = {name: there[:, channels].sum(2).astype(float) for name, there in each}
    given = {**counted, "counted": np.full((2, 1), 6.0), "exclusive": np.zeros((2, 1))}
    for name, value in zip(("f1", "precision", "sensitivity", "specificity"), expected, strict=True):
        assert METRICS[name].numbers(given)[name] == pytest.approx(value, abs=1e-7), name


@pytest.mark.parametrize(
    ("metrics", "loss", "said"),
    [
        ("dise", "dice", r"no metric 'dise' \(did you mean 'dice'\?\)"),
        (["dice", DiceMetric(ignore_empty=False)], "dice", "'dice' twice"),
        (["dice", "mae"], "dice", "'mae' does not go with the loss Dice: only a loss without classes has"),
        ("dice", "mse", "'dice' does not go with the loss MSE: only a loss of classes has dice, iou"),
        (3, "dice", "takes metrics by name"),
        (["dice", TopK(k=3)], "dice", "'topk' of k=3 is 1 .* 3 classes; .* a smaller k"),
        (["dice", "confusion"], "dice", r"'confusion' is no metric of validations; pass it to Run\.evaluate"),
    ],
)
def test_what_cannot_be_is_refused(
    volumes: tuple[Path, Arrays], tmp_path: Path, metrics: Any, loss: str, said: str
) -> None:
    channels = 1 if loss == "mse" else CLASSES
    module, given = torch.nn.Conv3d(2, channels, 1).double(), {"loss": loss, "inputs": {"input": "x"}}
    with pytest.raises(InputError, match=said):
        validated(tmp_path, module, volumes[0], metrics=metrics, **given)


def test_classes_of_vectors_and_of_words(tmp_path: Path) -> None:
    """Ties are of the first class; the class axis may be the last."""
    logits = np.zeros((3, 4), np.float32)
    logits[1:] = [3, 1, 2, 0]
    for name, x, y, k, hits in (
        ("vectors", logits, np.array([1, 2, 3]), 2, 2 / 3),
        ("words", np.repeat(logits[:2, None], 5, 1), np.repeat([[1], [3]], 5, 1), 2, 1 / 2),
    ):
        data = nets.write_data(tmp_path / f"{name}.zarr", {"x": x, "y": y})
        module = torch.nn.Linear(4, 4, bias=False)
        module.weight.data = torch.eye(4)
        given = {**settings.QUICK, "optimizer": "sgd", "lr": 0.0, "steps": 1, "loss": "cross_entropy"}
        run = oocdl.fit(module, data, workdir=tmp_path / name, **given)
        found = run.evaluate(data, metrics=[TopK(k=k), "confusion"])
        assert math.isclose(found["topk"], hits, rel_tol=1e-6), name
        matrix = np.zeros((4, 4), int)
        np.add.at(matrix, (y, x.argmax(-1)), 1)
        assert (found["confusion"] == matrix).all(), name


def test_metrics_need_a_validation(volumes: tuple[Path, Arrays], tmp_path: Path) -> None:
    given = {**settings.QUICK, "metrics": "dice", "workdir": tmp_path / "run"}
    with pytest.raises(InputError, match="pass validation="):
        oocdl.fit(torch.nn.Conv3d(2, CLASSES, 1), volumes[0], **given)
