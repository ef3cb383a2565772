"""Chunks that vanish, change or appear after a dataset was opened: found before a number of them is used."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import as_slices, grid_of
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit import stored
from tests.kit.stored import chunk_files, opened, write_x

X = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6) + 1
CHUNKS = (2, 2, 6)
BLOCKS = grid_of(X.shape, CHUNKS)
"""The region of each chunk."""


FOLDERS: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2},
    "v2-nested": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v2-zlib": {"zarr_format": 2, "compressors": {"id": "zlib", "level": 1}},
    "v3": {},
    "v3-raw": {"compressors": None},
    "v3-dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v3-old-keys": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "sharded": {"chunks": (1, 2, 3), "shards": CHUNKS},
    "sharded-raw": {"chunks": (1, 2, 3), "shards": CHUNKS, "compressors": None},
}


def folder(path: Path, kind: str) -> Path:
    return write_x(path / "a.zarr", X, **{"chunks": CHUNKS, **FOLDERS[kind]})


def replaced(file: Path) -> None:
    """By a file of the same size, as editors and rsync do."""
    beside = file.with_name("new")
    beside.write_bytes(bytes(file.stat().st_size))
    beside.replace(file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    **{how: partial(stored.shorten, how=how) for how in ("empty", "half", "last byte")},
    "flipped": stored.flip,
    "older": lambda file: os.utime(file, ns=(1, 1)),
    "replaced": replaced,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_changed_chunk_of_a_folder_is_found(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, kind)
    files = chunk_files(path)
    assert len(files) == 6
    kept = tmp_path / "kept"
    for (change, apply), (file, block) in product(CHANGES.items(), zip(files, BLOCKS, strict=True)):
        x = opened(path)
        if kind == "v3":
            x.read(block)  # which is kept
        shutil.copy2(file, kept)
        apply(file)
        with pytest.raises(DatasetError) as caught:
            x.read(block)
        key = str(file.relative_to(path / "x"))
        happened = "is gone" if change == "deleted" else "was changed"
        assert f"array 'x' of {path}: chunk {key} {happened}" in str(caught.value)
        assert str(file) in str(caught.value)
        for other in BLOCKS:
            if other != block:
                assert np.array_equal(x.read(other), X[as_slices(other)])
        shutil.copy2(kept, file)
        assert np.array_equal(x.read(block), X[as_slices(block)])


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_chunk_that_appears_is_found(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, kind)
    file = chunk_files(path)[3]
    content = file.read_bytes()
    file.unlink()
    x = opened(path)
    block = BLOCKS[3]
    assert (x.read(block) == 0).all()
    file.write_bytes(content)
    with pytest.raises(DatasetError, match="chunk .* is new"):
        x.read(block)


NO_FILES = {**stored.NO_FILES, "a link to a folder": lambda place: place.symlink_to("/tmp")}
"""Dangling links are what git-annex and DataLad have where nothing was fetched."""


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_renamed_is_found(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, kind)
    x = opened(path)
    path.rename(tmp_path / "elsewhere.zarr")
    for block in BLOCKS:
        with pytest.raises(DatasetError, match="chunk .* is gone"):
            x.read(block)


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_never_the_fill_value(tmp_path: Path, kind: str, what: str) -> None:
    path = folder(tmp_path, kind)
    file = chunk_files(path)[3]
    x = opened(path)
    file.unlink()
    NO_FILES[what](file)
    with pytest.raises(DatasetError, match="chunk .* is gone"):
        x.read(BLOCKS[3])
    with pytest.raises(DatasetError) as caught:
        opened(path)
    assert str(file) in str(caught.value) and "fetch it" in str(caught.value)


@pytest.mark.parametrize("kind", ["v2-nested", "v3", "sharded"])
@pytest.mark.parametrize("what", ["a dangling link", "a file", "a FIFO"])
def test_what_is_no_folder_is_never_the_fill_value(tmp_path: Path, kind: str, what: str) -> None:
    path = folder(tmp_path, kind)
    place = chunk_files(path)[3].parent
    shutil.rmtree(place)
    {**NO_FILES, "a file": Path.touch}[what](place)
    with pytest.raises(DatasetError) as caught:
        opened(path)
    assert str(place) in str(caught.value)


@pytest.mark.parametrize("kind", ["v2", "v3"])
@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("level", ["", "x"])
def test_metadata_that_are_no_file_are_named(tmp_path: Path, kind: str, what: str, level: str) -> None:
    path = folder(tmp_path, kind)
    name = "zarr.json" if kind == "v3" else ".zarray" if level else ".zgroup"
    place = path / level / name
    place.unlink()
    NO_FILES[what](place)
    for names in (None, ["x"]):
        for source in (path, zarr.storage.LocalStore(path, read_only=True)):
            with pytest.raises(DatasetError) as caught:
                open_dataset(source, names=names)
            assert str(place) in str(caught.value)


def test_a_fifo_is_no_dataset(tmp_path: Path) -> None:
    for name in ("a.h5", "a.zarr", "a.zip"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DatasetError, match="neither a folder nor a file"):
            open_dataset(tmp_path / name)


HDF5: dict[str, dict[str, Any]] = {
    "chunked": {"chunks": CHUNKS},
    "gzip": {"chunks": CHUNKS, "compression": "gzip", "shuffle": True},
    "contiguous": {},
}


HDF5_CHANGES: dict[str, Callable[[Path], object]] = {
    **{name: CHANGES[name] for name in ("deleted", "half", "flipped", "replaced", "older")},
    "renamed": lambda path: path.rename(path.with_name("b.h5")),
}


@pytest.mark.parametrize("kind", HDF5)
@pytest.mark.parametrize("change", HDF5_CHANGES)
def test_every_change_of_a_file_is_found(
    tmp_path: Path, kind: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=X, **HDF5[kind])
    x = opened(tmp_path / "a.h5")
    assert np.array_equal(x.read(((0, 5), (0, 4), (0, 6))), X)
    HDF5_CHANGES[change](tmp_path / "a.h5")
    for block in BLOCKS:
        with pytest.raises(DatasetError, match="'x' of .*a.h5: .* (is gone|was changed or replaced) since"):
            x.read(block)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("kind", ["v3", "sharded"])
@pytest.mark.parametrize("change", ["deleted", "half", "flipped", "replaced"])
def test_every_change_of_a_zip_is_found(tmp_path: Path, compression: int, kind: str, change: str) -> None:
    with ZipStore(tmp_path / "a.zip", mode="w", compression=compression) as store:
        zarr.group(store).create_array("x", data=X, **{"chunks": CHUNKS, **FOLDERS[kind]})
    x = opened(str(tmp_path / "a.zip"))
    assert np.array_equal(x.read(((0, 5), (0, 4), (0, 6))), X)
    assert np.array_equal(x.read(((1, 2), (1, 3), (2, 4))), X[1:2, 1:3, 2:4])
    CHANGES[change](tmp_path / "a.zip")
    for block in BLOCKS:
        with pytest.raises(DatasetError, match="chunk .* was changed"):
            x.read(block)


@pytest.mark.parametrize("kind", ["v3", "sharded"])
def test_every_change_in_memory_is_found(kind: str) -> None:
    content: dict[str, Any] = {}
    array = zarr.create_array(MemoryStore(content), name="x", data=X, **{"chunks": CHUNKS, **FOLDERS[kind]})
    keys = sorted(key for key in content if "/c/" in key)
    for key, block in zip(keys, BLOCKS, strict=True):
        x = opened(array.store)
        was = content.pop(key)
        with pytest.raises(DatasetError, match=f"chunk {key[2:]} is gone"):
            x.read(block)
        data = bytearray(was.to_bytes())
        data[len(data) // 2] ^= 1
        content[key] = type(was).from_bytes(bytes(data))
        with pytest.raises(DatasetError, match=f"chunk {key[2:]} was changed"):
            x.read(block)
        content[key] = was
        assert np.array_equal(x.read(block), X[as_slices(block)])
