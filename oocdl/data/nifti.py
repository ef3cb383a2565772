"""NIfTI files as streams: a header with its place in space, and planes in the order in which they are stored.

A file has x fastest and z slowest, so its bytes are an array [z, y, x], read once from its first plane to
its last, compressed or not. nibabel reads the header; no voxel goes through it.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import igzip, isal_zlib

from oocdl.errors import DatasetError
from oocdl.host.optional import needed
from oocdl.storage.dataset.data_array import one_line

Array = npt.NDArray[Any]
Affine = npt.NDArray[np.float64]
ENDINGS = (".nii.gz", ".nii")
PIECE_BYTES = 1 << 20
MILLIMETRES = {"meter": 1e3, "micron": 1e-3}  # of the units of a header; others are taken for millimetres
SAME_VOXELS = 1e-3  # two files are of one place if no corner of their grids differs by more of a voxel
GZIP_ERRORS: Any = (EOFError, OSError, zlib.error, isal_zlib.IsalError)


@dataclass(frozen=True, eq=False, kw_only=True)
class Volume:
    """What the header of a NIfTI file says, or those of a DICOM series."""

    path: Path
    shape: tuple[int, ...]  # [z, y, x]
    stored: np.dtype[Any]  # type of the voxels in the file, with its byte order
    slope: float
    intercept: float  # a voxel is worth slope · stored + intercept
    affine: Affine  # 4 × 4: from voxel (x, y, z, 1) to millimetres
    qform: Affine  # the affine by the qform, if that has a code; else ``affine``
    codes: tuple[int, int]  # qform and sform codes: which space the affine leads to
    offset: int  # bytes before the first voxel
    slices: tuple[Path, ...] = ()  # files of a DICOM series, whose folder ``path`` is

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres between voxels along [z, y, x]."""
        return spacing_of(self.affine)

    @property
    def is_integer(self) -> bool:
        """Whether values are the integers that are stored."""
        return self.stored.kind in "iu" and (self.slope, self.intercept) == (1.0, 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all voxels as they are stored, uncompressed."""
        return prod(self.shape) * self.stored.itemsize


def spacing_of(affine: Affine) -> tuple[float, ...]:
    """Return the millimetres between voxels along [z, y, x].

    >>> spacing_of(np.diag([1.0, 2.0, -3.0, 1.0]))
    (3.0, 2.0, 1.0)
    """
    return tuple(float(step) for step in np.sqrt((affine[:3, :3] ** 2).sum(0))[::-1])


def read_header(path: Path) -> Volume:
    """Read the header of a NIfTI file of three axes. Raises DatasetError, in one line, for any other."""
    if not path.name.lower().endswith(ENDINGS):
        raise DatasetError(f"{path} is no NIfTI file (.nii or .nii.gz); and no folder of a DICOM series")
    if not path.is_file():
        raise DatasetError(f"{path} is missing")
    nibabel = needed("nibabel", "reading NIfTI", "mri")
    try:
        image = nibabel.load(path)
        data, codes = image.dataobj, (int(image.header["qform_code"]), int(image.header["sform_code"]))
        unit = MILLIMETRES.get(image.header.get_xyzt_units()[0], 1.0) * np.array([[1.0], [1.0], [1.0]])
        both = image.affine, image.header.get_qform() if codes[0] else image.affine
        affine, qform = (np.vstack([np.asarray(one)[:3] * unit, [0, 0, 0, 1]]) for one in both)
    except Exception as error:  # nibabel raises what its parsers raise; all mean the same here
        raise DatasetError(f"{path} is not a readable NIfTI file ({one_line(error)})") from error
    shape = tuple(int(extent) for extent in data.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    reason = _why_not(shape, data.dtype, affine)
    if reason:
        raise DatasetError(f"{path} {reason}")
    found = Volume(
        path=path, shape=shape[::-1], stored=data.dtype, slope=float(data.slope), intercept=float(data.inter),
        affine=affine, qform=qform, codes=codes, offset=int(data.offset),
    )  # fmt: skip
    nbytes, wanted = path.stat().st_size, found.offset + found.nbytes
    if path.name.lower().endswith(".nii") and nbytes < wanted:
        raise DatasetError(f"{path} is cut off: {nbytes:,} bytes of {wanted:,}")
    return found


def _why_not(shape: tuple[int, ...], dtype: np.dtype[Any], affine: Affine) -> str:
    if len(shape) != 3:
        less = "give it a third axis of 1, or save images as one array [samples, y, x], an .npy file"
        way_out = less if len(shape) < 3 else "split it"
        return f"has {len(shape)} axes, {list(shape)}; one file holds one volume of three: {way_out}"
    if min(shape) < 1:
        return f"is empty: {list(shape)}"
    if dtype.kind not in "iuf":
        return f"has voxels of type {dtype}; only integers and floats are read"
    steps = affine[:3, :3]
    if not np.isfinite(affine).all():
        return "has an affine that is not finite; repair its header"
    if abs(np.linalg.det(steps)) <= 1e-12 * prod(np.linalg.norm(steps, axis=0)):
        return "has a singular affine, which leads nowhere; repair its header"
    return ""


def apart_by(one: Volume, other: Volume) -> float:
    """Return by how many voxels of ``one`` the corners of two grids of equal shape differ at most."""
    corners = np.array([(x, y, z, 1) for z in (0, 1) for y in (0, 1) for x in (0, 1)], np.float64)
    corners[:, :3] *= np.array(one.shape[::-1]) - 1
    moved = corners @ (np.linalg.inv(one.affine) @ other.affine).T
    return float(np.abs(moved - corners).max())


def read_planes(volume: Volume) -> Iterator[Array]:
    """Yield the planes of a volume as they are stored, [planes, y, x], some at a time; at least one.

    Raises DatasetError if the file ends too early or, at its end, for another checksum than it says.
    """
    depth, *plane = volume.shape
    rows = max(1, PIECE_BYTES // (prod(plane) * volume.stored.itemsize))
    opener: Any = igzip.IGzipFile if volume.path.name.lower().endswith(".gz") else io.FileIO
    try:
        with opener(volume.path) as stream:
            for start in range(0, volume.offset, PIECE_BYTES):
                _read(stream, np.empty(min(PIECE_BYTES, volume.offset - start), np.uint8))
            for start in range(0, depth, rows):
                piece = np.empty((min(rows, depth - start), *plane), volume.stored)
                _read(stream, piece.reshape(-1).view(np.uint8))
                yield piece
            while stream.read(PIECE_BYTES):  # to the checksum, which stands behind all
                pass
    except GZIP_ERRORS as error:
        reason = " ".join(f"{error}".split())
        raise DatasetError(f"{volume.path} is damaged or cut off ({reason}); restore it") from error


def _read(stream: Any, target: npt.NDArray[np.uint8]) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done:].data)
        if not count:
            raise EOFError(f"{len(target) - done:,} bytes are missing")
        done += count


def write_volume(
    path: Path, planes: Iterable[Array], shape: tuple[int, ...], dtype: np.dtype[Any], affine: Affine,
    codes: tuple[int, int], qform: Affine,
) -> None:  # fmt: skip
    """Write planes of integers, [y, x] each, to a .nii.gz file of a ``shape``, which appears at the end."""
    nibabel = needed("nibabel", "writing NIfTI", "mri")
    kind = nibabel.Nifti1Image if max(shape) < 2**15 else nibabel.Nifti2Image
    image = kind(np.broadcast_to(np.zeros((), dtype), shape[::-1]), affine, dtype=dtype)
    image.set_qform(qform, codes[0], strip_shears=True)
    image.set_sform(affine, codes[1])
    image.header.set_xyzt_units("mm")
    image.header["vox_offset"] = image.header.single_vox_offset
    head, partial = image.header.binaryblock, path.with_name(f".{path.name}.partial")
    try:
        # Without name and time, equal volumes are equal files.
        with open(partial, "wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as stream:
            stream.write(head.ljust(int(image.header["vox_offset"]), b"\0"))
            for plane in planes:
                stream.write(np.ascontiguousarray(plane, dtype.newbyteorder("<")).data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
