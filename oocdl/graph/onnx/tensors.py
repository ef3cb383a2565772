"""Reads weights of an ONNX file by region, so that a whole model is never in memory.

An initializer lies in the message, in the model file, or in an external file beside it. By the last, files
have attacked their readers again and again (six CVEs in onnx alone): it is checked whenever it is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import onnx

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Region, as_slices, region_shape, whole
from oocdl.graph.onnx.model_file import dimensions, element_type, inside, shown, size_text

Stamp = tuple[int, int, int, int]
"""Device, inode, size and time of change of a file: whether it is still the same."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightSource:
    """One initializer of a model file. Nothing is read before ``read`` is called."""

    name: str
    shape: Shape
    dtype: str
    """The dtype that ``read`` returns: the precision that was asked for."""
    stored: np.dtype[np.generic]
    path: Path | None
    """The file, ``None`` where ``data`` holds the contents."""
    offset: int = 0
    stamp: Stamp = (0, 0, 0, 0)
    data: Array | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it has in the file."""
        return prod(self.shape) * self.stored.itemsize

    @property
    def is_float(self) -> bool:
        """Whether it can be trained: it is floating-point, and in no packed or scaled format."""
        return self.stored.kind == "f" or self.stored.name == "bfloat16"

    def astype(self, dtype: str) -> WeightSource:
        return replace(self, dtype=dtype)

    def read(self, region: Region | None = None) -> Array:
        """Return a copy of a region (of everything if ``None``); raises ModelError at NaN and infinity."""
        region = whole(self.shape) if region is None else region
        piece = self.raw(region)
        if self.is_float and not np.isfinite(piece).all():
            bad = np.argwhere(~np.isfinite(piece))
            at = [int(i) + start for i, (start, _) in zip(bad[0], region, strict=True)]
            raise ModelError(
                f"initializer {shown(self.name)} has {len(bad)} NaN or infinite numbers, first at {at}"
            )
        return piece.astype(self.dtype, copy=False)

    def raw(self, region: Region | None = None) -> Array:
        region = whole(self.shape) if region is None else region
        if self.data is not None:
            return np.array(self.data[as_slices(region)])
        return self._from_file(region)

    def _from_file(self, region: Region) -> Array:
        """Read ``region`` in as few contiguous runs as it has."""
        result = np.empty(region_shape(region), self.stored)
        if result.size == 0:
            return result
        tail = len(self.shape)  # axes from here on are whole, so one run holds them
        while tail and region[tail - 1] == (0, self.shape[tail - 1]):
            tail -= 1
        tail = max(tail - 1, 0)
        steps = [prod(self.shape[axis + 1 :]) * self.stored.itemsize for axis in range(len(self.shape))]
        base = self.offset + sum(start * step for (start, _), step in zip(region, steps, strict=True))
        runs = result.reshape(*result.shape[:tail], -1)
        assert self.path is not None
        with _opened(self.path, self.stamp, self.name) as handle:
            for index in np.ndindex(*result.shape[:tail]):
                at = base + sum(i * step for i, step in zip(index, steps, strict=False))
                _read_exactly(handle, runs[index].view(np.uint8).data, at, self.name)
        return result


@contextmanager
def _opened(path: Path, stamp: Stamp, name: str) -> Iterator[int]:
    """Open a file, which has to be the one that was seen at import."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"tensor {shown(name)} cannot be read from {path}: {error.strerror}") from None
    try:
        if _stamp(os.fstat(handle)) != stamp:
            why = "has changed since the model was read; start again from the original file"
            raise ModelError(f"{path} {why}")
        yield handle
    finally:
        os.close(handle)


def _read_exactly(handle: int, target: memoryview, at: int, name: str) -> None:
    while target.nbytes:
        count = os.preadv(handle, [target[: 1 << 30]], at)
        if count == 0:
            raise ModelError(f"tensor {shown(name)} is cut off: its file ends too early")
        target, at = target[count:], at + count


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def source(tensor: onnx.TensorProto, path: Path, span: range | None) -> WeightSource:
    """Find the contents of an initializer; ``span``: its bytes in the file at ``path``."""
    what = f"tensor {shown(tensor.name)}"
    stored = element_type(tensor.data_type, what)
    shape = dimensions(tensor, what)
    declared = WeightSource(name=tensor.name, shape=shape, dtype=stored.name, stored=stored, path=None)
    if span is not None:
        if len(span) != declared.nbytes:
            sizes = f"declares {size_text(declared.nbytes)}, but carries {size_text(len(span))}"
            raise ModelError(f"{what} {sizes}")
        return replace(declared, path=path, offset=span.start, stamp=_stamp(path.stat()))
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external(tensor, path.parent, declared, what)
    return replace(declared, data=inside(tensor, what))


def _external(tensor: onnx.TensorProto, folder: Path, declared: WeightSource, what: str) -> WeightSource:
    size = declared.nbytes
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    file = _safe_path(folder, location, what)
    status = file.stat()
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError:
        raise ModelError(f"{what} has an offset or length that is no number") from None
    if offset < 0 or length < 0 or offset + max(length, size) > status.st_size:
        held = size_text(max(status.st_size - max(offset, 0), 0))
        raise ModelError(
            f"{what} needs {size_text(max(length, size))} at offset {offset} of {shown(location)}; "
            f"the file has {held} there"
        )
    if length != size:
        raise ModelError(f"{what} declares {size_text(size)}, but its external data is {size_text(length)}")
    return replace(declared, path=file, offset=offset, stamp=_stamp(status))


def _safe_path(folder: Path, location: str, what: str) -> Path:
    """Return the path of an external file; refuses all but plain files inside the folder of the model."""
    refused = f"{what} points to {shown(location)}"
    if not location or "\0" in location:
        raise ModelError(f"{what} is external, but names no file")
    if Path(location).is_absolute() or location[:1] in "/\\" or location[1:2] == ":":
        raise ModelError(f"{refused}, an absolute path; external data has to lie in the model's folder")
    if ".." in Path(location.replace("\\", "/")).parts:
        raise ModelError(f"{refused}, outside the model's folder; refused")
    base = folder.resolve()
    at = base
    for part in Path(location).parts:
        at = at / part
        try:
            status = at.lstat()
        except OSError:
            raise ModelError(f"{what} needs {shown(location)} beside the model; not found") from None
        if stat.S_ISLNK(status.st_mode):
            raise ModelError(f"{refused}, a symbolic link; refused (copy the file itself beside the model)")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{refused}, which is no plain file; refused")
    if status.st_nlink > 1:
        raise ModelError(f"{refused}, a hard link to another file; refused (copy it beside the model)")
    if not at.resolve().is_relative_to(base):
        raise ModelError(f"{refused}, outside the model's folder; refused")
    return at
