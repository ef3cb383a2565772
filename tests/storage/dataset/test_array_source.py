"""NumPy arrays where a dataset is expected: read in place, with the results and the checks of one on disk."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.config import make_settings
from oocdl.errors import DatasetError, InputError
from oocdl.storage.dataset import dataset
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.training.job import job_of
from tests.kit import nets
from tests.kit.settings import QUICK


def test_regions_of_any_array_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dataset, "BLOCK_BYTES", 96)
    monkeypatch.setattr(dataset, "SMALL_BYTES", 96)
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6))
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", "r")
    turned = x.transpose(0, 3, 1, 2)
    for data in (x, x.astype(">f8"), np.asfortranarray(x), x[::-1, :, :, ::-1], turned, mapped):
        array = open_dataset({"x": data}).arrays["x"]
        assert array.chunks == ((1, 1, 2, 5) if data is turned else (1, 1, 2, 6))
        found = array.read(((1, 3), (0, 4), (1, 4), (2, 5)))
        assert found.dtype == np.float64 and (found == data[1:3, :4, 1:4, 2:5]).all()


def test_a_run_is_that_of_the_same_arrays_on_disk(tmp_path: Path) -> None:
    model, arrays = nets.write_mlp(tmp_path / "mlp.onnx"), nets.vectors()
    disk = nets.write_data(tmp_path / "data.zarr", arrays)
    options: dict[str, Any] = {**QUICK, "steps": 4, "batch_size": 2, "validation": arrays}
    there = oocdl.fit(model, disk, workdir=tmp_path / "disk", **options)
    here = oocdl.fit(model, arrays, workdir=tmp_path / "here", **options)
    for key in ("loss", "lr"):
        assert [row[key] for row in here.history] == [row[key] for row in there.history]
    assert all(np.array_equal(here.weights[name][...], there.weights[name][...]) for name in there.weights)
    assert here.evaluate(arrays) == there.evaluate(disk)
    one, other = here.predict(arrays, tmp_path / "a.zarr"), there.predict(disk, tmp_path / "b.zarr")
    assert np.array_equal(one["y"][...], other["y"][...])  # type: ignore[index]
    assert oocdl.plan(model, arrays, **{**QUICK, "batch_size": 2}).peak_bytes > 0


def test_a_run_goes_on_with_equal_arrays_only(tmp_path: Path) -> None:
    model, arrays = nets.write_mlp(tmp_path / "mlp.onnx"), nets.vectors()
    whole = oocdl.fit(model, arrays, workdir=tmp_path / "whole", **{**QUICK, "steps": 4})
    oocdl.fit(model, arrays, workdir=tmp_path / "run", **{**QUICK, "steps": 2})
    copies = {name: array.copy() for name, array in arrays.items()}
    run = oocdl.fit(model, copies, workdir=tmp_path / "run", **{**QUICK, "steps": 4})
    assert [row["loss"] for row in run.history] == [row["loss"] for row in whole.history]
    copies["x"][7, 5] += 1e-6
    with pytest.raises(InputError, match="array 'x' (was changed in all samples|has other values)"):
        oocdl.fit(model, copies, workdir=tmp_path / "run", **{**QUICK, "steps": 6})


def test_an_array_that_is_changed_meanwhile_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SMALL_BYTES", 24)
    x = np.zeros((4, 3))
    array = open_dataset({"x": x}, names=["x"]).arrays["x"]
    x[2, 1] = 1
    assert (array.read(((0, 2), (0, 3))) == 0).all()
    message = r"array 'x' of the arrays given: chunk 2.0 was changed .* \(at \(\(2, 3\), \(0, 3\)\)\)"
    with pytest.raises(DatasetError, match=message):
        array.read(((1, 4), (0, 1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": [1, 2]}, "maps names to NumPy arrays, and 'x' is of type list; pass numpy.asarray"),
        ({3: np.zeros(2)}, "and 3 is of type ndarray"),
        (iter([]), "not of type list_iterator; .* oocdl.data.write"),
        ({}, "has no arrays|have no arrays"),
        ({"x": np.array(["a"])}, "dtype <U1"),
        ({"x": np.array([{}])}, "dtype object"),
        ({"x": np.zeros(())}, "single number"),
    ],
)
def test_what_is_no_such_array_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        open_dataset(given)


def test_no_other_process_is_sent_the_arrays(tmp_path: Path) -> None:
    data = open_dataset(nets.vectors())
    assert len(repr(data.spec)) < 200
    with pytest.raises(DatasetError, match="read by this process alone; for a client, write them to Zarr"):
        pickle.dumps(data.spec)
    with pytest.raises(DatasetError, match="read by this process alone"):
        job_of(nets.write_mlp(tmp_path / "m.onnx"), data, make_settings(), lambda: pytest.fail("too late"))
    with pytest.raises(DatasetError, match=r"have no array 'z'; they are \['x', 'y'\]"):
        open_dataset(nets.vectors(), names=["z"])
