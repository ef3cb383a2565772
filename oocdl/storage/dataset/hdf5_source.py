"""Opens arrays of an HDF5 file; refuses those whose reading would not be safe and complete.

A file is one thing: as long as its size and time are what they were, so are all chunks in it.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import Region, as_slices
from oocdl.storage.dataset.chunk_list import ChunkList, listed, number_of
from oocdl.storage.dataset.chunk_store import file_mark, parts_of
from oocdl.storage.dataset.data_array import DataArray, Shape, check_chunks, check_type, one_line
from oocdl.storage.dataset.hdf5_filters import check_chunk, refused
from oocdl.storage.zarr_json import grid, touched


@dataclass(frozen=True)
class Hdf5File:
    """An open file, as it was when it was opened; the library is not made for threads."""

    path: str
    mark: tuple[int, int, int]
    """Inode, size in bytes, time of change in nanoseconds."""
    lock: threading.Lock

    def check(self, label: str) -> None:
        """Raise DatasetError if the file is not what was opened."""
        found = file_mark(self.path)
        if found != self.mark:
            happened = "was changed or replaced" if any(found) else "is gone"
            raise DatasetError(
                f"{label}: {self.path} {happened} since the dataset was opened; nothing was read of it. "
                "Restore it, and start again: a run goes on from its last commit"
            )


@dataclass(frozen=True, eq=False)
class Hdf5Source:
    """Reads an HDF5 dataset under a lock."""

    data: h5py.Dataset
    file: Hdf5File
    label: str
    stored_chunks: Shape
    """For contiguous data all of it."""

    @cached_property
    def known(self) -> ChunkList:
        """The chunks that are stored; the mark of each is its place in the file, in bytes."""
        found, stored = array("q"), self.data.id
        extents = grid(self.data.shape, self.stored_chunks)
        if self.data.chunks is None:
            if stored.get_storage_size():
                found.extend((0, stored.get_storage_size(), stored.get_offset() or 0))
            return listed(extents, found)

        def add(chunk: Any) -> None:
            index = (at // size for at, size in zip(chunk.chunk_offset, self.stored_chunks, strict=True))
            found.extend((number_of(tuple(index), extents), chunk.size, chunk.byte_offset))

        with self.file.lock:
            stored.chunk_iter(add)
        return listed(extents, found)

    @property
    def tells(self) -> str:
        """Chunks are told apart by size and place; the file has the time."""
        return "place"

    @property
    def file_mark(self) -> tuple[int, int, int]:
        """Inode, size and time of the file."""
        return self.file.mark

    def place(self, number: int) -> str:
        """Return the place of a chunk, for messages."""
        return f"chunk {'/'.join(map(str, self.known.index(number)))}"

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        """The stored bytes of a chunk, or parts of them."""
        start, nbytes = int(self.known.marks[place]), int(self.known.sizes[place])
        if start:
            yield from parts_of(self.file.path, start, nbytes, pieces)

    def read(self, region: Region) -> Any:
        """Read a region by the library, once each chunk is known to decode to its size."""
        with self.file.lock:
            self.file.check(self.label)
            self._check_chunks(region)
            found = self.data[as_slices(region)]
            self.file.check(self.label)  # again: it may have been changed while it was read
            return found

    @cached_property
    def _filters(self) -> list[int]:
        return filters_of(self.data)

    @cached_property
    def _unchecked(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each stored chunk whether it is yet to be looked at: the file stays as it is."""
        return np.full(len(self.known.numbers), self.data.chunks is not None)

    def _check_chunks(self, region: Region) -> None:
        """Raise ValueError for a chunk that does not decode to its size. Call it under the lock."""
        if not self._unchecked.any():
            return
        nbytes = prod(self.stored_chunks) * int(self.data.dtype.itemsize)
        for index in touched(region, self.stored_chunks):
            place = self.known.place(number_of(index, self.known.grid))
            if place is None or not self._unchecked[place]:
                continue
            corner = tuple(at * extent for at, extent in zip(index, self.stored_chunks, strict=True))
            skipped, data = self.data.id.read_direct_chunk(corner)
            try:
                check_chunk(self._filters, skipped, data, nbytes)
            except (ValueError, zlib.error) as error:
                raise ValueError(f"{self.place(int(self.known.numbers[place]))}: {error}") from error
            self._unchecked[place] = False


def attributes_of(path: str) -> dict[str, Any]:
    """Return the attributes of a file as plain data."""
    with h5py.File(path, "r") as opened:
        found = {name: np.asarray(value).tolist() for name, value in opened.attrs.items()}
    return {name: _decoded(value) for name, value in found.items()}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_decoded, value))
    return value.decode() if isinstance(value, bytes) else value


def open_arrays(path: str, names: Collection[str] | None) -> list[DataArray]:
    """Open and check the datasets of a file (those of ``names``, or all). Raises DatasetError."""
    mark = file_mark(path)
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        raise DatasetError(f"{path} is not a readable HDF5 file ({one_line(error)})") from error
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item

    opened.visititems(visit)  # follows no links, so nothing outside the file
    if names is not None:
        lost = sorted(set(names) - set(found))
        if lost:
            raise DatasetError(f"{path} has no dataset {lost[0]!r}; it has {sorted(found)}")
        found = {name: found[name] for name in names}
    file = Hdf5File(path, mark, threading.Lock())
    return [_opened(name, data, file) for name, data in sorted(found.items())]


def _opened(name: str, data: h5py.Dataset, file: Hdf5File) -> DataArray:
    """Check a dataset of a file by its metadata, before a chunk is read."""
    label = f"array {name!r} of {file.path}"
    if data.shape is None:
        raise DatasetError(f"{label} is empty; arrays have the sample axis first")
    check_type(label, data.dtype, data.ndim)
    if data.external or data.is_virtual:
        raise DatasetError(f"{label} has its data in other files, which is refused; copy it in")
    shape = tuple(int(extent) for extent in data.shape)
    # Of contiguous data, a row of the last axis is read at once.
    chunks = (1,) * (len(shape) - 1) + (max(shape[-1], 1),)
    stored = tuple(max(extent, 1) for extent in shape)
    if data.chunks is not None:
        chunks = stored = tuple(int(extent) for extent in data.chunks)
        reason = refused(filters_of(data))
        if reason is not None:
            raise DatasetError(f"{label} {reason}: write the array again")
    check_chunks(label, shape, chunks, stored)
    settings = data.id.get_create_plist()
    undefined = settings.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    never = settings.get_fill_time() == h5py.h5d.FILL_TIME_NEVER
    return DataArray(
        name=name,
        where=file.path,
        shape=shape,
        dtype=data.dtype.newbyteorder("="),
        chunks=chunks,
        stored_chunks=stored,
        fill_value=None if undefined or never else data.fillvalue,
        source=Hdf5Source(data, file, label, stored),
    )


def filters_of(data: h5py.Dataset) -> list[int]:
    """The filters of a dataset's chunks by number, in the order in which they were applied."""
    settings = data.id.get_create_plist()
    return [int(settings.get_filter(place)[0]) for place in range(settings.get_nfilters())]
