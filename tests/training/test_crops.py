"""Runs on random crops: what PyTorch makes of parts that NumPy cuts out, however the work is cut."""

from __future__ import annotations

import functools
import itertools
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from numpy.typing import NDArray
from torch import Tensor, nn

import oocdl
from oocdl.augmentation.crop import MOST_VOXELS, foreground_voxels
from oocdl.augmentation.draws import Draws
from oocdl.augmentation.preparation import Preparation
from oocdl.errors import InputError, ModelError
from oocdl.graph.ir.index import as_slices, whole
from oocdl.planning.passes import Course
from oocdl.pytorch.door import Exported
from oocdl.runtime import scheduler
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.training import preparing
from oocdl.transforms import RandFlip, RandRotate90, RandSpatialCrop
from tests.kit import nets, runs, settings
from tests.kit.commands import python
from tests.kit.models import UNet3d, small_unet
from tests.kit.runs import losses_of

Array = NDArray[Any]
Samples = list[tuple[Array, Array]]
Data = tuple[Path, Samples]
SHAPES = [(9, 8, 10), (16, 12, 8), (7, 5, 6), (16, 12, 8), (8, 6, 5)]
"""Along some axes they are smaller than the crop."""
ROI, LR, SEED = (8, 6, 6), 0.05, 3
EXACT: dict[str, Any] = {**settings.EXACT, "optimizer": "sgd", "lr": LR, "seed": SEED}
CROP = RandSpatialCrop(ROI, foreground=0.5)
pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    path = tmp_path_factory.mktemp("net") / "unet.onnx"
    return oocdl.from_torch(small_unet(), torch.zeros(1, 1, 8, 8, 8).double(), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    path = nets.write_samples(tmp_path_factory.mktemp("data") / "data.zarr", SHAPES, classes=3)
    group = zarr.open_group(path, mode="r")
    return path, [(np.asarray(one["x"], "f8"), np.asarray(one["y"])) for _, one in sorted(group.groups())]  # type: ignore[arg-type]


def corner(y: Array, row: int, number: int, roi: Sequence[int] = ROI, foreground: float = 0.5) -> list[int]:
    """Where the part of a sample begins in a pass; below 0 where it is larger."""
    draws = Draws(SEED, number, row, 0, "RandSpatialCrop")
    draws.uniform()
    centre = None
    if draws.uniform() < foreground and y.any():
        classes = [np.argwhere(y == one) for one in range(1, 256) if (y == one).any()]
        chosen = classes[draws.whole(len(classes))]
        centre = chosen[draws.whole(len(chosen))]
    found = []
    for axis, (size, extent) in enumerate(zip(roi, y.shape, strict=True)):
        drawn = draws.whole(extent - size + 1) if centre is None and size <= extent else 0
        start = drawn if centre is None else int(np.clip(centre[axis] - size // 2, 0, max(extent - size, 0)))
        found.append(-((size - extent) // 2) if size > extent else start)
    return found


def cut(x: Array, y: Array, starts: Sequence[int], roi: Sequence[int] = ROI) -> tuple[Array, Array]:
    """A part of a sample, cut out and padded by NumPy; voxels around the sample have the label -100."""
    pads = [(size, size) for size in roi]
    part = tuple(slice(size + start, 2 * size + start) for size, start in zip(roi, starts, strict=True))
    image = np.pad(zscored(x), [(0, 0), *pads])[(slice(None), *part)]
    return image, np.pad(y.astype("int64"), pads, constant_values=-100)[part]


def zscored(x: Array) -> Array:
    axes = (1, 2, 3)
    found: Array = (x - x.mean(axes, keepdims=True)) / x.std(axes, keepdims=True)
    return found


def batch(samples: Samples, number: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The batch of a pass, with the mirrors of ``RandFlip(0.5, 0)``."""
    found = []
    for row in rows:
        flips = Draws(SEED, number, row, 1, "RandFlip").uniform() < 0.5
        x, y = samples[row]
        found.append([np.flip(one, -3) if flips else one for one in cut(x, y, corner(y, row, number))])
    images, labels = (torch.from_numpy(np.stack(list(one))) for one in zip(*found, strict=True))
    return images, labels


def in_torch(samples: Samples, course: Course) -> tuple[UNet3d, list[float]]:
    twin = small_unet()

    def loss(number: int, rows: Sequence[int]) -> Tensor:
        x, y = batch(samples, number, rows)
        return F.cross_entropy(twin(x), y)

    steps = (
        [functools.partial(loss, one.first_pass + place, rows) for place, rows in enumerate(one.batches)]
        for one in course.steps_from(0)
    )
    return twin, runs.in_torch(torch.optim.SGD(twin.parameters(), lr=LR), steps)


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
    net: Exported, data: Data, tmp_path: Path, options: dict[str, Any], how: dict[str, Any]
) -> None:
    path, samples = data
    run = oocdl.fit(net, path, workdir=tmp_path / "run", **{**options, **how})
    assert not any("@" in name for name in run.plan.kinds if not name.startswith("validation"))
    course = Course(len(SHAPES), run.settings)
    twin, losses = in_torch(samples, course)
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-9)
    runs.trained_as(run, twin)
    assert oocdl.open(run.path).settings == run.settings
    if "validation" in how:
        twin.eval()
        expected = []
        for row in (1, 4):
            x, y = samples[row]
            pads = [(-extent % 2 // 2, -extent % 2 - -extent % 2 // 2) for extent in y.shape]
            image = torch.from_numpy(np.pad(zscored(x), [(0, 0), *pads])).double()
            truth = torch.from_numpy(np.pad(y.astype("int64"), pads, constant_values=-100))
            with torch.no_grad():
                expected.append(F.cross_entropy(twin(image[None]), truth[None]).item())
        assert run.history[-1]["val_loss"] == pytest.approx(np.mean(expected), rel=1e-9)
        assert run.evaluate(path)["loss"] > 0


def test_bits_are_those_of_a_run_that_was_killed_and_of_one_worker(
    net: Exported, data: Data, tmp_path: Path, options: dict[str, Any]
) -> None:
    options |= {"precision": "float32", "parallel": {"space": (3, 2)}, "shuffle": True}
    run = oocdl.fit(net, data[0], workdir=tmp_path / "run", **options)
    options |= {"plan": run.path}
    with pytest.raises(RuntimeError):
        oocdl.fit(net, data[0], workdir=tmp_path / "other", callbacks=[runs.broken_after(3)], **options)
    tables = (tmp_path / "other" / "samples.json").read_bytes()
    one = functools.partial(scheduler.get, workers=1)
    runs.same(oocdl.fit(net, data[0], workdir=tmp_path / "other", scheduler=one, **options), run)
    assert tables == (tmp_path / "other" / "samples.json").read_bytes()


def test_writing_tables_takes_less_memory_than_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store:
        path, text = tmp_path, ""

        def read_sealed(self, file: str) -> Any:
            return json.loads(self.text) if self.text else None

        def write_sealed(self, file: str, body: Any) -> None:
            self.text = json.dumps(body)

    random, store = np.random.default_rng(0), Store()
    voxels = [[np.sort(random.choice(1 << 24, MOST_VOXELS, False))] for _ in range(50)] + [[]]
    made: Any = Preparation(voxels=voxels)
    monkeypatch.setattr(preparing, "measured", lambda *_: made)
    opened: Any = open_dataset({"x": np.zeros(1)})
    tracemalloc.start()
    try:
        for _ in range(2):
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            found = preparing.prepared(made, cast(Any, store), opened, (), str)
            assert tracemalloc.get_traced_memory()[1] - held < 2 * made.nbytes
    finally:
        tracemalloc.stop()
    listed = [[places.tolist() for places in one] for one in voxels]  # as runs of earlier versions have them
    store.text = json.dumps(json.loads(store.text) | {"voxels": listed})
    for one in (found, preparing.prepared(made, cast(Any, store), opened, (), str)):
        for ours, theirs in zip(one.voxels, voxels, strict=True):
            assert len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


class TwoHeads(nn.Module):
    """Classes of voxels, and a number for the sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv3d(2, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.conv(x)
        return {"seg": found, "age": self.linear(found.mean((2, 3, 4)))}


def test_targets_of_another_shape_stay_and_arrays_in_memory_are_cropped(tmp_path: Path) -> None:
    random, shape, roi = np.random.default_rng(0), (9, 8, 7), (4, 8, 9)
    x, age = random.normal(size=(3, 2, *shape)), random.normal(size=(3, 2))
    seg = random.integers(0, 3, (3, *shape), "uint8")
    net = oocdl.from_torch(TwoHeads().double(), torch.zeros(1, 2, 8, 8, 8).double(), tmp_path / "net.onnx")
    loss = {"seg": ("cross_entropy", 1.0), "age": ("mse", 1.0)}
    run = oocdl.fit(
        net, {"x": x, "seg": seg, "age": age}, loss=loss, augment=RandSpatialCrop(roi, CROP.foreground),
        normalize="zscore", workdir=tmp_path / "run", **EXACT,
    )  # fmt: skip
    twin = TwoHeads().double()

    def expected(row: int) -> Tensor:
        image, labels = cut(x[row], seg[row], corner(seg[row], row, row, roi), roi)
        outputs = twin(torch.from_numpy(image[None].copy()))
        of_age = F.mse_loss(outputs["age"], torch.from_numpy(age[row : row + 1]))
        return F.cross_entropy(outputs["seg"], torch.from_numpy(labels[None].copy())) + of_age

    steps = [[functools.partial(expected, row)] for row in range(3)]
    losses = runs.in_torch(torch.optim.SGD(twin.parameters(), lr=LR), steps)
    assert losses_of(run) == pytest.approx(losses, rel=1e-9)


def test_chunks_that_no_crop_touches_are_not_read(net: Exported, tmp_path: Path) -> None:
    """They may even be damaged, but for those in the middle, of which a run notes some values."""
    random, group = np.random.default_rng(0), zarr.open_group(tmp_path / "data.zarr", mode="w")
    y = random.integers(0, 3, (1, 32, 32, 32), "uint8")
    group.create_array("x", data=random.normal(size=(1, 1, 32, 32, 32)).astype("f4"), chunks=(1, 1, 4, 4, 4))
    group.create_array("y", data=y, chunks=(1, 32, 32, 32))
    touched = {place for place in np.ndindex(8, 8, 8) if all(at in (3, 4, 5) for at in place)}
    for number in range(3):
        starts = corner(y[0], 0, number, foreground=0)
        chunks = [range(low // 4, (low + size - 1) // 4 + 1) for low, size in zip(starts, ROI, strict=True)]
        touched |= set(itertools.product(*chunks))
    for place in np.ndindex(8, 8, 8):
        if place not in touched:
            (tmp_path / "data.zarr/x/c/0/0" / "/".join(map(str, place))).write_bytes(b"damaged")
    assert len(touched) < 150
    options = {**EXACT, "steps": 3, "augment": RandSpatialCrop(ROI)}
    assert oocdl.fit(net, tmp_path / "data.zarr", workdir=tmp_path / "run", **options).steps == 3


@pytest.mark.slow
def test_a_sample_four_times_the_budget_is_never_whole_in_memory(net: Exported, tmp_path: Path) -> None:
    """By the command line, in a process of its own; most chunks of the sample are not stored."""
    shape, memory = (704, 720, 832), 400 << 20
    group = zarr.open_group(tmp_path / "data.zarr", mode="w")
    x = group.create_array("x", shape=(1, 1, *shape), chunks=(1, 1, 64, 64, 64), dtype="float32")
    y = group.create_array("y", shape=(1, *shape), chunks=(1, 64, 128, 128), dtype="uint8")
    x[..., 640:, 640:, 640:], y[:, 700:, 700:, 800:] = 1.0, 1
    assert x.nbytes > 4 * memory
    crop, more = "RandSpatialCrop((32, 32, 32), foreground=1.0)", ("--threads", 1, "--engine", "onnxruntime")
    words = ("fit", net.path, "data.zarr", "--augment", crop, "--steps", 2, "--workdir", "run", *more)
    done = python("-m", "oocdl", *words, "--memory", memory, folder=tmp_path, seconds=600)
    assert done.returncode == 0, done.stderr
    assert 0 < oocdl.open(tmp_path / "run").peak_bytes <= memory


def test_foreground_is_chosen_alike_in_any_order_and_shared_by_classes() -> None:
    random = np.random.default_rng(0)
    y = random.choice([0, 1, 2, 9], (40, 30, 20), p=[0.2, 0.5, 0.2999, 0.0001]).astype("uint8")
    slabs = [((low, low + 10), (0, 30), (0, 20)) for low in range(0, 40, 10)]
    found = [
        foreground_voxels("0", y.shape, [(box, y[as_slices(box)]) for box in order], ignored=2)
        for order in (slabs, slabs[::-1], [whole(y.shape)])
    ]
    for ones, nines in found:
        assert np.array_equal(ones, found[0][0]) and np.array_equal(nines, np.flatnonzero(y == 9))
        assert len(set(ones)) == len(ones) == MOST_VOXELS // 2 and (y.ravel()[ones] == 1).all()
    spread = np.histogram(found[0][0], 10, (0, y.size))[0]
    assert (abs(spread - MOST_VOXELS / 20) < 60).all()


def test_what_does_not_go_together_is_refused_before_the_run(
    net: Exported, data: Data, tmp_path: Path
) -> None:
    def refused(message: str, *augment: Any, where: Any = data[0], net: Any = net, **options: Any) -> None:
        kind, given = options.pop("kind", InputError), {**EXACT, "augment": augment, **options}
        runs.refused(kind, message, lambda: oocdl.plan(net, where, **given))

    refused("stands once, in front of all", RandFlip(0.5), CROP)
    refused("stands once, in front of all", CROP, CROP)
    refused("a roi_size of 2 extents, there are 3", RandSpatialCrop((8, 8)))
    refused(r"cuts \[8, 7, 8\], and the network takes multiples of \[1, 2, 1\]", RandSpatialCrop((8, 7, 8)))
    refused("ignores no label: .* none of them below a roi_size", RandSpatialCrop(16), loss="dice")
    refused("axes 0 and 1 have 8 and 6", CROP, RandRotate90(0.5))
    numbers = {"x": np.zeros((2, 1, 8, 8, 8), "f4"), "y": np.zeros((2, 3, 8, 8, 8), "f4")}
    refused("no target has a label for each voxel; .*leave foreground= out", CROP, where=numbers, loss="mse")
    fixed = oocdl.from_torch(
        small_unet(), torch.zeros(1, 1, *ROI).double(), tmp_path / "fixed.onnx", dynamic="batch"
    )
    arrays = {"x": np.zeros((3, 1, 8, 8, 8), "f4"), "y": np.zeros((3, 8, 8, 8), "u1")}
    other = {"net": fixed, "where": arrays, "kind": ModelError, "validation": [1]}
    refused("given 8 along axis 3, where the network is for 6", CROP, **other)
    made = oocdl.plan(net, data[0], augment=[CROP, "nnunet"], **EXACT)
    assert "trains on RandSpatialCrop(roi_size=(8, 6, 6), foreground=0.5)" in " ".join(str(made).split())
    for wrong in (0, (8, 2.5, 8), "a", ()):
        with pytest.raises(InputError, match="takes a roi_size of whole numbers from 1"):
            RandSpatialCrop(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="takes a foreground from 0 to 1, got 2"):
        RandSpatialCrop(8, 2)
