"""What cannot be converted is refused in one line that names the file, and nothing is left behind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from oocdl.data import convert
from oocdl.errors import DatasetError, InputError, OocdlError
from tests.kit.nifti import AFFINE, labels, nnunet, save, volume

Make = Callable[[Path], Any]
"""Spoils an nnU-Net folder of cases a and b; returns another source, or None for that folder."""


def told(**facts: Any) -> Make:
    def make(folder: Path) -> None:
        path = folder / "dataset.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return make


def nothing(*_: Any) -> None:
    """Of what was done to the folder: it stays the source."""


def gone(*names: str) -> Make:
    return lambda folder: nothing(*((folder / name).unlink() for name in names))


def put(name: str, voxels: Any, affine: Any = AFFINE) -> Make:
    return lambda folder: nothing(save(folder / name, voxels, affine))


def text(name: str, content: str | bytes) -> Make:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def spoilt(name: str, change: Callable[[bytes], bytes]) -> Make:
    return lambda folder: nothing((folder / name).write_bytes(change((folder / name).read_bytes())))


def cut_inside(data: bytes) -> bytes:
    """A whole gzip file of too few voxels."""
    return gzip.compress(gzip.decompress(data)[:-9])


def moved(by: float) -> Any:
    affine = AFFINE.copy()
    affine[0, 3] += by
    return affine


def with_voxel(value: float, dtype: str = "float32") -> Any:
    voxels = volume().astype(dtype)
    voxels[3, 2, 1] = value
    return voxels


def cut_nii(folder: Path) -> Path:
    path = save(folder / "x.nii", volume())
    path.write_bytes(path.read_bytes()[:-1])
    return path


def large(change: Callable[[bytes], bytes]) -> Make:
    """A file of which the header can be read."""

    def make(folder: Path) -> Path:
        path = save(folder / "x.nii.gz", volume((20, 20, 20)))
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def npz(content: Any) -> Make:
    def make(folder: Path) -> Path:
        np.savez(folder / "s.npz", x=content)
        return folder / "s.npz"

    return make


def singular(folder: Path) -> Path:
    image = nib.Nifti1Image(volume(), AFFINE)
    image.header["srow_x"] = 0
    image.to_filename(folder / "x.nii")
    data = bytearray((folder / "x.nii").read_bytes())
    data[280:296] = bytes(16)
    (folder / "x.nii").write_bytes(data)
    return folder / "x.nii"


A, B, L = "imagesTr/a_0000.nii.gz", "imagesTr/b_0001.nii.gz", "labelsTr/a.nii.gz"
CASES: list[tuple[str, Make, str]] = [
    ("no label", gone(L), "labelsTr/a.nii.gz is missing"),
    ("no modality", gone(B), "imagesTr/b_0001.nii.gz is missing"),
    ("no image", gone(A, "imagesTr/a_0001.nii.gz"), "a_0000.nii.gz is missing"),
    ("an extra modality", put("imagesTr/a_0002.nii.gz", volume()), "a_0002.nii.gz is none of the 2 modal"),
    ("no modality's number", put("imagesTr/a.nii.gz", volume()), "Tr/a.nii.gz is none of the 2 modal"),
    ("an empty imagesTr", told(file_ending=".nii"), "imagesTr has no file that ends in .nii"),
    ("a label by another name", text("t.csv", f"image,mask\n{A},{L}\n"), "row 1: its col.* not 'mask'"),
    ("no imagesTr", lambda f: (f / "imagesTr").rename(f / "else") and None, "imagesTr is missing"),
    ("another count", told(numTraining=3), "numTraining is 3, .*imagesTr has 2 cases"),
    ("no channels", told(channel_names=None), "has no channel_names"),
    ("no classes", told(labels=None), "has no labels, such as"),
    ("classes without one", told(labels={}), "has no labels, such as"),
    ("odd classes", told(labels={"x": "y"}), "has no labels, such as"),
    ("another ending", told(file_ending=".nrrd"), "file_ending '.nrrd' is not read"),
    ("no JSON", spoilt("dataset.json", lambda data: data[:-1]), "dataset.json cannot be read: "),
    ("a list", lambda f: text("dataset.json", "[]")(f) and f, "has no channel_names"),
    ("another shape", put(L, labels((7, 6, 4))), r"Tr/a.nii.gz has \[7, 6, 4\] voxels, .*_0000.* \[7, "),
    ("modality's shape", put(B, volume((6, 6, 5))), r"b_0001.nii.gz has \[6, 6, 5\] voxels"),
    ("another place", put(L, labels(), moved(0.01)), "labelsTr/a.nii.gz lies elsewhere than .* by 0.01"),
    ("another axis", put(L, labels(), AFFINE * [[1, -1, 1, 1]]), "labelsTr/a.nii.gz lies elsewhere"),
    ("4D", put(A, volume((7, 6, 5, 2))), r"a_0000.nii.gz has 4 axes, \[7, 6, 5, 2\]; .*: split it"),
    ("2D", lambda folder: save(folder / "x.nii", np.zeros((7, 6), np.int16)), "x.nii has 2 axes.*: give it"),
    ("complex", put(A, volume().astype("complex64")), "a_0000.nii.gz has voxels of type complex64"),
    ("singular", singular, "x.nii has a singular affine"),
    ("no NIfTI", spoilt(A, lambda data: gzip.compress(b"x" * 999)), "a_0000.nii.gz is not a readable NIfTI"),
    ("no gzip", spoilt(A, lambda data: b"x" * 999), "a_0000.nii.gz is not a readable NIfTI"),
    ("empty", spoilt(A, lambda data: b""), "a_0000.nii.gz is not a readable NIfTI"),
    ("cut off", large(lambda data: data[: len(data) // 2]), "x.nii.gz is damaged or cut off"),
    ("no checksum", large(lambda data: data[:-8]), "x.nii.gz is damaged or cut off"),
    ("checksum", large(lambda data: data[:-8] + bytes(4) + data[-4:]), "x.nii.gz is damaged or cut off"),
    ("a bad block", large(lambda data: data[:4000] + bytes(90) + data[4090:]), "x.nii.gz is damaged"),
    ("few voxels", spoilt(A, cut_inside), r"a_0000.nii.gz is damaged or cut off \(9 bytes are missing\)"),
    ("cut off .nii", cut_nii, "x.nii is cut off: 771 bytes of 772"),
    ("unknown class", put(L, labels() + 5), r"a.nii.gz has \d at voxel \[0, 0, 0\]; its classes are 0, 1, 2"),
    ("half a class", put(L, np.where(labels() == 2, 1.5, 0)), r"labelsTr/a.nii.gz has 1.5 at voxel"),
    ("NaN", put(A, with_voxel(np.nan)), r"a_0000.nii.gz has nan at voxel \[3, 2, 1\]"),
    ("infinite", put(B, with_voxel(-np.inf)), r"b_0001.nii.gz has -inf at voxel \[3, 2, 1\]"),
    ("beyond float32", put(A, with_voxel(1e39, "float64")), r"a_0000.nii.gz has 1e\+39 at voxel \[3, 2, 1\]"),
    ("nothing there", lambda folder: folder / "nowhere.csv", "no such file or folder: .*nowhere.csv"),
    ("a picture", text("x.png", "x"), "x.png is not converted; give an nnU-Net folder"),
    ("an empty folder", lambda f: (f / "none").mkdir() or f / "none", "none has no dataset.json, NIfTI"),
    ("an empty table", text("t.csv", "image,label\n"), "t.csv has no rows"),
    ("no image column", text("t.csv", f"img,label\n{A},{L}\n"), "t.csv, row 1: its columns are image"),
    ("a gap of columns", text("t.csv", f"image,image3\n{A},{A}\n"), "t.csv, row 1: its columns are image"),
    ("a row without label", text("t.csv", f"image,label\n{A},{L}\n{B},\n"), "'b_0001' has fewer files"),
    ("one name twice", text("t.csv", f"name,image\nq,{A}\nq,{B}\n"), "sample 'q' is not the only one"),
    ("a name that leads out", text("t.csv", f"name,image\n../q,{A}\n"), "'../q' cannot be .*; rename its"),
    ("no such file", text("t.json", '[{"image": "no.nii"}]'), "no.nii is missing"),
    ("no rows", text("t.json", '{"image": "no.nii"}'), "t.json has no rows"),
    ("another file", text("t.json", '[{"image": "dataset.json"}]'), "dataset.json is no NIfTI file"),
    ("half an npz", text("s.npz", b"PK\x03\x04"), "s.npz cannot be read"),
    ("objects", npz(np.array([{}, 1], object)), "s.npz cannot be read: .*Python objects"),
    ("text", npz(np.array(["a"])), "no arrays of numbers; .*; 'x' has dtype <U1"),
    ("wide floats", npz(np.ones((2, 3), np.longdouble)), "array 'x' is of float128, .*float64"),
    ("NaN in an array", npz(np.array([[1, np.nan]])), "array 'x' of .* has NaN"),
    ("half an npy", text("s.npy", b"\x93NUMPY\x01\x00"), "s.npy cannot be read"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nnunet(tmp_path_factory.mktemp("good") / "D", {"a": (7, 6, 5), "b": (7, 6, 5)})


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_sources_are_refused_in_one_line(good: Path, tmp_path: Path, make: Make, message: str) -> None:
    folder = tmp_path / "D"
    folder.mkdir()
    for path in good.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(good)).parent.mkdir(exist_ok=True)
            (folder / path.relative_to(good)).write_bytes(path.read_bytes())
    source = make(folder) or folder
    with pytest.raises(DatasetError, match=message) as caught:
        convert(source, tmp_path / "out.zarr")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["D"]


def test_all_that_is_wrong_by_headers_is_told_at_once(good: Path, tmp_path: Path) -> None:
    source = nnunet(tmp_path / "D", {f"c{number}": (7, 6, 5) for number in range(9)}, channels=1)
    for number in range(8):
        save(source / f"labelsTr/c{number}.nii.gz", labels((7, 6, 4)))
    with pytest.raises(DatasetError, match="c0.nii.gz has .*c4.nii.gz has .*; and 3 more"):
        convert(source, tmp_path / "out.zarr")


def test_voxels_may_be_smaller_than_a_micron(tmp_path: Path) -> None:
    save(tmp_path / "x.nii", volume(), np.diag([5e-5, 5e-5, 5e-5, 1]))
    group = convert(tmp_path / "x.nii", tmp_path / "out.zarr")
    np.testing.assert_allclose(group["x"].attrs["spacing"], [5e-5] * 3, rtol=1e-6)


def test_a_place_that_differs_by_rounding_is_the_same(tmp_path: Path) -> None:
    source = nnunet(tmp_path / "D", {"a": (7, 6, 5)}, channels=1)
    save(source / L, labels(), moved(5e-4))
    assert "a" in convert(source, tmp_path / "out.zarr")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spacing": (1, 1)}, "three positive numbers"),
        ({"spacing": (1, 0, 1)}, "three positive numbers"),
        ({"spacing": (1, float("nan"), 1)}, "three positive numbers"),
        ({"split": "val"}, "split is one of train, test, got 'val'"),
        ({"memory": "2 apples"}, "is not a size"),
        ({"memory": "1EiB"}, "EiB|more than"),
    ],
)
def test_bad_options_are_refused(good: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OocdlError, match=message):
        convert(good, tmp_path / "out.zarr", **options)


def test_options_of_volumes_are_refused_for_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    with pytest.raises(InputError, match="have neither a spacing nor a split"):
        convert(tmp_path / "x.npy", tmp_path / "out.zarr", spacing=(1, 1, 1))
    with pytest.raises(InputError, match="has no dataset.json, so no split 'test'"):
        convert(tmp_path, tmp_path / "out.zarr", split="test")
