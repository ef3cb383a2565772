"""Runs on random crops: what PyTorch makes of parts that NumPy cuts out, however the work is cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from numpy.typing import NDArray
from torch import Tensor

import oocdl
from oocdl.augmentation.draws import Draws
from oocdl.events import StepDone
from oocdl.planning.passes import Course
from oocdl.runtime import scheduler
from oocdl.transforms import RandFlip, RandSpatialCrop
from tests.kit import nets, settings
from tests.kit.models import UNet3d

Array = NDArray[Any]
Samples = list[tuple[Array, Array]]
SHAPES = [(9, 8, 10), (16, 12, 8), (7, 5, 6), (16, 12, 8), (8, 6, 5)]
"""Along some axes they are smaller than the crop."""
ROI, LR, SEED = (8, 6, 6), 0.05, 3
EXACT: dict[str, Any] = {**settings.EXACT, "optimizer": "sgd", "lr": LR, "seed": SEED}
CROP = RandSpatialCrop(ROI, foreground=0.5)


def unet() -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(base=2, depth=1, norm="instance", down="maxpool", up="transpose").double().train()


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "unet.onnx"
    return oocdl.from_torch(unet(), torch.zeros(1, 1, 8, 8, 8).double(), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Samples]:
    path = nets.write_samples(tmp_path_factory.mktemp("data") / "data.zarr", SHAPES, classes=3)
    group = zarr.open_group(path, mode="r")
    return path, [(np.asarray(one["x"], "f8"), np.asarray(one["y"])) for _, one in sorted(group.groups())]  # type: ignore[arg-type]


def cut(samples: Samples, row: int, number: int, roi: Sequence[int] = ROI) -> tuple[Array, Array]:
    """The part of a sample in a pass, cut out and padded by NumPy; voxels around it have the label -100."""
    x, y = samples[row]
    draws = Draws(SEED, number, row, 0, "RandSpatialCrop")
    draws.uniform()
    centre = None
    if draws.uniform() < CROP.foreground and y.any():
        classes = [np.argwhere(y == one) for one in range(1, 256) if (y == one).any()]
        chosen = classes[draws.whole(len(classes))]
        centre = chosen[draws.whole(len(chosen))]
    starts = []
    for axis, (size, extent) in enumerate(zip(roi, y.shape, strict=True)):
        if size > extent:
            starts.append(-((size - extent) // 2))
        elif centre is None:
            starts.append(draws.whole(extent - size + 1) if extent > size else 0)
        else:
            starts.append(int(np.clip(centre[axis] - size // 2, 0, extent - size)))
    pads = [(size, size) for size in roi]
    part = tuple(slice(size + start, 2 * size + start) for size, start in zip(roi, starts, strict=True))
    image = np.pad((x - x.mean()) / x.std(), [(0, 0), *pads])[(slice(None), *part)]
    return image, np.pad(y.astype("int64"), pads, constant_values=-100)[part]


def batch(samples: Samples, number: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The batch of a pass, with the mirrors of ``RandFlip(0.5, 0)``."""
    found = []
    for row in rows:
        flips = Draws(SEED, number, row, 1, "RandFlip").uniform() < 0.5
        found.append([np.flip(one, -3) if flips else one for one in cut(samples, row, number)])
    x, y = (torch.from_numpy(np.stack(list(one))) for one in zip(*found, strict=True))
    return x, y


def in_torch(samples: Samples, course: Course) -> tuple[UNet3d, list[float]]:
    twin, losses = unet(), []
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for step in course.steps_from(0):
        optimizer.zero_grad()
        total = 0.0
        for place, rows in enumerate(step.batches):
            x, y = batch(samples, step.first_pass + place, rows)
            loss = F.cross_entropy(twin(x), y) / len(step.batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return twin, losses


@pytest.fixture
def options() -> dict[str, Any]:
    return {**EXACT, "normalize": "zscore", "augment": [CROP, RandFlip(0.5, 0)], "epochs": 2}


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 2, "shuffle": True, "validation": [1, 4]},
        {"batch_size": 2, "accumulate": 2},
        {"parallel": {"space": (3, 2), "batch": 2}, "batch_size": 2},
    ],
    ids=str,
)
def test_a_run_is_pytorchs_loop_over_parts(
    net: Path, data: tuple[Path, Samples], tmp_path: Path, options: dict[str, Any], how: dict[str, Any]
) -> None:
    path, samples = data
    run = oocdl.fit(net, path, workdir=tmp_path / "run", **{**options, **how})
    assert not any("@" in name for name in run.plan.kinds if not name.startswith("validation"))
    course = Course(len(SHAPES), run.settings)
    twin, losses = in_torch(samples, course)
    np.testing.assert_allclose([row["loss"] for row in run.history], losses, rtol=1e-9)
    for name, tensor in twin.state_dict().items():
        np.testing.assert_allclose(run.weights[name], tensor, rtol=1e-9, atol=1e-11)
    assert oocdl.open(run.path).settings == run.settings
    if "validation" in how:
        twin.eval()
        expected = []
        for row in (1, 4):
            x, y = samples[row]
            pads = [(-extent % 2 // 2, -extent % 2 - -extent % 2 // 2) for extent in y.shape]
            image = torch.from_numpy(np.pad((x - x.mean()) / x.std(), [(0, 0), *pads])).double()
            truth = torch.from_numpy(np.pad(y.astype("int64"), pads, constant_values=-100))
            with torch.no_grad():
                expected.append(F.cross_entropy(twin(image[None]), truth[None]).item())
        assert run.history[-1]["val_loss"] == pytest.approx(np.mean(expected), rel=1e-6)
        assert run.evaluate(path)["loss"] > 0


def test_bits_are_those_of_a_run_that_was_killed_and_of_one_worker(
    net: Path, data: tuple[Path, Samples], tmp_path: Path, options: dict[str, Any]
) -> None:
    options |= {"precision": "float32", "parallel": {"space": (3, 2)}, "shuffle": True}
    run = oocdl.fit(net, data[0], workdir=tmp_path / "run", **options)

    def killed(event: Any) -> None:
        if isinstance(event, StepDone) and event.row["step"] == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        oocdl.fit(net, data[0], workdir=tmp_path / "other", callbacks=[killed], plan=run.path, **options)
    tables = (tmp_path / "other" / "samples.json").read_bytes()
    one = functools.partial(scheduler.get, workers=1)
    other = oocdl.fit(net, data[0], workdir=tmp_path / "other", plan=run.path, scheduler=one, **options)
    assert [row["loss"] for row in other.history] == [row["loss"] for row in run.history]
    for name, weight in run.weights.items():
        assert np.array_equal(other.weights[name][...], weight[...])
    assert tables == (tmp_path / "other" / "samples.json").read_bytes()
