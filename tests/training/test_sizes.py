"""Samples of different sizes train, validate, predict and go on as PyTorch does, each at its own size."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor

import oocdl
from oocdl.cli.predict_sample import predict
from oocdl.config import make_settings
from oocdl.dashboard.facts import facts_of
from oocdl.dashboard.samples import read_whole
from oocdl.errors import DatasetError, InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.optim import SGD
from oocdl.planning import sample_sizes
from oocdl.planning.binding import bind
from oocdl.planning.sample_sizes import sized
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.dataset.sampling import permutation
from tests.kit import nets, settings
from tests.kit.models import small_unet
from tests.kit.runs import Killed, broken_after, in_torch, losses_of, passes_of, same

SHAPES = [(9, 8, 10), (16, 12, 8), (7, 5, 6), (16, 12, 8), (8, 6, 5)]
"""Padded to multiples of 2 these are three sizes, of which two are there twice."""
pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")
EXACT: dict[str, Any] = {**settings.EXACT, "optimizer": SGD(lr=0.05, momentum=0.9)}
Samples = list[tuple[np.ndarray, np.ndarray]]
Data = tuple[Path, Samples]


def write(path: Path, shapes: Sequence[tuple[int, ...]], seed: int = 0) -> Samples:
    """A dataset with a group a sample; returns its content."""
    group = zarr.open_group(str(nets.write_samples(path, shapes, seed, classes=3)), mode="r")
    names = group.attrs["oocdl"]["samples"]  # type: ignore[index,call-overload]
    return [(np.asarray(group[f"{name}/x"]), np.asarray(group[f"{name}/y"])) for name in names]


def padded(samples: Samples, row: int, step: int = 2) -> tuple[Tensor, Tensor]:
    x, y = samples[row]
    pads = [(-extent % step // 2, -extent % step - -extent % step // 2) for extent in y.shape]
    image = torch.from_numpy(np.pad(x, [(0, 0), *pads])).double()
    return image, torch.from_numpy(np.pad(y.astype("int64"), pads, constant_values=-100))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "unet.onnx"
    return oocdl.from_torch(small_unet(), torch.zeros(1, 1, 8, 8, 8).double(), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    path = tmp_path_factory.mktemp("data") / "data.zarr"
    return path, write(path, SHAPES)


@pytest.fixture(scope="module")
def trained(net: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    workdir = tmp_path_factory.mktemp("trained") / "run"
    return oocdl.fit(net, data[0], workdir=workdir, steps=2, **EXACT)


def outputs_of(run: oocdl.Run, samples: Samples) -> list[np.ndarray]:
    """What PyTorch predicts, of the sample's own voxels."""
    net, found = small_unet().eval(), []
    run.load_into(net)
    for row, (x, _) in enumerate(samples):
        image, _ = padded(samples, row)
        with torch.no_grad():
            logits = net(image[None])[0].numpy()
        starts = [-extent % 2 // 2 for extent in x.shape[1:]]
        inner = tuple(slice(s, s + extent) for s, extent in zip(starts, x.shape[1:], strict=True))
        found.append(logits[(slice(None), *inner)])
    return found


@pytest.mark.parametrize("batch", [1, 2])
def test_predictions_have_each_samples_own_size(
    data: Data, trained: oocdl.Run, tmp_path: Path, batch: int
) -> None:
    path, samples = data
    group = trained.predict(path, tmp_path / "out.zarr", batch_size=batch)
    labels = trained.predict(path, tmp_path / "labels.zarr", batch_size=batch, argmax=True)
    (output,) = [name for name, _ in group["case_000"].arrays()]  # type: ignore[union-attr]
    for number, expected in enumerate(outputs_of(trained, samples)):
        place = f"case_{number:03}/{output}"
        np.testing.assert_allclose(group[place], expected, rtol=1e-9, atol=1e-11)
        np.testing.assert_array_equal(labels[place], expected.argmax(0))
    assert len(zarr.open_group(tmp_path / "out.zarr").attrs["oocdl"]["samples"]) == len(samples)  # type: ignore[arg-type,index,call-overload]


def test_a_prediction_that_was_killed_goes_on(
    data: Data, trained: oocdl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained.predict(data[0], tmp_path / "whole.zarr")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        passes_of(patch, 3)
        trained.predict(data[0], tmp_path / "out.zarr")
    with pytest.raises(DatasetError, match="not finished"):
        trained.evaluate(tmp_path / "out.zarr")
    with monkeypatch.context() as patch:
        seen = passes_of(patch)
        group = trained.predict(data[0], tmp_path / "out.zarr")
    assert len(seen) == len(SHAPES) - 3
    for name, array in whole.members(max_depth=None):
        if isinstance(array, zarr.Array):
            np.testing.assert_array_equal(group[name], array)


@pytest.mark.parametrize("validation", [(1, 3, 4), 0.4, "a dataset"], ids=str)
def test_validations_take_each_size(net: Path, data: Data, tmp_path: Path, validation: Any) -> None:
    path, samples = data
    rows: Sequence[int] = validation if isinstance(validation, tuple) else []
    if validation == "a dataset":
        validation, samples = tmp_path / "more.zarr", write(tmp_path / "more.zarr", SHAPES[1:4], seed=7)
        rows = range(3)
    options = {**EXACT, "loss": "dice_ce", "metrics": ["dice", "accuracy"], "batch_size": 2}
    run = oocdl.fit(net, path, workdir=tmp_path / "run", validation=validation, **options)
    rows = rows or list(run.plan.course.validated)
    twin, total = small_unet().eval(), 0.0
    run.load_into(twin)
    hits = counted = 0
    sizes: dict[Any, list[int]] = {}
    for row in rows:
        sizes.setdefault(padded(samples, row)[1].shape, []).append(row)
    for batch in (alike[at : at + 2] for alike in sizes.values() for at in range(0, len(alike), 2)):
        x, y = (torch.stack(list(f)) for f in zip(*(padded(samples, row) for row in batch), strict=True))
        with torch.no_grad():
            logits = twin(x)
        keep = (y != -100).double()
        t = F.one_hot(y.clamp(min=0), 3).movedim(-1, 1) * keep[:, None]
        p = logits.softmax(1) * keep[:, None]
        axes = (0, 2, 3, 4)
        dice = (2 * (p * t).sum(axes) + 1e-5) / ((p + t).sum(axes) + 1e-5)
        total += (F.cross_entropy(logits, y) + 1 - dice.mean()).item() * len(batch)
        hits += int(((logits.argmax(1) == y) & (y != -100)).sum())
        counted += int((y != -100).sum())
    row = run.history[-1]
    np.testing.assert_allclose(row["val_loss"], total / len(rows), rtol=1e-9)
    np.testing.assert_allclose(row["val_accuracy"], hits / counted, rtol=1e-12)
    if not isinstance(validation, tuple | float):
        found = run.evaluate(validation, batch_size=2, metrics=["dice", "accuracy"])
        np.testing.assert_allclose(found["loss"], row["val_loss"], rtol=1e-12)
        np.testing.assert_allclose(found["dice"], row["val_dice"], rtol=1e-12)


def test_another_dataset_is_refused_on_resume(net: Path, data: Data, tmp_path: Path) -> None:
    path = tmp_path / "data.zarr"
    write(path, SHAPES)
    oocdl.fit(net, path, workdir=tmp_path / "run", steps=1, **EXACT)
    write(path, [(10, 8, 10), *SHAPES[1:]])
    with pytest.raises(InputError, match="was started differently"):
        oocdl.fit(net, path, workdir=tmp_path / "run", steps=2, **EXACT)


def broken(path: Path, what: str) -> str:
    """Break a dataset; returns what the refusal says."""
    group = zarr.open_group(str(path), mode="r+")
    match what:
        case "lost array":
            del group["case_002/y"]
            return "sample 'case_002' of .* has no array 'y'"
        case "lost sample":
            group.attrs["oocdl"] = {"samples": ["case_000", "case_9"]}
            return "'case_9' that is not there"
        case "other size":
            del group["case_001/y"]
            group.create_array("case_001/y", data=np.zeros((4, 4, 4), "u1"))
            return r"samples differ in size, and not as the inputs do: .*"
        case "other type":
            del group["case_001/y"]
            group.create_array("case_001/y", data=np.zeros((16, 12, 8), "i4"))
            return "case_000/y is uint8 with 3 axes, case_001/y int32"
        case "class":
            group["case_003/y"][2, 1, 0] = 7  # type: ignore[index]
            return "7"
    raise AssertionError(what)


@pytest.mark.parametrize("what", ["lost array", "lost sample", "other size", "other type", "class"])
def test_broken_samples_are_refused(net: Path, tmp_path: Path, what: str) -> None:
    write(tmp_path / "data.zarr", SHAPES[:4])
    text = broken(tmp_path / "data.zarr", what)
    with pytest.raises(DatasetError, match=text):
        oocdl.fit(net, tmp_path / "data.zarr", workdir=tmp_path / "run", **EXACT)
    assert what == "class" or not (tmp_path / "run").exists()


def test_a_loss_that_cannot_ignore_padding_is_refused(net: Path, data: Data, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ignores no label"):
        oocdl.plan(net, data[0], **{**EXACT, "loss": "dice"})
    write(tmp_path / "even.zarr", [(8, 8, 8), (8, 12, 4)])
    assert len(oocdl.plan(net, tmp_path / "even.zarr", **{**EXACT, "loss": "dice"}).sizes) == 2


def test_the_plan_shows_every_size(net: Path, data: Data) -> None:
    plan = oocdl.plan(net, data[0], **EXACT)
    assert sorted(plan.sizes) == ["main", "main@10x8x10", "main@8x6x6"]
    assert "10x8x10" in str(plan)
    wider = oocdl.plan(net, data[0], pad_to_multiple_of=16, **EXACT)
    assert list(wider.sizes) == ["main"]


def test_a_search_counts_batches_of_each_size(net: Path, data: Data, tmp_path: Path) -> None:
    options = {**EXACT, "batch_size": 2, "epochs": 1, "memory": "4GiB"}  # a process of many tests is large
    found = oocdl.search(
        net, data[0], space={"accumulate": [1, 2]}, trials=2, rungs=1, workdir=tmp_path / "s", **options
    )
    assert sorted((row["accumulate"], row["steps"]) for row in found.table) == [(1, 3), (2, 2)]


def test_pages_show_samples_as_they_are(data: Data, trained: oocdl.Run, tmp_path: Path) -> None:
    facts = facts_of(trained.plan, 2)
    assert facts.images == [("input", "x"), ("target", "y")]
    for row in (0, 2):
        found = read_whole(facts, 1, row)
        assert found is not None
        assert [picture.pixels.shape for picture in found.pictures] == [SHAPES[row]] * 2
        np.testing.assert_array_equal(found.pictures[1].pixels, data[1][row][1])
    predict(trained.path, 2, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as made:
        expected = outputs_of(trained, data[1])[2].argmax(0)
        np.testing.assert_array_equal(made["labels"], expected)
        truth = data[1][2][1]
        dice = [
            2 * ((expected == c) & (truth == c)).sum() / ((expected == c).sum() + (truth == c).sum())
            for c in made["classes"]
        ]
        np.testing.assert_allclose(made["dice"], dice)


def zscored(samples: Samples) -> Samples:
    doubled = [(x.astype("f8"), y) for x, y in samples]
    return [((x - x.mean()) / x.std(), y) for x, y in doubled]


def test_samples_are_normalised_without_what_is_around_them(net: Path, data: Data, tmp_path: Path) -> None:
    path, samples = data
    run = oocdl.fit(net, path, workdir=tmp_path / "run", normalize="zscore", validation=path, **EXACT)
    made = zscored(samples)
    twin = small_unet()

    def loss(row: int) -> Tensor:
        x, y = padded(made, row)
        return F.cross_entropy(twin(x[None]), y[None])

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    losses = in_torch(optimizer, [[functools.partial(loss, row)] for row in range(5)])
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-6)
    found = [loss(row).item() for row in range(5)]
    np.testing.assert_allclose(run.history[-1]["val_loss"], np.mean(found), rtol=1e-6)
    np.testing.assert_allclose(run.evaluate(path)["loss"], np.mean(found), rtol=1e-6)


def test_transforms_take_each_size(net: Path, data: Data, tmp_path: Path) -> None:
    options: dict[str, Any] = {**EXACT, "normalize": "zscore", "augment": "nnunet", "shuffle": True}
    whole = oocdl.fit(net, data[0], workdir=tmp_path / "whole", **options)
    with pytest.raises(RuntimeError):
        oocdl.fit(net, data[0], workdir=tmp_path / "run", callbacks=[broken_after(3)], **options)
    same(oocdl.fit(net, data[0], workdir=tmp_path / "run", **options), whole)
    flips = [oocdl.transforms.RandFlip(prob=1.0, spatial_axis=axis) for axis in (0, 1, 2)]
    flipped = oocdl.fit(net, data[0], workdir=tmp_path / "flip", **{**options, "augment": flips, "steps": 1})
    rows = [int(at) for at in permutation(0, 0, len(SHAPES))]
    x, y = (one.flip(*range(-3, 0)) for one in padded(zscored(data[1]), rows[0]))
    loss = F.cross_entropy(small_unet()(x[None]), y[None]).item()
    np.testing.assert_allclose(flipped.history[0]["loss"], loss, rtol=1e-6)


def test_labels_stay_whole_numbers_beside_padding(net: Path, data: Data, tmp_path: Path) -> None:
    turn = oocdl.transforms.RandAffine(prob=1.0, rotate_range=0.5)
    runs = []
    for dtype in ("uint64", "int16"):  # NumPy has floats for what holds both uint64 and -100
        group = zarr.open_group(str(tmp_path / f"{dtype}.zarr"), mode="w")
        for row, (x, y) in enumerate(data[1][:2]):
            group.create_array(f"{row}/x", data=x)
            group.create_array(f"{row}/y", data=y.astype(dtype))
        group.attrs["oocdl"] = {"samples": ["0", "1"]}
        options = {**EXACT, "augment": [turn], "workdir": tmp_path / dtype}
        runs.append(oocdl.fit(net, tmp_path / f"{dtype}.zarr", **options))
    assert losses_of(runs[0]) == losses_of(runs[1])


def test_of_many_sizes_the_odd_one_counts(net: Path, tmp_path: Path) -> None:
    shapes = [(16, 16, 16), (18, 18, 18), (20, 16, 16), (16, 19, 16), (22, 16, 16), (24, 24, 24)]
    write(tmp_path / "data.zarr", shapes)
    model, data = inspect_onnx(net), open_dataset(tmp_path / "data.zarr")
    made = make_settings(precision="float64")
    found = sized(model, data, bind(model, data, made), made, range(len(shapes)))
    assert found.spaces[0] == (24, 24, 24) and (16, 20, 16) in found.spaces and len(found.spaces) == 6
    assert all(extent % 2 == 0 for space in found.spaces for extent in space)
    only = sized(model, data, bind(model, data, made), made, [3])  # what is trained on comes first
    assert only.spaces[0] == (16, 20, 16) and only.labels[3] == ""


@pytest.mark.parametrize(
    ("strides", "multiple", "shapes"),
    [
        ((3,), [3, 3, 3], [(10, 20, 20), (22, 11, 9)]),  # multiples of 4 would do for these, by chance
        ((2, 3), [6, 6, 6], [(13, 20, 20), (31, 25, 9)]),
        (((1, 2, 2), 2, 3), [6, 12, 12], [(7, 20, 31), (13, 25, 9)]),
        (((3, 1, 5), (1, 2, 2)), [3, 2, 10], [(n, n, n) for n in range(7, 13)]),
        ((7,), [4, 2, 1], [(25, 27, 28)]),  # by chance alone
        ((2, 2, 2), [4, 2, 4], [(6, 7, 6)]),  # as much as these need
    ],
    ids=str,
)
def test_sizes_are_padded_to_the_least_multiples(
    strides: Any, multiple: list[int], shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    write(tmp_path / "data.zarr", shapes)
    one = torch.zeros(1, 1, 64, 72, 60)
    net = oocdl.from_torch(Strided(*strides), one, tmp_path / "net.onnx", verify=False)
    model, data, asked = inspect_onnx(net), open_dataset(tmp_path / "data.zarr"), make_settings()
    with pytest.MonkeyPatch.context() as patch:
        probes: list[Any] = []
        real = sample_sizes._why_not
        patch.setattr(sample_sizes, "_why_not", lambda *a: probes.append(a) or real(*a))
        found = sized(model, data, bind(model, data, asked), asked, range(len(shapes)))
    assert list(found.multiple) == multiple
    assert len(probes) < 40, len(probes)


class Strided(torch.nn.Module):
    """Takes any extents, and gives back multiples of its strides."""

    def __init__(self, *strides: int | tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        steps = strides or (2,)
        self.down = torch.nn.Sequential(
            *(torch.nn.Conv3d(3 if n else 1, 3, s, stride=s) for n, s in enumerate(steps))
        )
        self.up = torch.nn.Sequential(*(torch.nn.ConvTranspose3d(3, 3, s, stride=s) for s in steps[::-1]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(self.down(x))
        return found


def test_predictions_are_padded_as_what_was_trained_on(data: Data, tmp_path: Path) -> None:
    run = oocdl.fit(Strided().double(), data[0], workdir=tmp_path / "run", steps=1, **EXACT)
    group = run.predict(data[0], tmp_path / "out.zarr")
    shapes = [a.shape for _, a in group.members(max_depth=None) if isinstance(a, zarr.Array)]
    assert sorted(shapes) == sorted((3, *shape) for shape in SHAPES)
    assert run.facts["multiple"] == [2, 2, 2]


def test_outputs_without_channels_are_cropped_along_their_own_axes(tmp_path: Path) -> None:
    class Flat(Strided):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    nets.write_samples(tmp_path / "data.zarr", [(7, 7, 9), (8, 6, 10)])
    made = oocdl.from_torch(Flat().double(), torch.zeros(1, 1, 8, 8, 8).double(), tmp_path / "flat.onnx")
    nets.write_samples(tmp_path / "even.zarr", [(8, 8, 8), (8, 6, 10)])
    run = oocdl.fit(made, tmp_path / "even.zarr", workdir=tmp_path / "run", loss="bce", steps=1, **EXACT)
    group = run.predict(tmp_path / "data.zarr", tmp_path / "out.zarr")
    shapes = [a.shape for _, a in group.members(max_depth=None) if isinstance(a, zarr.Array)]
    assert sorted(shapes) == [(7, 7, 9), (8, 6, 10)]
    before = [np.asarray(array) for _, array in sorted(group["case_001"].arrays())]
    shutil.rmtree(tmp_path / "data.zarr" / "case_001" / "y")
    again: Any = run.predict(tmp_path / "data.zarr", tmp_path / "again.zarr")
    after = [np.asarray(array) for _, array in sorted(again["case_001"].arrays())]
    assert np.array_equal(before, after), "labels that some samples have are not read"
    with pytest.raises(DatasetError, match="sample 'case_001' of .* has no array 'y'"):
        run.evaluate(tmp_path / "data.zarr")
    shutil.rmtree(tmp_path / "data.zarr" / "case_001" / "x")
    with pytest.raises(DatasetError, match="sample 'case_001' of .* has no array 'x'"):
        run.predict(tmp_path / "data.zarr", tmp_path / "third.zarr")


def test_as_many_classes_as_a_padded_signal_is_long_are_all_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv1d(1, 8, 2, stride=2), torch.nn.AdaptiveAvgPool1d(1))
    module.append(torch.nn.Flatten()).double()
    group, random = zarr.open_group(str(tmp_path / "data.zarr"), mode="w"), np.random.default_rng(0)
    for row, length in enumerate((7, 8)):
        group.create_array(f"{row}/x", data=random.normal(size=(1, length)))
        group.create_array(f"{row}/y", data=np.array([row], "u1"))
    group.attrs["oocdl"] = {"samples": ["0", "1"]}
    given = {**EXACT, "inputs": {"input": "x"}, "pad_to_multiple_of": 8, "workdir": tmp_path / "run"}
    run = oocdl.fit(module, tmp_path / "data.zarr", **given)
    made = run.predict(tmp_path / "data.zarr", tmp_path / "out.zarr")
    assert [made[f"{row}/output"].shape for row in "01"] == [(8,), (8,)]  # type: ignore[union-attr]


def test_deep_supervision_takes_smaller_outputs(tmp_path: Path) -> None:
    class Deep(Strided):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.down(x), self.down(x)

    nets.write_samples(tmp_path / "data.zarr", [(7, 7, 9), (8, 6, 10)], classes=3)
    loss = oocdl.losses.DeepSupervision("cross_entropy", weights=(1.0, 0.5, 0.25))
    module = Deep().double()
    run = oocdl.fit(module, tmp_path / "data.zarr", workdir=tmp_path / "run", steps=1, loss=loss, **EXACT)
    group: Any = zarr.open_group(tmp_path / "data.zarr", mode="r")
    x, y = padded([(np.asarray(group["case_000/x"]), np.asarray(group["case_000/y"]))], 0)
    total = 0.0
    for logits, weight in zip(module(x[None]), loss.of_outputs(3), strict=True):
        labels = F.interpolate(y[None, None].double(), size=logits.shape[2:], mode="nearest-exact")[:, 0]
        total += weight * F.cross_entropy(logits, labels.long()).item()
    np.testing.assert_allclose(run.history[0]["loss"], total, rtol=1e-10)
    run.predict(tmp_path / "data.zarr", tmp_path / "out.zarr")


def test_what_pads_in_two_ways_is_refused(tmp_path: Path) -> None:
    class Two(Strided):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), 2 * super().forward(x)

    nets.write_samples(tmp_path / "data.zarr", [(7, 7, 9), (8, 6, 10)], classes=3)
    one = torch.zeros(1, 1, 8, 8, 8).double()
    path = oocdl.from_torch(Two().double(), one, tmp_path / "two.onnx", outputs=["a", "b"])
    losses = {"a": "cross_entropy", "b": oocdl.losses.CrossEntropy(ignore_index=0)}
    options = {**EXACT, "loss": losses, "targets": {"a": "y", "b": "y"}}
    with pytest.raises(InputError, match="read in another way"):
        oocdl.plan(path, tmp_path / "data.zarr", **options)


def test_stacked_samples_are_not_padded(net: Path, tmp_path: Path) -> None:
    nets.write_data(tmp_path / "data.zarr", nets.volumes(2, 8))
    with pytest.raises(InputError, match="these are stacked"):
        oocdl.plan(net, tmp_path / "data.zarr", pad_to_multiple_of=16, **EXACT)


def test_evaluations_of_a_run_on_crops_are_padded_as_asked(net: Path, data: Data, tmp_path: Path) -> None:
    """Its own steps pad nothing."""
    how = {"augment": oocdl.transforms.RandSpatialCrop(4), "pad_to_multiple_of": 8, "steps": 1, **EXACT}
    run = oocdl.fit(net, data[0], workdir=tmp_path / "run", **how)
    twin, found = small_unet().eval(), []
    run.load_into(twin)
    for x, y in (padded(data[1], row, 8) for row in range(len(SHAPES))):
        found.append(F.cross_entropy(twin(x[None]), y[None]).item())
    np.testing.assert_allclose(run.evaluate(data[0])["loss"], np.mean(found), rtol=1e-9)


def test_only_samples_that_are_trained_on_have_to_be_transformed(net: Path, tmp_path: Path) -> None:
    nets.write_samples(tmp_path / "data.zarr", [(8, 8, 8), (6, 6, 6), (8, 6, 8)])
    turns = [oocdl.transforms.RandRotate90(1.0)]
    oocdl.plan(net, tmp_path / "data.zarr", augment=turns, validation=[2], **EXACT)
    with pytest.raises(InputError, match="equal extents"):
        oocdl.plan(net, tmp_path / "data.zarr", augment=turns, **EXACT)
