"""Runs with transforms and normalisation: what PyTorch makes of the same samples, however the work is cut."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from torch import nn

import oocdl
from oocdl import transforms
from oocdl.augmentation.nnunet import nnunet
from oocdl.augmentation.normalization import LEAST, MOST
from oocdl.augmentation.preparation import Stream, evaluate
from oocdl.errors import DatasetError, InputError, ModelWarning, StoreError
from oocdl.graph.ir.index import Region, as_slices, whole
from oocdl.planning.passes import Course
from oocdl.pytorch.door import Exported
from oocdl.runtime import scheduler
from tests.kit import nets, runs
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")

Array = NDArray[Any]
Arrays = dict[str, Array]
SPATIAL, LR, SEED = (10, 8, 6), 0.05, 3
LIST = (
    transforms.RandFlip(0.5, (0, 2)),
    transforms.RandAffine(0.8, rotate_range=0.4, scale_range=0.2),
    transforms.Rand3DElastic((1, 2), (3, 6), 0.8),
    transforms.RandGaussianNoise(0.8, std=0.5),
    transforms.RandGaussianSmooth(prob=0.5),
    transforms.RandAdjustContrast(0.8),
)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1)
    ).double()


@pytest.fixture(scope="module")
def file(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    zeros = torch.zeros(2, 2, *SPATIAL).double()
    return oocdl.from_torch(copy.deepcopy(net), zeros, tmp_path_factory.mktemp("net") / "net.onnx")


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    random = np.random.default_rng(0)
    x = random.integers(-100, 900, (5, 2, *SPATIAL)).astype("int16")
    x[:, :, :3] = 0
    return {"input": x, "y": random.integers(0, 3, (5, *SPATIAL), "uint8")}


@pytest.fixture(scope="module")
def data(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "a.zarr"
    group = zarr.open_group(path, mode="w")
    group.create_array("input", data=arrays["input"], chunks=(1, 1, 4, 8, 6))
    group.create_array("y", data=arrays["y"], chunks=(2, 10, 5, 6))
    return path


def fit(model: Any, data: Any, workdir: Path, **options: Any) -> oocdl.Run:
    given = {**EXACT, "optimizer": "sgd", "lr": LR, "epochs": 1, "batch_size": 2, "seed": SEED, **options}
    return oocdl.fit(model, data, workdir=workdir, **given)


def numbers(method: str, arrays: Arrays, rows: Sequence[int]) -> Array:
    """Low, high, shift and divisor of each sample and channel, by NumPy."""
    x, found = arrays["input"].astype("float64"), np.zeros((5, 2, 4))
    for row, channel in np.ndindex(5, 2):
        of = x[row, channel]
        low, high = LEAST, MOST
        if method == "zscore_nonzero":
            of = of[of != 0]
        if method == "ct":
            of = x[rows, channel][arrays["y"][rows] > 0]
        if method in ("percentiles", "ct"):
            low, high = np.percentile(of, [0.5, 99.5])
        ends = (low, high - low) if method == "percentiles" else (of.mean(), of.std())
        found[row, channel] = low, high, *ends
    return found


class Samples:
    """Samples as a pass reads them, made whole."""

    def __init__(self, arrays: Arrays, method: str, chain: Sequence[Any], rows: Sequence[int]):
        self.arrays, given = arrays, {"numbers": numbers(method, arrays, rows)}
        stream = Stream(0, nonzero=method == "zscore_nonzero", **given)
        self.x = arrays["input"].astype("float64")
        for row, sample in enumerate(self.x):
            stream.normalize(sample, row, whole(sample.shape))
        ranges = np.stack([self.x.min((2, 3, 4)), self.x.max((2, 3, 4)), self.x.mean((2, 3, 4))], 2)
        self.streams = {
            "x": Stream(0, chain, SPATIAL, image=True, ranges=ranges), "y": Stream(0, chain, SPATIAL)
        }  # fmt: skip

    def batch(self, name: str, number: int | None, rows: Sequence[int]) -> torch.Tensor:
        whole_arrays, found = {"x": self.x, "y": self.arrays["y"][:, None]}[name], []
        for row in rows:
            image = whole_arrays[row]
            chain = [] if number is None else self.streams[name].operations(SEED, number, row, len(image))
            found.append(np.empty_like(image))

            def read(box: Region, block: Array, image: Array = image) -> None:
                block[...] = image[as_slices(box)]

            evaluate(chain, whole(image.shape), read, found[-1], 1 << 30, image.dtype)
        return torch.as_tensor(np.stack(found) if name == "x" else np.stack(found)[:, 0].astype("int64"))


def in_torch(
    net: nn.Module, samples: Samples, course: Course, validated: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Losses of all steps, and those of validations after each epoch."""
    module, found = copy.deepcopy(net), []

    def loss(number: int | None, rows: Sequence[int]) -> torch.Tensor:
        x, y = (samples.batch(name, number, rows) for name in "xy")
        return nn.functional.cross_entropy(module(x), y)

    def steps() -> Iterator[list[Any]]:
        for step in course.steps_from(0):
            module.train()
            yield [functools.partial(loss, step.first_pass, step.batches[0])]
            if (step.number + 1) % course.steps_per_epoch == 0:
                module.eval()
                with torch.no_grad():
                    found.append(float(np.mean([loss(None, [row]).item() for row in validated])))

    return runs.in_torch(torch.optim.SGD(module.parameters(), lr=LR), steps()), found


@pytest.mark.parametrize(
    ("method", "augment"),
    [("zscore", "nnunet"), ("zscore_nonzero", LIST), ("percentiles", LIST), ("ct", "nnunet")],
)
def test_losses_are_those_of_pytorch_on_the_same_samples(
    file: Exported, net: nn.Module, arrays: Arrays, data: Path, tmp_path: Path, method: str, augment: Any
) -> None:
    options: dict[str, Any] = {"normalize": method, "augment": augment, "validation": [4]}
    options |= {"epochs": 2 if method == "zscore" else 1}
    run = fit(file, data, tmp_path / "whole", **options)
    chain = nnunet(SPATIAL) if augment == "nnunet" else augment
    samples = Samples(arrays, method, chain, range(4))
    expected, validated = in_torch(net, samples, Course(5, run.settings), [4])
    losses = losses_of(run)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert [row["val_loss"] for row in run.history if "val_loss" in row] == pytest.approx(validated, rel=1e-9)
    pieces = {"space": (3, 2), "batch": 2}
    cut = fit(file, data, tmp_path / "cut", parallel=pieces, **options)
    assert losses_of(cut) == pytest.approx(losses, rel=1e-11)
    assert run.evaluate(data)["loss"] == pytest.approx(cut.evaluate(data, batch_size=2)["loss"], rel=1e-9)
    assert oocdl.open(run.path).settings == run.settings


def test_bits_are_those_of_one_worker_and_of_a_run_that_was_resumed(
    file: Exported, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"normalize": "zscore", "augment": "nnunet", "precision": "float32"}
    options["parallel"] = {"space": (3, 2), "batch": 2}
    run = fit(file, data, tmp_path / "run", **options)
    one = functools.partial(scheduler.get, workers=1)
    alone = fit(file, data, tmp_path / "alone", scheduler=one, plan=run.path, **options)
    _ = fit(file, data, tmp_path / "resumed", plan=run.path, **{**options, "steps": 2})
    (tmp_path / "resumed" / "samples.json").stat()
    resumed = fit(file, data, tmp_path / "resumed", plan=run.path, **options)
    for other in (alone, resumed):
        runs.same(other, run)
    for changed, message in (
        ({"augment": None}, "augment was nnunet, is nothing"),
        ({"augment": LIST}, "augment was nnunet, is"),
        ({"normalize": "ct"}, "normalize was zscore, is ct"),
    ):
        with pytest.raises(InputError, match=message):
            fit(file, data, tmp_path / "run", **{**options, **changed})


def test_predictions_are_normalised_by_their_own_samples(
    file: Exported, arrays: Arrays, data: Path, tmp_path: Path
) -> None:
    """An affine change of the numbers changes nothing; "ct" keeps the numbers of the run."""
    other = tmp_path / "other.zarr"
    zarr.open_group(other, mode="w").create_array(
        "scan", data=arrays["input"].astype("float32") * 3 + 10, chunks=(1, 2, *SPATIAL)
    )
    for method, same in (("zscore", True), ("ct", False)):
        run = fit(file, data, tmp_path / method, normalize=method, augment="nnunet")
        first = run.predict(data, tmp_path / f"{method}1.zarr")
        second = run.predict(other, tmp_path / f"{method}2.zarr", inputs={"input": "scan"})
        found = [next(iter(group.arrays()))[1][...] for group in (first, second)]
        assert np.allclose(*found, atol=1e-6) == same
        assert not np.allclose(found[0][0], found[0][1])
    (tmp_path / "ct" / "samples.json").unlink()
    with pytest.raises(StoreError, match="samples.json is lost; restore it"):
        run.predict(data, tmp_path / "ct1.zarr")


def test_what_does_not_go_together_is_refused_before_the_run(
    file: Exported, arrays: Arrays, data: Path, tmp_path: Path
) -> None:
    def refused(message: str, where: Path = data, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            fit(file, where, tmp_path / "run", **options)
        assert not (tmp_path / "run" / "run.json").exists()

    turn = transforms.RandRotate90(0.5)
    refused("axes 0 and 1 have 10 and 8; choose other spatial_axes", augment=[turn])
    refused("augment takes transforms of oocdl.transforms or 'nnunet', got flip", augment=["flip"])
    refused("normalize must be 'zscore' or .*, got zscores", normalize="zscores")
    refused("normalize names 'x'; images that are inputs are: input", normalize={"x": "zscore"})
    coarse = nets.write_data(tmp_path / "coarse.zarr", {**arrays, "y": arrays["y"][:, ::2]})
    flip = transforms.RandFlip(0.5)
    refused("cannot move those of the target 'y', whose samples have the shape", coarse, augment=flip)
    refused("no target has a label for each voxel", coarse, normalize="ct")
    plan = oocdl.plan(file, data, augment=flip, **{**EXACT, "progress": False})
    with pytest.raises(InputError, match="a step alone does not normalise or augment"):
        plan.delayed()


def test_a_number_that_is_not_finite_is_found_in_statistics(
    file: Exported, arrays: Arrays, tmp_path: Path
) -> None:
    x = arrays["input"].astype("float32")
    x[3, 1, 2, 2, 2] = np.nan
    bad = nets.write_data(tmp_path / "bad.zarr", {**arrays, "input": x})
    with pytest.raises(DatasetError, match=r"has the number nan in sample 3 at \[1, 2, 2, 2\]"):
        fit(file, bad, tmp_path / "run", normalize="zscore")


def test_whole_numbers_are_moved_and_else_left_alone(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv3d(1, 2, 1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.conv(x) * mask.to(x.dtype)
            return found

    random = np.random.default_rng(0)
    x, mask = random.normal(size=(1, 1, 4, 6, 8)), random.integers(0, 3, (1, 1, 4, 6, 8))
    y = random.integers(0, 2, (1, 4, 6, 8))
    data = {"x": x, "mask": mask, "y": y}
    module = Masked().double()
    one = (torch.zeros(1, 1, 4, 6, 8).double(), torch.zeros(1, 1, 4, 6, 8).long())
    path = oocdl.from_torch(module, one, tmp_path / "net.onnx")
    chain = [transforms.RandScaleIntensity((1.0, 1.0), 1.0), transforms.RandFlip(1.0, 0)]
    run = oocdl.fit(path, data, workdir=tmp_path / "run", steps=1, augment=chain, **EXACT)
    flipped = [torch.from_numpy(array).flip(-3) for array in (2 * x, mask, y)]
    loss = nn.functional.cross_entropy(module(*flipped[:2]), flipped[2]).item()
    np.testing.assert_allclose(run.history[0]["loss"], loss, rtol=1e-12)


def test_scaled_labels_are_as_large_as_they_become(file: Exported, arrays: Arrays, tmp_path: Path) -> None:
    data = {"input": arrays["input"].astype("float64"), "y": np.full((5, *SPATIAL), 128, "uint8")}
    for augment in (None, [transforms.RandFlip(1.0, 0)]):
        with pytest.raises(DatasetError, match="has label 256"):
            fit(file, data, tmp_path / str(augment is None), scale={"y": 2}, augment=augment)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"normalize": "zscore"}, r"normalises its inputs \(zscore\)"),
        ({"scale": {"input": 0.5, "y": 1}}, r"scales its inputs \({'input': 0.5}\)"),
    ],
)
def test_an_exported_file_is_said_to_want_such_inputs(
    file: Exported, net: nn.Module, data: Path, tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    run = fit(file, data, tmp_path / "run", steps=1, **how)
    with pytest.warns(ModelWarning, match=message) as caught:
        run.export(tmp_path / "net.onnx")
        run.export(tmp_path / "net.safetensors")  # weights alone take no inputs
    assert len(caught) == 1
