"""Slices of a sample: read by the run, seen wherever the run is seen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocdl
from oocdl.dashboard.panels.pictures import Pictures
from oocdl.dashboard.samples import MOST_PIXELS, read_sample, unpacked
from oocdl.dashboard.view import View
from oocdl.errors import DatasetError
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
