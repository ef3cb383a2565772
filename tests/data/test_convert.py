"""``convert``: values, place and memory of what it writes, from every source; whole or not at all."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import h5py
import nibabel as nib
import numpy as np
import pytest
import zarr
from scipy import ndimage

import oocdl
from oocdl.data import conversion, convert, new_group
from oocdl.data.label_volumes import write_labels
from oocdl.data.nifti import read_header
from oocdl.data.resampling import resample
from oocdl.errors import BudgetError, DatasetError, InUseError, StoreError
from oocdl.host.limits import anonymous_bytes, most_taken_bytes
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.run.lock import RunLock
from tests.kit.commands import python, run
from tests.kit.nifti import AFFINE, CLASSES, labels, nnunet, save, volume

SHAPES = {"b_01": (7, 6, 5), "a": (4, 9, 8)}


def read(group: zarr.Group, path: str) -> Any:
    found = group[path]
    assert isinstance(found, zarr.Array)
    return found[...]


def test_an_nnunet_folder_is_a_group_a_sample(tmp_path: Path) -> None:
    source = nnunet(tmp_path / "D", SHAPES)
    group = convert(source, tmp_path / "out.zarr")
    told: Any = {**dict(group.attrs)["oocdl"]}  # type: ignore[dict-item]
    assert told.pop("kind") == "dataset"
    assert told == {"samples": ["a", "b_01"], "channels": ["T0", "T1"], "classes": CLASSES}
    assert sorted(group.group_keys()) == ["a", "b_01"] and not list(group.array_keys())
    for seed, (name, shape) in enumerate(SHAPES.items()):
        images = np.stack([volume(shape, 10 * seed + channel).T for channel in (0, 1)])
        assert (read(group, f"{name}/image") == images).all()
        assert (read(group, f"{name}/label") == labels(shape, seed).T).all()
        assert group[f"{name}/image"].dtype == np.int16 and group[f"{name}/label"].dtype == np.uint8  # type: ignore[union-attr]
        facts: Any = dict(group[name].attrs)
        assert np.allclose(facts["affine"], AFFINE, atol=1e-6)
        assert np.allclose(facts["spacing"], nib.affines.voxel_sizes(AFFINE)[::-1])
        names = [f"{name}_0000.nii.gz", f"{name}_0001.nii.gz"]
        assert facts["source"] == {"image": names, "label": [f"{name}.nii.gz"]} and "original" not in facts
    part = open_dataset(group["a"]).arrays["image"].read(((0, 1), (0, 8), (0, 9), (0, 4)))
    assert part.shape == (1, 8, 9, 4)
    assert sorted(os.listdir(tmp_path)) == ["D", "out.zarr"]


def test_every_stored_chunk_has_a_checksum(tmp_path: Path) -> None:
    save(tmp_path / "x.nii", np.zeros((7, 6, 5), np.int16))
    group = convert(tmp_path / "x.nii", tmp_path / "out.zarr")
    (chunk,) = [path for path in (tmp_path / "out.zarr/x/image/c").rglob("*") if path.is_file()]
    chunk.write_bytes(chunk.read_bytes()[:-5] + b"x" + chunk.read_bytes()[-4:])
    with pytest.raises(DatasetError, match="cannot be read"):
        open_dataset(group["x"]).arrays["image"].read(((0, 1), (0, 5), (0, 6), (0, 7)))


def test_imagests_have_no_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = nnunet(tmp_path / "D", {"a": (4, 5, 6)}, channels=1)
    save(source / "imagesTs/t_0000.nii.gz", volume())
    assert run(capsys, "convert", source, tmp_path / "out.zarr", "--split", "test")[0] == 0
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    assert (read(group, "t/image")[0] == volume().T).all() and "label" not in group["t"]  # type: ignore[operator]


def test_names_of_samples_have_letters_of_any_language(tmp_path: Path) -> None:
    group = convert(nnunet(tmp_path / "D", {"Zoë_1": (4, 5, 6), "é": (7, 6, 5)}), tmp_path / "out.zarr")
    assert sorted(group.group_keys()) == ["Zoë_1", "é"]
    (image, _) = open_dataset(tmp_path / "out.zarr").arrays.values()
    assert (image.read(((1, 2), (0, 1), (0, 5), (0, 6), (0, 7)))[0, 0] == volume(seed=10).T).all()


@pytest.mark.parametrize("name", ["X.NII", "x.NII.GZ", "x.nii.GZ"])
def test_endings_of_nifti_may_be_in_upper_case(tmp_path: Path, name: str) -> None:
    save(tmp_path / "in" / name.lower(), volume()).rename(tmp_path / "in" / name)
    (tmp_path / "t.csv").write_text(f"image\nin/{name}\n")
    for number, source in enumerate(("in", f"in/{name}", "t.csv")):
        group = convert(tmp_path / source, tmp_path / f"{number}.zarr")
        assert (read(group, f"{name[0]}/image")[0] == volume().T).all()


@pytest.mark.parametrize("kind", ["csv", "json", "monai", "folder", "file"])
def test_tables_folders_and_files(tmp_path: Path, kind: str) -> None:
    for number in range(3):
        save(tmp_path / f"in/{number}/t1.nii", volume(seed=number))
        save(tmp_path / f"in/{number}/t2.nii", volume(seed=10 + number))
        save(tmp_path / f"in/{number}/seg.nii.gz", labels(seed=number).astype("float64"))
    rows = [{"image": f"{n}/t1.nii", "image2": f"{n}/t2.nii", "label": f"{n}/seg.nii.gz"} for n in range(3)]
    source = tmp_path / "in/list"
    if kind == "csv":
        with open(source := source.with_suffix(".csv"), "w") as file:
            table = csv.DictWriter(file, ["image", "image2", "label"])
            table.writeheader()
            table.writerows(rows)
    elif kind in ("json", "monai"):
        listed = [{"image": [row["image"], row["image2"]], "label": row["label"]} for row in rows]
        source = source.with_suffix(".json")
        source.write_text(json.dumps({"training": listed} if kind == "monai" else rows))
    else:
        source = tmp_path / ("in/1" if kind == "folder" else "in/1/t2.nii")
    group = convert(source, tmp_path / "out.zarr")
    if kind in ("folder", "file"):
        names = ["seg", "t1", "t2"] if kind == "folder" else ["t2"]
        assert sorted(group.group_keys()) == names and (read(group, "t2/image")[0] == volume(seed=11).T).all()
        return
    assert sorted(group.group_keys()) == ["0_t1", "1_t1", "2_t1"]
    assert (read(group, "2_t1/image") == np.stack([volume(seed=2).T, volume(seed=12).T])).all()
    found = read(group, "2_t1/label")
    assert found.dtype == np.int32 and (found == labels(seed=2).T).all()


@pytest.mark.parametrize("dtype", ["uint8", ">i2", "int32", "float32", "float64"])
def test_values_are_those_of_nibabel(tmp_path: Path, dtype: str) -> None:
    image = nib.Nifti1Image(volume().astype(dtype), AFFINE)
    if dtype == "int32":
        image.header.set_slope_inter(0.37, -4)
    image.to_filename(tmp_path / "x.nii.gz")
    found = read(convert(tmp_path / "x.nii.gz", tmp_path / "out.zarr"), "x/image")[0]
    kept = np.dtype(dtype).newbyteorder("=") if dtype in ("uint8", ">i2") else np.float32
    assert found.dtype == kept
    assert (found == np.asarray(nib.load(tmp_path / "x.nii.gz").dataobj).T.astype(kept)).all()


@pytest.mark.parametrize("planes", [1, 2, 9])
@pytest.mark.parametrize("after", [(9, 8, 7), (4, 8, 11), (30, 3, 7), (1, 1, 1)])
def test_resampling_is_that_of_scipy(after: tuple[int, ...], planes: int) -> None:
    x = np.random.default_rng(0).normal(size=(9, 8, 7))
    pieces = [x[at : at + planes] for at in range(0, 9, planes)]
    zoom = [m / n for m, n in zip(after, x.shape, strict=True)]
    wanted = ndimage.zoom(x, zoom, order=1, mode="nearest", grid_mode=True)
    assert np.allclose(np.concatenate(list(resample(pieces, x.shape, after, False))), wanted, 0, 1e-12)
    y = (x * 9).astype(np.int8)
    index = [np.floor((np.arange(m) + 0.5) * n / m).astype(int) for n, m in zip(x.shape, after, strict=True)]
    pieces = [y[at : at + planes] for at in range(0, 9, planes)]
    found = np.concatenate(list(resample(pieces, y.shape, after, True)))
    assert found.dtype == np.int8 and (found == y[np.ix_(*index)]).all()


def test_a_spacing_keeps_the_place_and_says_what_was(tmp_path: Path) -> None:
    x, y, z = np.meshgrid(np.arange(12), np.arange(10), np.arange(8), indexing="ij")
    places = np.stack([x, y, z, np.ones_like(x)], -1) @ AFFINE.T
    save(tmp_path / "x.nii", places[..., 0].astype("float32"))  # each voxel says where it lies
    group = convert(tmp_path / "x.nii", tmp_path / "out.zarr", spacing=(1.5, 1.2, 0.7))
    facts: Any = dict(group["x"].attrs)
    found, affine = read(group, "x/image")[0], np.array(facts["affine"])
    assert found.shape == (13, 9, 16)
    assert facts["original"]["shape"] == [8, 10, 12]
    assert np.allclose(facts["original"]["affine"], AFFINE, 0, 1e-6)
    voxel = np.array([8, 4, 6, 1])
    assert np.isclose(found[6, 4, 8], (affine @ voxel)[0], 0, 1e-4)
    spacing = [2.5 * 8 / 13, np.hypot(0.1, 1.1) * 10 / 9, np.hypot(0.9, 0.1) * 12 / 16]
    assert np.allclose(facts["spacing"], spacing)


def test_planes_are_written_by_any_depth_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "x.nii.gz", volume((5, 6, 37)))
    monkeypatch.setattr("oocdl.data.new_group.CHUNK_BYTES", 2 * 4**3)
    monkeypatch.setattr("oocdl.data.nifti.PIECE_BYTES", 2 * 30 * 3)
    group = convert(tmp_path / "x.nii.gz", tmp_path / "out.zarr")
    assert group["x/image"].chunks == (1, 4, 3, 3)  # type: ignore[union-attr]
    assert (read(group, "x/image")[0] == volume((5, 6, 37)).T).all()


def test_memory_is_kept_and_a_budget_that_is_too_small_names_one(tmp_path: Path) -> None:
    source = save(tmp_path / "x.nii.gz", np.zeros((256, 256, 512), np.int16))  # 64 MiB
    memory = anonymous_bytes() + (64 << 20)
    group: list[zarr.Group] = []
    taken = most_taken_bytes(lambda: group.append(convert(source, tmp_path / "out.zarr", memory=memory)))
    assert taken is None or taken < 64 << 20
    assert group[0]["x/image"].shape == (1, 512, 256, 256)  # type: ignore[union-attr]
    with pytest.raises(BudgetError, match=r"a plane of .*x.nii.gz does not fit; pass memory='(\d+)MiB'"):
        convert(source, tmp_path / "other.zarr", memory=anonymous_bytes() + (8 << 20))
    zarr.open_group(tmp_path / "s.zarr").create_array("x", data=np.zeros((1, 2 << 20)), chunks=(1, 2 << 20))
    said = r"a chunk of array 'x' of .*s.zarr does not fit; pass memory='\d+MiB'"
    with pytest.raises(BudgetError, match=said):
        convert(tmp_path / "s.zarr", tmp_path / "other.zarr", memory=anonymous_bytes() + (32 << 20))
    assert not (tmp_path / "other.zarr").exists()


def stacked(path: Path, kind: str, arrays: dict[str, Any]) -> Path:
    place = path / f"image.{kind}"
    if kind == "npy":
        np.save(place, arrays["image"])
    elif kind == "npz":
        np.savez_compressed(place, **arrays)
    elif kind == "h5":
        with h5py.File(place, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, chunks=True)
    else:
        group = zarr.open_group(place, mode="w")
        for name, array in arrays.items():
            group.create_array(name, data=array, chunks=array.shape)
    return place


def test_what_a_group_says_of_its_samples_stays(tmp_path: Path) -> None:
    told = {"samples": ["a", "b"], "affine": AFFINE.tolist(), "oocdl": "predictions"}
    source = zarr.open_group(tmp_path / "s.zarr", mode="w", attributes=told)
    source.create_array("x", data=np.arange(6.0).reshape(2, 3))
    made = convert(tmp_path / "s.zarr", tmp_path / "out.zarr")
    assert dict(made.attrs) == {**told, "oocdl": {"kind": "dataset"}}
    save(tmp_path / "x.nii", volume())
    convert(tmp_path / "x.nii", tmp_path / "x.zarr")
    with pytest.raises(DatasetError, match="x.zarr has a group a sample"):
        convert(tmp_path / "x.zarr", tmp_path / "again.zarr")


def test_attributes_of_hdf5_that_are_no_plain_data_are_left_out(tmp_path: Path) -> None:
    path = stacked(tmp_path, "h5", {"image": np.zeros((2, 3), "f4")})
    with h5py.File(path, "r+") as file:
        file.attrs.update({"samples": ["a", "b"], "bytes": [b"c"], "count": 2, "latin": np.array([b"\xe4"])})
        file.attrs["empty"], file.attrs["reference"] = h5py.Empty("f4"), file["image"].ref
        file.attrs["complex"], file.attrs["record"] = 1j, np.zeros(1, [("a", "i4")])
    attributes = dict(convert(path, tmp_path / "out.zarr").attrs)
    assert attributes.pop("oocdl") == {"kind": "dataset"}
    assert attributes == {"samples": ["a", "b"], "bytes": ["c"], "count": 2, "latin": ["\ufffd"]}


def test_arrays_that_are_no_numbers_are_named_and_not_copied(tmp_path: Path) -> None:
    path = stacked(tmp_path, "npz", {"image": np.zeros((2, 3), "f4"), "name": np.array(["a", "b"])})
    with pytest.warns(UserWarning, match="image.npz: name has dtype <U1; .*; it is not copied"):
        assert set(convert(path, tmp_path / "out.zarr").array_keys()) == {"image"}


@pytest.mark.parametrize(
    ("told", "classes", "dtype"),
    [
        ({"labels": {"0": "none", "1": "a", "2": "b"}}, {"none": 0, "a": 1, "b": 2}, "uint8"),
        ({"labels": {"background": 0, "whole": [1, 2], "core": 2, "ignore": 300}}, None, "uint16"),
        ({"labels": {"background": 0, "a": 1, "b": 2, "unknown": -1}}, None, "int8"),
    ],
    ids=["version 1", "regions", "negative"],
)
def test_classes_of_both_versions(tmp_path: Path, told: dict[str, Any], classes: Any, dtype: str) -> None:
    source = nnunet(tmp_path / "D", {"a": (4, 5, 6)}, channels=1, channel_names={"0": "CT"}, **told)
    group = convert(source, tmp_path / "out.zarr")
    facts: Any = {**dict(group.attrs)["oocdl"]}  # type: ignore[dict-item]
    assert facts.pop("kind") == "dataset"
    assert facts["classes"] == (classes or told["labels"]) and facts["channels"] == ["CT"]
    assert (read(group, "a/label") == labels((4, 5, 6)).T).all() and read(group, "a/label").dtype == dtype


@pytest.mark.parametrize("kind", ["npy", "npz", "h5", "zarr"])
def test_arrays_that_are_stacked_stay_so(tmp_path: Path, kind: str) -> None:
    r = np.random.default_rng(0)
    arrays = {"image": r.normal(size=(3, 2, 70, 64, 68)).astype("f4"), "label": r.integers(0, 5, 3)}
    group = convert(stacked(tmp_path, kind, arrays), tmp_path / "out.zarr")
    names = ["image"] if kind == "npy" else ["image", "label"]
    assert sorted(group.array_keys()) == names and not list((tmp_path / "out.zarr").glob("*.npy"))
    for name in names:
        found = read(group, name)
        assert found.dtype == arrays[name].dtype and (found == arrays[name]).all()
    assert group["image"].chunks == (1, 1, 70, 64, 68)  # type: ignore[union-attr]


def test_a_failure_leaves_an_old_dataset_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = nnunet(tmp_path / "D", SHAPES), tmp_path / "out.zarr"
    convert(source, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    save(source / "labelsTr/b_01.nii.gz", np.full((7, 6, 5), 9, np.uint8))
    said = r"labelsTr/b_01.nii.gz has 9 at voxel \[0, 0, 0\]; its classes are 0, 1, 2"
    with pytest.raises(DatasetError, match=said):
        convert(source, out, overwrite=True)
    real = conversion.write_planes

    def interrupted(array: Any, lead: Any, pieces: Any) -> None:
        real(array, lead, pieces)
        assert (tmp_path / "out.zarr.partial").is_dir()
        with pytest.raises(DatasetError, match="is a conversion that was not finished; convert again"):
            open_dataset(tmp_path / "out.zarr.partial")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "write_planes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, overwrite=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(tmp_path)) == ["D", "out.zarr"]


def test_nobody_else_converts_to_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = save(tmp_path / "x.nii", volume()), tmp_path / "out.zarr"
    sync_all = new_group.sync_all

    def meanwhile(paths: Any) -> None:
        with pytest.raises(InUseError, match="out.zarr.partial is in use by pid"):
            convert(source, out)
        sync_all(paths)

    monkeypatch.setattr(new_group, "sync_all", meanwhile)
    convert(source, out)
    assert sorted(os.listdir(out)) == ["x", "zarr.json"]


def test_what_a_kill_left_is_replaced_and_what_others_made_is_not(tmp_path: Path) -> None:
    source, out = save(tmp_path / "x.nii", volume()), tmp_path / "out.zarr"
    code = (
        "import os, sys\nfrom oocdl.data import conversion, convert\n"
        "conversion.write_planes = lambda *_: os.kill(os.getpid(), 9)\nconvert(*sys.argv[1:])"
    )
    died = python("-c", code, source, out)
    assert died.returncode == -signal.SIGKILL and not out.exists()
    assert (tmp_path / "out.zarr.partial").is_dir()
    lock = RunLock(tmp_path / "out.zarr.partial/LOCK")  # of a process that lives
    with pytest.raises(InUseError, match="out.zarr.partial is in use by pid"):
        convert(source, out)
    lock.release()
    assert (read(convert(source, out), "x/image")[0] == volume().T).all()
    assert sorted(os.listdir(tmp_path)) == ["out.zarr", "x.nii"]
    assert sorted(os.listdir(out)) == ["x", "zarr.json"]
    with pytest.raises(StoreError, match="out.zarr is there already; .*overwrite=True"):
        convert(source, out)
    convert(source, out, overwrite=True).store.close()
    out.rename(tmp_path / "out.zarr.partial")  # killed before its last name
    convert(source, out)
    assert sorted(os.listdir(tmp_path)) == ["out.zarr", "x.nii"]
    (tmp_path / "out.zarr.replaced").mkdir()
    with pytest.raises(StoreError, match="out.zarr.replaced is what .* was before a call that was killed"):
        convert(source, out, overwrite=True)
    group = zarr.open_group(tmp_path / "mine.zarr", mode="w", attributes={"oocdl": {"samples": ["mine"]}})
    group.create_array("mine/image", data=np.zeros((1, 4, 4, 4), "f4"))
    (tmp_path / "empty.zarr").mkdir()
    for place in ("mine.zarr", "empty.zarr"):
        with pytest.raises(StoreError, match=f"{place} was not written by convert"):
            convert(source, tmp_path / place, overwrite=True)
    assert list(group["mine"].array_keys()) == ["image"]  # type: ignore[union-attr]
    shutil.rmtree(out)
    (tmp_path / "out.zarr.partial/mine").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"out.zarr.partial, where .* is there already"):
        convert(source, out)


def test_a_signal_ends_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "x.nii", volume())
    code = (
        "import os\nfrom oocdl.cli import app\nfrom oocdl.data import conversion\n"
        "real = conversion.write_region\n"
        "conversion.write_region = lambda *given: (real(*given), os.kill(os.getpid(), 15))\n"
        "app.main(['convert', 'x.nii', 'out.zarr'])"
    )
    died = python("-c", code, folder=tmp_path)
    assert (died.returncode, died.stderr) == (143, "oocdl: stopped by SIGTERM; nothing was changed\n")
    assert os.listdir(tmp_path) == ["x.nii"]


def test_the_command_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = nnunet(tmp_path / "D", {"a": (4, 6, 10)}, channels=1), tmp_path / "out.zarr"
    code, said, _ = run(capsys, "convert", source, out, "--spacing", "5,1,1", "--memory", "2GiB")
    assert code == 0 and "out.zarr/a/image: 1 × 5 × 7 × 4 float32" in said
    assert run(capsys, "convert", source, out)[0] == 3
    code, _, said = run(capsys, "convert", source, tmp_path / "o.zarr", "--spacing", "1,1")
    assert code == 2 and "spacing is three positive numbers" in said


def test_nifti_without_nibabel_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "x.nii", volume())
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(oocdl.errors.InputError, match=r"needs nibabel.*pip install 'oocdl\[mri\]'"):
        read_header(tmp_path / "x.nii")


def test_units_and_both_forms_of_a_header_are_kept(tmp_path: Path) -> None:
    image = nib.Nifti1Image(volume(), AFFINE)
    other = AFFINE + np.array([[0, 0, 0, 100.0], *[[0] * 4] * 3])
    image.set_qform(other, 1)
    image.set_sform(AFFINE, 4)
    image.header.set_xyzt_units("micron")
    image.to_filename(tmp_path / "x.nii.gz")
    group = convert(tmp_path / "x.nii.gz", tmp_path / "out.zarr")
    told: Any = dict(group["x"].attrs)
    scale = np.diag([1e-3, 1e-3, 1e-3, 1])
    assert np.allclose(told["affine"], scale @ AFFINE)
    assert np.allclose(told["spacing"], np.array([2.5, 1.105, 0.906]) / 1e3, 0, 1e-5)
    zeros = np.zeros((5, 6, 7), "u1")
    path = write_labels(tmp_path, "x-labels", told, zeros.shape, zeros.dtype, lambda a, b: zeros[a:b])
    made: Any = nib.load(path)
    straight = nib.Nifti1Image(volume(), AFFINE)
    straight.set_qform(other, 1)
    assert np.allclose(made.header.get_qform(), scale @ straight.header.get_qform(), 0, 1e-6)
    assert np.allclose(made.header.get_sform(), scale @ AFFINE)


def test_a_link_is_overwritten_where_it_leads(tmp_path: Path) -> None:
    source, there = save(tmp_path / "x.nii", volume()), tmp_path / "disk"
    there.mkdir()
    convert(source, there / "data.zarr")
    (tmp_path / "link.zarr").symlink_to(there / "data.zarr")
    save(source, volume(seed=1))
    convert(source, tmp_path / "link.zarr", overwrite=True)
    assert (tmp_path / "link.zarr").is_symlink() and sorted(os.listdir(there)) == ["data.zarr"]
    assert (read(zarr.open_group(there / "data.zarr"), "x/image")[0] == volume(seed=1).T).all()


def test_channels_are_named_by_their_numbers(tmp_path: Path) -> None:
    source = nnunet(tmp_path / "D", {"a": (4, 5, 6)}, channel_names={"1": "T2", "0": "T1"}, numTraining="1")
    (source / "imagesTr/._a_0000.nii.gz").touch()
    told: Any = dict(convert(source, tmp_path / "out.zarr").attrs)["oocdl"]
    assert told["channels"] == ["T1", "T2"]
