"""DICOM series as volumes: a folder with a file for each slice, which is read when its plane is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.data.nifti import Array, Volume, read_header
from oocdl.errors import DatasetError
from oocdl.host.optional import needed
from oocdl.storage.dataset.data_array import one_line

PREAMBLE_BYTES, MARK = 128, b"DICM"
ALIKE = ("SeriesInstanceUID", "Rows", "Columns", "ImageOrientationPatient", "PixelSpacing", "BitsAllocated")
"""Attributes that all slices of a volume share."""
ROUNDED, ROUNDED_BY = ("ImageOrientationPatient", "PixelSpacing"), 1e-4
"""Those of them that are rounded in some slices, and by how much they differ at most."""
NEEDED = (*ALIKE, "PixelRepresentation", "ImagePositionPatient")
TAGS = (*NEEDED, "NumberOfFrames", "SamplesPerPixel", "RescaleSlope", "RescaleIntercept", "SliceThickness")
ROUNDING = 1e-2  # share of the distance of slices by which one may lie elsewhere: headers are rounded
SCANNER_CODES = (0, 1)  # NIfTI's codes of an affine that leads to the space of the scanner


def read_volume(path: Path) -> Volume:
    """Read what the header of a NIfTI file says, or those of a DICOM series. Raises DatasetError."""
    return read_series(path) if path.is_dir() else read_header(path)


def series_in(folder: Path) -> list[Path]:
    """Return the folder, if DICOM files are in it; else those of its folders with such files, by name."""
    if _files(folder):
        return [folder]
    return [place for place in sorted(folder.iterdir()) if place.is_dir() and _files(place)]


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that are DICOM by their mark, which has no certain ending."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "DICOMDIR" and not path.name.startswith("."):
            with path.open("rb") as stream:
                found += [path] if stream.read(PREAMBLE_BYTES + len(MARK)).endswith(MARK) else []
    return found


def read_series(folder: Path) -> Volume:
    """Read the headers of a series: slices in the order of their places, along the normal of their planes.

    The affine leads from voxel (x, y, z) to millimetres in NIfTI's axes (right, anterior, superior), where
    DICOM's are left, posterior, superior: DICOM PS3.3, C.7.6.2.1.1. Raises DatasetError, which names the
    file, for colours, several frames in a file, several series, and a slice that is missing.
    """
    heads = [(path, _head(path)) for path in _files(folder)]
    if not heads:
        raise DatasetError(f"{folder} has no DICOM file")
    first_path, first = heads[0]
    for path, head in heads:
        for name in ALIKE:
            if not _alike(name, head[name].value, first[name].value):
                cure = "; give each series a folder" if name == ALIKE[0] else ""
                raise DatasetError(f"{path} has another {name} than {first_path.name}{cure}")
    along, down = np.reshape(np.array(first.ImageOrientationPatient, np.float64), (2, 3))
    normal = np.cross(along, down)
    heads.sort(key=lambda one: float(normal @ np.array(one[1].ImagePositionPatient, np.float64)))
    places = np.array([head.ImagePositionPatient for _, head in heads], np.float64)
    step = _step(places, [path for path, _ in heads], normal * float(first.get("SliceThickness") or 1))
    row_step, column_step = (float(number) for number in first.PixelSpacing)
    affine = np.eye(4)
    affine[:3] = np.stack([along * column_step, down * row_step, step, places[0]], axis=1)
    affine[:2] *= -1
    factors = {_factors(head) for _, head in heads}
    kinds = {"i" if head.PixelRepresentation else "u" for _, head in heads}
    stored = np.result_type(*(np.dtype(f"{kind}{first.BitsAllocated // 8}") for kind in kinds))
    slope, intercept = next(iter(factors)) if len(factors) == 1 else (1.0, 0.0)
    return Volume(
        path=folder, shape=(len(heads), int(first.Rows), int(first.Columns)),
        stored=stored if len(factors) == 1 else np.dtype(np.float32), slope=slope, intercept=intercept,
        affine=affine, qform=affine, codes=SCANNER_CODES, offset=0, slices=tuple(path for path, _ in heads),
    )  # fmt: skip


def _head(path: Path) -> Any:
    pydicom = needed("pydicom", "reading DICOM", "dicom")
    try:
        head = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=list(TAGS))
    except Exception as error:  # pydicom raises what its parsers raise
        raise DatasetError(f"{path} is not a readable DICOM file ({one_line(error)})") from error
    missing = [name for name in NEEDED if head.get(name) in (None, "")]
    if missing:
        raise DatasetError(f"{path} has no {missing[0]}, and so no place in a volume; move it away")
    if head.BitsAllocated not in (8, 16, 32):
        raise DatasetError(f"{path} has pixels of {head.BitsAllocated} bits; 8, 16 and 32 are read")
    if int(head.get("NumberOfFrames") or 1) > 1 or int(head.get("SamplesPerPixel") or 1) > 1:
        raise DatasetError(f"{path} has several frames or colours; only one grey slice a file is read")
    return head


def _alike(name: str, one: Any, other: Any) -> bool:
    if name not in ROUNDED or np.shape(one) != np.shape(other):
        return bool(one == other)
    return np.allclose(np.array(one, float), np.array(other, float), rtol=0, atol=ROUNDED_BY)


def _factors(head: Any) -> tuple[float, float]:
    slope, intercept = head.get("RescaleSlope"), head.get("RescaleIntercept")
    return 1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept)


def _step(places: Array, paths: list[Path], alone: Array) -> Array:
    """Return the way from a slice to the next [3], in millimetres; ``alone`` is that of a single one."""
    if len(places) == 1:
        return alone
    step: Array = (places[-1] - places[0]) / (len(places) - 1)
    ways = np.diff(places, axis=0)
    far = np.abs(ways - step).max(axis=1)
    if not step.any() or far.max() > ROUNDING * np.abs(step).max():
        odd = int(np.argmax(np.linalg.norm(ways, axis=1)))
        one, next_one = [*pairwise(paths)][odd]
        raise DatasetError(
            f"slices are not evenly spaced: from {one} to {next_one.name} there are "
            f"{np.linalg.norm(ways[odd]):.4g} mm, on the average {np.linalg.norm(step):.4g}; is one missing, "
            "or are there several volumes?"
        )
    return step


def read_slices(volume: Volume) -> Iterator[Array]:
    """Yield the planes of a series as they are stored, [1, y, x]. Raises DatasetError."""
    pydicom = needed("pydicom", "reading DICOM", "dicom")
    for path in volume.slices:
        try:
            head = pydicom.dcmread(path)
            pixels: Array = head.pixel_array
        except Exception as error:  # as above, and decoders that are not installed
            raise DatasetError(f"{path}: its pixels cannot be read ({one_line(error)})") from error
        if volume.stored.kind == "f":  # each slice has factors of its own
            slope, intercept = _factors(head)
            pixels = pixels * slope + intercept
        yield pixels.astype(volume.stored)[None]
