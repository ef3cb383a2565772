"""Slices of a sample: read by the run, seen wherever the run is seen."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from bokeh.models import LinearColorMapper

import oocdl
from oocdl.cli.predict_sample import predict
from oocdl.dashboard.panels.pictures import Pictures
from oocdl.dashboard.samples import MOST_PIXELS, contours, plane, read_sample, read_whole, unpacked
from oocdl.dashboard.view import View
from oocdl.errors import DatasetError
from oocdl.losses import CrossEntropy, Dice, Focal
from oocdl.storage.dataset.dataset import DataArray, Dataset, DatasetSpec, open_dataset
from tests.kit import nets, settings

QUICK: dict[str, Any] = {**settings.QUICK, "engine": "numpy", "steps": 2, "loss": "dice_ce"}


def dataset_of(folder: Path, chunks: tuple[int, ...], **arrays: np.ndarray) -> Dataset:
    group = zarr.open_group(str(folder / "data.zarr"), mode="w")
    for name, values in arrays.items():
        group.create_array(name, data=values, chunks=(1, *chunks[1 - values.ndim :]))
    return open_dataset(DatasetSpec(str(folder / "data.zarr"), "", tuple(arrays), True))


def test_a_slice_is_that_of_the_array_thinned(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    image = random.random((3, 2, 5, 2 * MOST_PIXELS + 7, 300), np.float32)
    labels = random.integers(0, 4, image.shape[:1] + image.shape[2:], np.uint8)
    words = random.integers(0, 9, (3, 12))
    dataset = dataset_of(tmp_path, (1, 2, 100, 77), image=image, labels=labels, words=words)
    images = (("input", "image"), ("target", "labels"), ("input", "words"))
    found = unpacked(read_sample(dataset, images, 7, 1).packed())
    assert (found.step, found.sample) == (7, 1)
    seen, aimed = found.pictures
    assert (seen.is_labels, aimed.is_labels) == (False, True)
    np.testing.assert_array_equal(seen.pixels, image[1, 0, 2, ::3, ::2])
    np.testing.assert_array_equal(aimed.pixels, labels[1, 2, ::3, ::2])
    assert max(seen.pixels.shape) <= MOST_PIXELS


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("job")
    return nets.write_conv(folder / "net.onnx"), nets.write_data(folder / "data.zarr", nets.volumes(3, 8))


def shown(run: Path) -> tuple[set[str], str]:
    """Titles of the pictures on the page of a run, and the words below."""
    view, panel = View(run), Pictures()
    view.refresh()
    panel.update(view)
    figures = [one for one in panel.root.references() if type(one).__name__ == "figure"]
    return {one.title.text for one in figures}, panel._words.text


def test_a_run_that_was_copied_has_its_pictures(job: tuple[Path, Path], tmp_path: Path) -> None:
    data = shutil.copytree(job[1], tmp_path / "data.zarr")
    run = oocdl.fit(job[0], data, workdir=tmp_path / "run", keep=["y"], **QUICK)
    shutil.rmtree(data)
    copy = shutil.copytree(run.path, tmp_path / "elsewhere")
    titles, words = shown(copy)
    assert {title.partition(":")[0] for title in titles} == {"input", "target", "output"}
    assert "inputs and targets of step 2, outputs of step 2" in words


def test_what_cannot_be_read_is_told_once_and_ends_no_run(
    job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, tried = DataArray.read, []

    def fails(self: DataArray, region: Any) -> Any:
        if (tmp_path / "run" / "live").is_dir() and not tried:
            tried.append(region)
            raise DatasetError("gone")
        return read(self, region)

    monkeypatch.setattr(DataArray, "read", fails)
    data = shutil.copytree(job[1], tmp_path / "data.zarr")
    run = oocdl.fit(job[0], data, workdir=tmp_path / "run", commit_seconds=0, **QUICK)
    shutil.rmtree(data)
    titles, words = shown(run.path)
    view = View(run.path)
    view.refresh()
    told = [note["text"] for note in view.notes if note["kind"] == "notice"]
    assert len(tried) == 1 and titles == set() and told == ["pictures of samples end here: gone"]
    assert "no output is kept: fit(keep=[&#x27;y&#x27;])" in words


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_planes_are_upright(axis: int) -> None:
    """Axes x, y, z point right, front and up: up in a picture is z, or y from above."""
    volume = np.random.default_rng(0).random((3, 4, 5), np.float32)
    found, others = plane(volume, axis, 1, is_nifti=True), [n for n in range(3) if n != axis]
    across, up = others
    at = [1, 1, 1]
    at[across], at[up] = 2, 3
    assert found[3, 2] == volume[tuple(at)]
    itk = plane(volume, axis, 1, is_nifti=False)
    assert itk.shape == tuple(volume.shape[n] for n in others)
    assert itk[0, 0] == volume[tuple(0 if n != axis else 1 for n in range(3))] or axis == 0


def test_contours_lie_between_classes() -> None:
    labels = np.zeros((4, 4), np.float32)
    labels[1:3, 1:3] = 2
    found = contours(labels)
    assert len(found["x0"]) == 8 and set(found["of"]) == {2.0}
    assert {*found["x0"], *found["x1"], *found["y0"], *found["y1"]} == {1.0, 2.0, 3.0}


@pytest.fixture(scope="module")
def run(job: tuple[Path, Path]) -> oocdl.Run:
    return oocdl.fit(*job, **QUICK)


def test_a_sample_is_read_thinned_where_the_dataset_is_seen(run: oocdl.Run, tmp_path: Path) -> None:
    view, panel = View(run.path), Pictures()
    view.refresh()
    panel.update(view)
    titles = {one.title.text for one in panel.root.references() if type(one).__name__ == "figure"}
    assert titles == {"sagittal: x", "coronal: y", "axial: z"}
    sources = panel._planes._sources[0]
    assert len(sources["contour"].data["x0"]) > 0 and panel._sample is not None
    panel._planes.show(panel._sample, np.ones_like(panel._sample.pictures[0].pixels), {})
    assert sources["classes"].data["image"][0].max() == 0
    panel._planes.show(panel._sample, None, {})  # the prediction was of another sample
    assert sources["classes"].data["image"][0].max() == -1
    brighter = tuple(replace(one, pixels=one.pixels + 7) for one in panel._sample.pictures)
    panel._planes.show(replace(panel._sample, pictures=brighter), None, {})
    mappers = [one for one in panel.root.references() if isinstance(one, LinearColorMapper)]
    assert (brighter[0].pixels.min(), brighter[0].pixels.max()) in [(one.low, one.high) for one in mappers]
    assert view.facts is not None
    assert read_whole(replace(view.facts, dataset=str(tmp_path / "gone.zarr")), 2, 0) is None


def test_a_sample_is_predicted_without_keep(run: oocdl.Run, job: tuple[Path, Path], tmp_path: Path) -> None:
    predict(run.path, 1, tmp_path / "found.npz")
    logits = run.predict(job[1], tmp_path / "all.zarr")["y"][1]
    meant = zarr.open_group(str(job[1]), mode="r")["y"][1]
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["labels"], logits.argmax(axis=0))
        for n, dice in zip(found["classes"], found["dice"], strict=True):
            both = ((meant == n) & (found["labels"] == n)).sum()
            assert dice == pytest.approx(2 * both / ((meant == n).sum() + (found["labels"] == n).sum()))


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [(CrossEntropy(ignore_index=255), 255), (Dice(ignore_index=7), 7), ("dice_ce", -100), (Focal(), None)],
)
def test_labels_that_the_loss_ignores_are_in_no_dice_of_the_page(
    tmp_path: Path, loss: Any, ignored: int | None
) -> None:
    arrays = nets.volumes(2, 8)
    labels = arrays["y"].astype(np.int64)
    if ignored is not None:
        labels[:, :4] = ignored
    data = nets.write_data(tmp_path / "data.zarr", {"x": arrays["x"], "y": labels})
    made = oocdl.fit(nets.write_conv(tmp_path / "net.onnx"), data, **QUICK | {"loss": loss})
    predict(made.path, 0, tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as found:
        dice = dict(zip(found["classes"].tolist(), found["dice"].tolist(), strict=True))
    meant = made.evaluate({"x": arrays["x"][:1], "y": labels[:1]}, metrics="dice")
    assert dice == pytest.approx({n: meant[f"dice/{n}"] for n in (0, 1) if np.isfinite(meant[f"dice/{n}"])})


def test_the_page_names_the_version_that_it_has_predicted_by(job: tuple[Path, Path], tmp_path: Path) -> None:
    data = nets.volumes(3, 8)
    data["y"][2] = 1 - data["y"][2]  # what is held out is the contrary
    stop = oocdl.callbacks.EarlyStopping("val_loss", patience=2)
    path = nets.write_data(tmp_path / "data.zarr", data)
    quick = QUICK | {"steps": 30, "lr": 0.05, "validation": [2], "callbacks": [stop]}
    made = oocdl.fit(job[0], path, workdir=tmp_path / "run", **quick)
    (best,) = made.checkpoints
    assert best < made.steps
    view, panel, out = View(made.path), Pictures(), tmp_path / "found.npz"
    view.refresh()
    panel.update(view)
    predict(made.path, 0, out)
    with subprocess.Popen(["true"], stderr=subprocess.PIPE) as ended:
        ended.wait()
        panel._predicted(out, ended)
    assert f"by the weights of step {best}, the best by its validation" in panel._words.text
