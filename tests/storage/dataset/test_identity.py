"""A dataset that was changed is told from the one that there was, and from a copy of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore, WrapperStore, ZipStore

from oocdl.storage.dataset import identity as identities
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.dataset.identity import Comparison, compare, identity
from tests.kit.stored import opened, write_x

SAMPLES = 9
X = np.random.default_rng(0).normal(size=(SAMPLES, 20, 30)).astype("f4")
RAW: dict[str, Any] = {"compressors": None, "chunks": (1, 20, 30)}


def write(path: Path, x: np.ndarray = X, **options: Any) -> Path:
    return write_x(path, x, **{**RAW, **options})


def write_hdf5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(1, 20, 30))
    return path


def stored(path: Any) -> Any:
    """As a run keeps it."""
    return json.loads(json.dumps(identity(opened(path))))


def compared(then: Any, path: Any) -> Comparison:
    array = opened(path)
    return compare(array, then, identity(array))


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether all that is stored is compared, or some of it."""
    if request.param == "large":
        monkeypatch.setattr(identities, "WHOLE_BYTES", 1000)
    return str(request.param)


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_one_changed_number_anywhere_is_noticed(tmp_path: Path, size: str, sample: int) -> None:
    for path in (write(tmp_path / "a.zarr"), write_hdf5(tmp_path / "a.h5")):
        then = stored(path)
        assert compared(then, path) == Comparison()
        if path.suffix == ".zarr":
            zarr.open_group(path)["x"][sample, 3, 3] = 7  # type: ignore[index]
        else:
            with h5py.File(path, "r+") as file:
                file["x"][sample, 3, 3] = 7
        text = compared(then, path).changed
        assert text is not None
        if path.suffix == ".zarr":
            assert f"samples {sample}" in text


def test_a_copy_is_told_from_a_change(tmp_path: Path, size: str) -> None:
    sparse = write(tmp_path / "sparse.zarr")
    shutil.rmtree(sparse / "x" / "c" / "3")
    for path in (write(tmp_path / "a.zarr"), write_hdf5(tmp_path / "a.h5"), sparse):
        then, copy = stored(path), tmp_path / f"copy-{path.name}"
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
        for file in copy.rglob("*") if copy.is_dir() else [copy]:
            os.utime(file)
        found = compared(then, copy)
        assert found.changed is None
        assert (found.copied is None) == (size == "small")
        if size == "large":
            assert "array 'x' has other times and equal sizes everywhere" in str(found.copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: shutil.rmtree(path / "x/c/4"), r"stores other chunks of samples 4 \(9 chunks, now 8\)"),
        (lambda path: (path / "x/c/3/0/0").write_bytes(b"1"), "stores other chunks of samples 3$"),
        (lambda path: write(path, np.concatenate([X, X[:1]])), "had 9 samples, has 10"),
        (lambda path: write(path, X.astype("f8")), r"was float32 \[9, 20, 30\], is float64 \[9, 20, 30\]"),
        (lambda path: write(path, X[:, :19]), r"was float32 \[9, 20, 30\], is float32 \[9, 19, 30\]"),
        (lambda path: write(path, X + 1), "has other values"),
        (lambda path: write(path, chunks=(2, 20, 30)), r"other chunks of all samples \(9 chunks, now 5\)"),
    ],
)
def test_what_was_changed_is_said(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    path = write(tmp_path / "a.zarr")
    then = stored(path)
    change(path)
    with pytest.raises(AssertionError, match=f"array 'x' .*{message}"):
        raise AssertionError(compared(then, path).changed)


def test_another_fill_value_is_another_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    shutil.rmtree(path / "x/c/4")
    then = stored(path)
    document = json.loads((path / "x/zarr.json").read_text())
    (path / "x/zarr.json").write_text(json.dumps({**document, "fill_value": 3.0}))
    (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))
    assert compared(then, path).changed == "array 'x' had the fill value 0.0, has 3.0"


def test_zip_files_and_memory_have_checksums(tmp_path: Path, size: str) -> None:
    def zipped(path: Path, x: np.ndarray) -> Path:
        with ZipStore(path, mode="w") as store:
            zarr.group(store).create_array("x", data=x, **RAW)
        return path

    def kept(path: Path, x: np.ndarray) -> MemoryStore:
        store = MemoryStore()
        zarr.group(store).create_array("x", data=x, **RAW)
        return store

    other = X.copy()
    other[2, 0, 0] += 1
    for make in (zipped, kept):
        then = stored(make(tmp_path / "a.zip", X))
        assert compared(then, make(tmp_path / "b.zip", X)) == Comparison()
        assert compared(then, make(tmp_path / "c.zip", other)).changed == (
            "array 'x' was changed in samples 2, by its chunks' checksums"
        )


def test_a_store_that_tells_nothing_says_so(tmp_path: Path) -> None:
    store = MemoryStore()
    zarr.group(store).create_array("x", data=X, **RAW)
    hidden: WrapperStore[Any] = WrapperStore(store)
    then = stored(hidden)
    (note,) = open_dataset(hidden, names=["x"]).notes()
    assert note.startswith("x: its store tells neither sizes nor times of chunks")
    assert compared(then, hidden) == Comparison()
    zarr.open_group(store)["x"][4] = 3  # type: ignore[index]
    assert compared(then, hidden).changed == "array 'x' has other values"


def test_many_samples_are_told_apart_by_range(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", np.zeros((200, 2), "f4") + 1, chunks=(1, 2))
    then = stored(path)
    assert len(then["sizes"]) == identities.RANGES == 64
    (path / "x/c/100/0").write_bytes(b"12345678")
    identity_now = compared(then, path).changed
    assert identity_now == "array 'x' has other values" or "samples 100 to 102" in str(identity_now)
