"""The dataset: reading by region, one-line refusals, the order of samples."""

import json
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from oocdl.errors import DatasetError
from oocdl.planning.passes import by_size
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.dataset.sampling import permutation

X = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6)
Y = np.arange(5, dtype=np.int64)


def make_zarr(path: Path, zarr_format: int = 3, **options: Any) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
    group.create_array("x", data=X, chunks=(2, 2, 6), **options)
    group.create_group("labels").create_array("y", data=Y, chunks=(2,))
    return path


def make_hdf5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(2, 2, 6), compression="gzip")
        file.create_dataset("labels/y", data=Y)
    return path


def sources(tmp_path: Path) -> list[Any]:
    path = make_zarr(tmp_path / "a.zarr")
    outer = zarr.open_group(tmp_path / "outer.zarr", mode="w")
    make_zarr(tmp_path / "outer.zarr" / "inside")
    return [
        path,
        str(path),
        LocalStore(path),
        zarr.open_group(path),
        outer["inside"],
        make_zarr(tmp_path / "v2.zarr", 2),
        make_zarr(tmp_path / "sharded.zarr", shards=(4, 4, 6)),
        make_hdf5(tmp_path / "a.h5"),
    ]


def test_every_source_reads_the_same_regions(tmp_path: Path) -> None:
    for source in sources(tmp_path):
        data = open_dataset(source)
        assert set(data.arrays) == {"x", "labels/y"}
        x = data.arrays["x"]
        assert (x.name, x.shape, x.dtype) == ("x", X.shape, X.dtype)
        assert np.array_equal(x.read(((1, 4), (3, 4), (0, 5))), X[1:4, 3:4, :5])
        assert np.array_equal(data.arrays["labels/y"].read(((4, 5),)), [4])
        again = open_dataset(pickle.loads(pickle.dumps(data.spec)))
        assert np.array_equal(again.arrays["x"].read(((0, 5), (0, 4), (0, 6))), X)


def test_hdf5_is_read_by_threads(tmp_path: Path) -> None:
    x = open_dataset(make_hdf5(tmp_path / "a.h5")).arrays["x"]
    wrong: list[int] = []

    def reader() -> None:
        for row in range(50):
            if not np.array_equal(x.read(((row % 5, row % 5 + 1), (0, 4), (0, 6)))[0], X[row % 5]):
                wrong.append(row)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []


def with_bytes(name: str) -> Callable[[Path], Path]:
    return lambda path: ((path / name).write_bytes(b"123"), path / name)[1]


def with_array(zarr_format: int = 2, **options: Any) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        group = zarr.open_group(path / "d.zarr", mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
        if options:
            group.create_array("x", **options)
        return path / "d.zarr"

    return make


def hdf5(write: Callable[[h5py.File], object]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        (path / "raw").write_bytes(bytes(64))
        with h5py.File(path / "m.h5", "w") as file:
            write(file)
        return path / "m.h5"

    return make


def one_array(path: Path) -> Path:
    zarr.create_array(path / "x.zarr", data=X)
    return path / "x.zarr"


def changed(zarr_format: int = 2, codec: str = "", **changes: Any) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        group = make_zarr(path / "p.zarr", zarr_format)
        file = group / "x" / (".zarray" if zarr_format == 2 else "zarr.json")
        meta = json.loads(file.read_text()) | changes
        if codec:
            meta["codecs"].append({"name": codec, "configuration": {}})
        file.write_text(json.dumps(meta))
        return group

    return make


def lost_chunks(path: Path) -> Path:
    group = make_zarr(path / "m.zarr")
    (group / "x/c/1/0/0").unlink()
    (group / "x/c/2/1/0").unlink()
    return group


def half(file: h5py.File, **options: Any) -> None:
    file.create_dataset("x", shape=(4, 4), dtype="f4", chunks=(2, 2), **options)[:2] = 1


def outside(file: h5py.File) -> None:
    raw = [(str(Path(file.filename).with_name("raw")), 0, 16)]
    file.create_dataset("x", shape=(4,), dtype="f4", external=raw)


lost_hdf5 = hdf5(half)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "none.zarr", "there is no dataset"),
        (lambda path: path, "not a Zarr group"),
        (with_bytes("a.npy"), r"neither.*convert it: oocdl.data.convert\('\w+.npy', 'data.zarr'\)"),
        (with_bytes("brain.nii.gz"), r"neither.*convert it: oocdl.data.convert\("),
        (with_bytes("a.h5"), "not a readable HDF5"),
        (with_array(), "no arrays"),
        (hdf5(lambda file: None), "no arrays"),
        (one_array, "not a Zarr group"),
        (with_array(3, shape=(), dtype="f4"), "sample axis"),
        (with_array(shape=(3,), dtype="U5"), "U5"),
        (with_array(shape=(3,), dtype=[("a", "f4")]), "only bool, integers and floats"),
        (with_array(shape=(3,), dtype="M8[s]"), "only bool, integers and floats"),
        (with_array(shape=(3,), dtype="c8"), "complex64"),
        (changed(compressor={"id": "pickle", "protocol": 5}), "codec 'pickle'|pickle"),
        (changed(filters=[{"id": "json2"}]), "json2"),
        (changed(filters=[{"id": "msgpack2"}]), "msgpack2"),
        (changed(3, "numcodecs.pickle"), "pickle"),
        (changed(3, "foo"), "foo"),
        (hdf5(lambda file: file.__setitem__("x", ["a", "b"])), "only bool, integers and floats"),
        (hdf5(outside), "other files"),
    ],
)
def test_bad_datasets_are_refused(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        open_dataset(make(tmp_path))
    assert "\n" not in str(caught.value)


TEXTS, VERSION = np.array(["a", "b"]), np.array(3)


def given_zarr(path: Path) -> Path:
    group = zarr.open_group(make_zarr(path / "t.zarr", 2), mode="a")
    group.create_array("name", data=TEXTS)
    group.create_array("version", data=VERSION)
    return path / "t.zarr"


def given_hdf5(path: Path) -> Path:
    with h5py.File(make_hdf5(path / "t.h5"), "a") as file:
        file["name"], file["version"], file["none"] = ["a", "b"], 3, h5py.Empty("f4")
    return path / "t.h5"


@pytest.mark.parametrize(
    "make", [given_zarr, given_hdf5, lambda path: {"x": X, "labels/y": Y, "name": TEXTS, "version": VERSION}]
)
def test_what_is_no_array_of_numbers_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    source = make(tmp_path)
    found = open_dataset(source)
    assert set(found.arrays) == {"x", "labels/y"}
    assert re.match(r"labels/y, x \(left out: 'name' has dtype .*; 'version' is a single num", found.found)
    with pytest.raises(DatasetError, match="array 'name' of .* has dtype .*; only bool, integers and floats"):
        open_dataset(source, names=["x", "name"])


def test_links_are_followed_within_a_file(tmp_path: Path) -> None:
    with h5py.File(make_hdf5(tmp_path / "a.h5"), "a") as file:
        file["again"], file["soft"], file["labels/near"] = file["x"], h5py.SoftLink("/x"), h5py.SoftLink("y")
        file["chain"], file["away"] = h5py.SoftLink("/soft"), h5py.ExternalLink("b.h5", "/x")
        file["lost"], file["around"] = h5py.SoftLink("/around"), h5py.SoftLink("/lost")
    data = open_dataset(tmp_path / "a.h5")
    assert set(data.arrays) == {"x", "again", "soft", "chain", "labels/y", "labels/near"}
    assert set(data.left_out) == {"away", "lost", "around"}
    assert np.array_equal(data.arrays["chain"].read(((0, 5), (0, 4), (0, 6))), X)
    with pytest.raises(DatasetError, match="array 'away' of .* is a link to no array of the file"):
        open_dataset(tmp_path / "a.h5", names=["away"])


def test_a_hostile_pickle_is_never_run(tmp_path: Path) -> None:
    group = changed(dtype="|O", filters=[{"id": "pickle"}], compressor=None, fill_value=0)(tmp_path)
    proof = tmp_path / "proof"
    (group / "x" / "0.0.0").write_bytes(f"cos\nsystem\n(S'touch {proof}'\ntR.".encode())
    with pytest.raises(DatasetError):
        open_dataset(group)
    assert not proof.exists()


def test_chunks_that_are_not_stored_are_their_fill_value(tmp_path: Path) -> None:
    data = open_dataset(lost_chunks(tmp_path))
    assert (data.arrays["x"].read(((2, 4), (0, 2), (0, 6))) == 0).all()
    assert data.notes() == ["x: 2 of 6 chunks are not stored and read as their fill value 0.0"]
    assert data.only(["labels/y"]).notes() == []
    assert open_dataset(data.spec).notes() == data.notes()
    lost = open_dataset(lost_hdf5(tmp_path))
    assert lost.notes() == ["x: 2 of 4 chunks are not stored and read as their fill value 0.0"]
    assert lost.arrays["x"].read(((1, 3), (0, 1))).tolist() == [[1], [0]]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_samples_that_consolidated_metadata_do_not_know_are_read(
    tmp_path: Path, zarr_format: int, packed: bool
) -> None:
    path = make_zarr(tmp_path / "a.zarr", zarr_format)
    zarr.consolidate_metadata(path)
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    array = group["x"]
    assert isinstance(array, zarr.Array)
    array.append(X[:2] + 1)
    group.create_array("z", data=Y)
    data = open_dataset(shutil.make_archive(str(path), "zip", path) if packed else path)
    assert data.arrays.keys() == {"x", "labels/y", "z"}
    np.testing.assert_array_equal(data.arrays["x"].read(((5, 7), (0, 4), (0, 6))), X[:2] + 1)


@pytest.mark.parametrize("make", [lost_chunks, lost_hdf5])
def test_missing_chunks_may_be_refused(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    data = open_dataset(make(tmp_path), allow_missing_chunks=False)
    message = "2 of [46] chunks are missing, first 1/0.*; .*fill value 0.0, pass allow_missing_chunks=True"
    x = data.arrays["x"]
    for call in (lambda: data.only(["x"]), lambda: x.read(((0, 1),) * len(x.shape))):
        with pytest.raises(DatasetError, match=message):
            call()
    assert not data.spec.allow_missing_chunks


@pytest.mark.parametrize("names", [["x"], ["a/x", "b/x"]])
def test_chunks_that_shards_lack_may_be_refused(tmp_path: Path, names: list[str]) -> None:
    group = zarr.open_group(tmp_path / "s.zarr", mode="w")
    for name in names:
        x = group.create_array(name, shape=(3, 5), shards=(2, 6), chunks=(1, 2), dtype="f4", fill_value=5)
        x[...] = 1
        x[1, 2:4] = 5  # what is the fill value is not stored
    if len(names) > 1:
        group.attrs["oocdl"] = {"samples": ["a", "b"]}
    lenient, strict = (open_dataset(tmp_path / "s.zarr", lacking).arrays["x"] for lacking in (True, False))
    regions = [(box, (0, 5)) for box in ((0, 1), (2, 3), (1, 2))]
    if len(names) > 1:
        regions = [((0, 2), *region) for region in regions]  # type: ignore[misc]
    assert strict.read(regions[0]).min() == strict.read(regions[1]).max() == 1
    assert lenient.read(regions[2]).max() == 5
    again = open_dataset(open_dataset(tmp_path / "s.zarr", False).spec).arrays["x"]
    for array in (strict, again):
        with pytest.raises(
            DatasetError, match="chunk 1/1 in shard c/0/0 is missing; .* value 5.0, pass allow"
        ):
            array.read(regions[2])


def undefined_v2(path: Path) -> Path:
    group = changed(fill_value=None)(path)
    (group / "x" / "1.0.0").unlink()
    return group


def nan_v3(path: Path) -> Path:
    group = zarr.open_group(path / "n.zarr", mode="w")
    group.create_array("x", shape=(5, 4), dtype="f4", chunks=(2, 2), fill_value=float("nan"))[:2] = 1
    return path / "n.zarr"


undefined_hdf5 = hdf5(lambda file: half(file, fill_time="never"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (undefined_v2, "'x' .*: 1 of 6 chunks are not stored, first 1/0/0, .* fill value is not defined"),
        (nan_v3, "'x' .*: 4 of 6 chunks are not stored, first 1/0, and its fill value is nan; write them"),
        (undefined_hdf5, "'x' .*: 2 of 4 chunks are not stored, first 1/0, .*not defined"),
    ],
)
def test_chunks_that_nothing_says_the_value_of_are_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        open_dataset(make(tmp_path), names=["x"])


def test_only_named_arrays_are_checked(tmp_path: Path) -> None:
    path = lost_chunks(tmp_path)
    assert set(open_dataset(path, False, names=["labels/y"]).arrays) == {"labels/y"}
    with pytest.raises(DatasetError, match="no array 'z'"):
        open_dataset(path, names=["z"])


def test_permutations_are_keyed_and_stable() -> None:
    orders = [permutation(seed, epoch, 50).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert permutation(0, 1, 50).tolist() == orders[1]
    assert permutation(3, 4, 8).tolist() == STABLE


STABLE = [2, 6, 7, 4, 1, 5, 0, 3]  # of every NumPy


def test_batches_cover_every_sample_once() -> None:
    assert list(by_size(range(7), (), 3)) == [(0, 1, 2), (3, 4, 5), (6,)]
    drawn = list(by_size(permutation(5, 2, 7).tolist(), (), 3))
    assert [len(batch) for batch in drawn] == [3, 3, 1]
    assert [row for batch in drawn for row in batch] == permutation(5, 2, 7).tolist()
