"""DICOM series are the volumes that NIfTI files of the same voxels are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import zarr
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from oocdl.data import convert
from oocdl.errors import DatasetError
from tests.kit import nifti

SHAPE = (4, 5, 6)
"""Voxels [z, y, x]."""
ALONG, DOWN = np.array([0.96, 0.28, 0.0]), np.array([-0.28, 0.96, 0.0])
STEP = np.array([0.1, 0.0, 2.5])
"""From a slice to the next, in millimetres of DICOM's axes: a gantry that is tilted a little."""
ORIGIN = np.array([-12.0, 30.5, -7.25])


def voxels(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-50, 900, SHAPE).astype(np.int16)


def affine() -> np.ndarray[Any, Any]:
    """From voxel (x, y, z) to NIfTI's millimetres, of pixels of 0.5 by 0.75 mm."""
    ways = np.stack([ALONG * 0.75, DOWN * 0.5, STEP, ORIGIN], axis=1)
    return np.vstack([np.diag([-1, -1, 1]) @ ways, [0, 0, 0, 1]])


def write_series(folder: Path, values: np.ndarray[Any, Any], series: str = "", **changes: Any) -> list[Path]:
    """Write a file for each slice, under names that have nothing to do with their order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for row, plane in enumerate(values):
        one = Dataset()
        one.file_meta = FileMetaDataset()
        one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        one.file_meta.MediaStorageSOPClassUID = CTImageStorage
        one.file_meta.MediaStorageSOPInstanceUID = one.SOPInstanceUID = generate_uid(entropy_srcs=[str(row)])
        one.SOPClassUID, one.SeriesInstanceUID = CTImageStorage, series or "1.2.3"
        (one.Rows, one.Columns), one.SamplesPerPixel = plane.shape, 1
        one.PhotometricInterpretation = "MONOCHROME2"
        one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 1
        one.ImageOrientationPatient, one.PixelSpacing = [*ALONG, *DOWN], [0.5, 0.75]
        one.ImagePositionPatient = [round(float(n), 5) for n in ORIGIN + row * STEP]
        one.RescaleSlope, one.RescaleIntercept = 1, 0
        one.PixelData = plane.astype("<i2").tobytes()
        for name, value in changes.items():
            setattr(one, name, value(row) if callable(value) else value)
        paths.append(folder / f"IM{(row * 7 + 3) % 10}")
        one.save_as(paths[-1], enforce_file_format=True)
    return paths


def test_a_series_is_the_volume_of_a_nifti_file(tmp_path: Path) -> None:
    write_series(tmp_path / "dicom/one", voxels())
    write_series(tmp_path / "dicom/two", voxels(1))
    (tmp_path / "dicom/two/notes.txt").write_text("no slice")
    nifti.save(tmp_path / "nifti/one.nii.gz", voxels().transpose(2, 1, 0), affine())
    found = convert(tmp_path / "dicom", tmp_path / "a.zarr")
    wanted = convert(tmp_path / "nifti", tmp_path / "b.zarr")
    assert dict(found.attrs["oocdl"])["samples"] == ["one", "two"]  # type: ignore[call-overload]
    for name, values in (("one", voxels()), ("two", voxels(1))):
        image = found[f"{name}/image"]
        assert isinstance(image, zarr.Array) and image.dtype == np.int16
        assert np.array_equal(np.asarray(image[0]), values)
    assert np.allclose(found["one"].attrs["affine"], wanted["one"].attrs["affine"], atol=1e-4)
    assert np.allclose(found["one"].attrs["spacing"], wanted["one"].attrs["spacing"], atol=1e-4)


def test_tables_take_series_with_labels_of_nifti(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", voxels(), RescaleIntercept=-1024, RescaleSlope=2)
    nifti.save(tmp_path / "seg.nii.gz", (voxels() > 400).astype(np.uint8).transpose(2, 1, 0), affine())
    (tmp_path / "table.csv").write_text("image,label\nscan,seg.nii.gz\n")
    group = convert(tmp_path / "table.csv", tmp_path / "a.zarr")
    image: Any = group["scan/image"]
    assert np.array_equal(np.asarray(image[0]), voxels() * 2.0 - 1024)


def nearly(*numbers: float) -> Callable[[int], list[float]]:
    """Numbers that differ from slice to slice by rounding."""
    return lambda row: [number - row * 1e-7 for number in numbers]


SLOPES = np.arange(1, 5).reshape(-1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "dtype", "slopes"),
    [
        ({"RescaleSlope": lambda row: 1 + row}, np.float32, SLOPES),
        ({"RescaleSlope": None, "RescaleIntercept": None}, np.int16, 1),  # empty is as absent
        ({"PixelRepresentation": lambda row: int(row > 0)}, np.int32, 1),
        ({"PixelRepresentation": lambda n: int(n < 3), "RescaleSlope": lambda n: 1 + n}, np.float32, SLOPES),
        ({"BitsStored": lambda row: 16 - row % 2, "HighBit": lambda row: 15 - row % 2}, np.int16, 1),
        ({"ImageOrientationPatient": nearly(*ALONG, *DOWN)}, np.int16, 1),
        ({"PixelSpacing": nearly(0.5, 0.75)}, np.int16, 1),
    ],
    ids=["slope", "no slope", "sign", "sign and slope", "bits", "orientation", "spacing"],
)
def test_slices_of_a_volume_may_differ_in(changes: Any, dtype: type, slopes: Any, tmp_path: Path) -> None:
    """Their voxels are of one type that holds those of all."""
    values = voxels()
    values[[0, 3]] = abs(values[[0, 3]])
    write_series(tmp_path / "scan", values, **changes)
    image: Any = convert(tmp_path / "scan", tmp_path / "a.zarr")["scan/image"]
    assert image.dtype == dtype and np.array_equal(np.asarray(image[0]), values * slopes)


def cut_off(paths: list[Path]) -> None:
    paths[2].write_bytes(paths[2].read_bytes()[:-40])


def without(name: str) -> Callable[[list[Path]], None]:
    def change(paths: list[Path]) -> None:
        one = pydicom.dcmread(paths[1])
        delattr(one, name)
        one.save_as(paths[1])

    return change


@pytest.mark.parametrize(
    ("changes", "change", "message"),
    [
        ({}, lambda paths: paths[1].unlink(), "not evenly spaced: from .*IM3 to IM7 there are 5.004 mm"),
        ({"ImagePositionPatient": [*ORIGIN]}, None, "not evenly spaced"),
        ({"SeriesInstanceUID": lambda row: f"1.2.{row}"}, None, "another SeriesInstanceUID .*a folder"),
        ({"PixelSpacing": lambda row: [0.5, 0.75 + row]}, None, "another PixelSpacing than IM"),
        ({"PixelSpacing": lambda row: [0.5, 0.75][: 2 - row // 3]}, None, "another PixelSpacing than IM"),
        ({"ImageOrientationPatient": lambda row: [1, row / 1e3, 0, 0, 1, 0]}, None, "another ImageOrient"),
        ({"BitsAllocated": 1}, None, "pixels of 1 bits"),
        ({"NumberOfFrames": 2}, None, "several frames or colours"),
        ({"SamplesPerPixel": 3}, None, "several frames or colours"),
        ({}, without("ImagePositionPatient"), "IM0 has no ImagePositionPatient"),
        ({}, cut_off, "IM7: its pixels cannot be read"),
        ({}, lambda paths: paths[0].write_bytes(bytes(128) + b"DICMnothing"), "IM3 "),
    ],
)
def test_what_is_no_volume_is_refused(changes: Any, change: Any, message: str, tmp_path: Path) -> None:
    paths = write_series(tmp_path / "scan", voxels(), **changes)
    if change is not None:
        change(paths)
    with pytest.raises(DatasetError, match=message) as caught:
        convert(tmp_path / "scan", tmp_path / "a.zarr")
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("a.zarr")]
