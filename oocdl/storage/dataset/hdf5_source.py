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
from itertools import product
from math import prod
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from oocdl.errors import DatasetError
from oocdl.storage.dataset.bounded_codecs import most_bytes
from oocdl.storage.dataset.checked_store import file_mark, parts_of
from oocdl.storage.dataset.chunk_list import ChunkList, listed, number_of
from oocdl.storage.dataset.hdf5_filters import check_chunk, refused
from oocdl.storage.dataset.zarr_source import check_chunks, check_type
from oocdl.storage.zarr_json import grid


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


@dataclass(frozen=True)
class Hdf5Array:
    """Reads an HDF5 dataset under a lock."""

    data: h5py.Dataset
    file: Hdf5File
    label: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(int(extent) for extent in self.data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        dtype: np.dtype[Any] = self.data.dtype
        return dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of what is decoded together; for contiguous data one row of the last axis."""
        if self.data.chunks is None:
            return (1,) * (len(self.shape) - 1) + self.shape[-1:]
        return self.stored_chunks

    @property
    def stored_chunks(self) -> tuple[int, ...]:
        """Shape of what is stored together; for contiguous data all of it."""
        return tuple(int(extent) for extent in self.data.chunks or self.shape)

    @property
    def index_bytes(self) -> int:
        """Nothing: there are no shards."""
        return 0

    @property
    def fill_value(self) -> Any:
        """What a chunk that is not stored reads as; None if that is not defined."""
        settings = self.data.id.get_create_plist()
        undefined = settings.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
        return (
            None if undefined or settings.get_fill_time() == h5py.h5d.FILL_TIME_NEVER else self.data.fillvalue
        )

    @cached_property
    def known(self) -> ChunkList:
        """The chunks that are stored; the mark of each is its place in the file, in bytes."""
        found, stored = array("q"), self.data.id
        extents = grid(self.shape, tuple(max(extent, 1) for extent in self.stored_chunks))
        if self.data.chunks is None:
            if stored.get_storage_size():
                found.extend((0, stored.get_storage_size(), stored.get_offset() or 0))
            return listed(extents, found)

        def add(chunk: Any) -> None:
            index = tuple(
                at // extent for at, extent in zip(chunk.chunk_offset, self.stored_chunks, strict=True)
            )
            found.extend((number_of(index, extents), chunk.size, chunk.byte_offset))

        with self.file.lock:
            stored.chunk_iter(add)
        chunks, most = listed(extents, found), most_bytes(self.stored_bytes)
        if len(chunks.sizes) and int(chunks.sizes.max()) > most:
            raise DatasetError(
                f"{self.label}: a chunk has {int(chunks.sizes.max()):,} bytes, one of its shape "
                f"{list(self.stored_chunks)} takes at most {most:,}; write it again"
            )
        return chunks

    @property
    def stored_bytes(self) -> int:
        """What a chunk decodes to."""
        return prod(self.stored_chunks) * int(self.dtype.itemsize)

    @cached_property
    def filters(self) -> list[int]:
        """The filters of its chunks by number, in the order in which they were applied."""
        settings = self.data.id.get_create_plist()
        return [int(settings.get_filter(place)[0]) for place in range(settings.get_nfilters())]

    @cached_property
    def _unchecked(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each stored chunk whether it is yet to be looked at: the file stays as it is."""
        return np.full(len(self.known.numbers), self.data.chunks is not None)

    def _check_chunks(self, where: tuple[slice, ...]) -> None:
        """Raise ValueError for a chunk that does not decode to its size. Call it under the lock."""
        if not self._unchecked.any():
            return
        touched = (
            range(part.start // extent, -(-part.stop // extent))
            for part, extent in zip(where, self.stored_chunks, strict=True)
        )
        for index in product(*touched):
            place = self.known.place(number_of(index, self.known.grid))
            if place is None or not self._unchecked[place]:
                continue
            corner = tuple(at * extent for at, extent in zip(index, self.stored_chunks, strict=True))
            skipped, data = self.data.id.read_direct_chunk(corner)
            try:
                check_chunk(self.filters, skipped, data, self.stored_bytes)
            except (ValueError, zlib.error) as error:
                raise ValueError(f"chunk {'/'.join(map(str, index))}: {error}") from error
            self._unchecked[place] = False

    @property
    def tells(self) -> str:
        """Chunks are told apart by size and place; the file has the time."""
        return "place"

    @property
    def file_mark(self) -> tuple[int, int, int]:
        """Inode, size and time of the file."""
        return self.file.mark

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        """The stored bytes of a chunk, or parts of them."""
        start, nbytes = int(self.known.marks[place]), int(self.known.sizes[place])
        if start:
            yield from parts_of(self.file.path, start, nbytes, pieces)

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        with self.file.lock:
            self.file.check(self.label)
            self._check_chunks(where)
            found = self.data[where]
            self.file.check(self.label)  # again: it may have been changed while it was read
            return found


def open_arrays(path: str, names: Collection[str] | None) -> dict[str, Hdf5Array]:
    """Open and check the datasets of a file (those of ``names``, or all), by path. Raises DatasetError."""
    mark = file_mark(path)
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        reason = " ".join(str(error).split())
        raise DatasetError(f"{path} is not a readable HDF5 file ({reason})") from error
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
    arrays = {
        name: Hdf5Array(data, file, f"dataset {name!r} of {path}") for name, data in sorted(found.items())
    }
    for opened_array in arrays.values():
        _check(opened_array)
    return arrays


def _check(array: Hdf5Array) -> None:
    data, label = array.data, array.label
    if data.shape is None:
        raise DatasetError(f"{label} is empty; arrays have the sample axis first")
    check_type(label, data.dtype, data.ndim)
    if data.external or data.is_virtual:
        raise DatasetError(f"{label} has its data in other files, which is refused; copy it in")
    if data.chunks is not None:
        check_chunks(label, array.shape, array.stored_chunks, array.stored_chunks)
        reason = refused(array.filters)
        if reason is not None:
            raise DatasetError(f"{label} {reason}: write the array again")
