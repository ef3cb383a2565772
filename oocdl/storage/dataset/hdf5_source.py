"""Opens arrays of an HDF5 file; refuses those whose reading would not be safe and complete.

As long as the size and time of a file are what they were, so are all chunks in it. The library trusts a
chunk: one that decodes to more than it should fills memory, and one that decodes to less is read past its
end. So each has to decode to just its size here, once, before the library decodes it.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from posixpath import dirname, join
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import Region, as_slices
from oocdl.storage.dataset.chunk_store import ChunkList, file_mark, listed, number_of, parts_of
from oocdl.storage.dataset.data_array import (
    DataArray,
    NoNumbersError,
    Opened,
    Shape,
    Source,
    check_chunks,
    check_type,
    one_line,
    open_each,
)
from oocdl.storage.dataset.decoding import inflate
from oocdl.storage.zarr_json import grid, touched

DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000  # filters by their registered numbers
FILTERS = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", LZF: "lzf"}
CHECKSUM_BYTES = 4
MOST_LINKS = 16  # that lead to an array one after the other; the library follows as many


@dataclass(frozen=True)
class Hdf5File:
    """An open file, as it was when it was opened; the library is not made for threads."""

    path: str
    mark: tuple[int, int, int]  # as ``file_mark`` has it
    lock: threading.Lock

    def check(self, label: str) -> None:
        found = file_mark(self.path)
        if found != self.mark:
            happened = "was changed or replaced" if any(found) else "is gone"
            raise DatasetError(
                f"{label}: {self.path} {happened} since the dataset was opened; nothing was read of it. "
                "Restore it, and start again: a run goes on from its last commit"
            )


@dataclass(frozen=True, eq=False)
class Hdf5Source(Source):
    """Reads an HDF5 dataset under a lock."""

    data: h5py.Dataset
    file: Hdf5File
    label: str
    stored_chunks: Shape  # for contiguous data all of it

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
        return "place"  # the file has the time

    @property
    def file_mark(self) -> tuple[int, int, int]:
        return self.file.mark

    def place(self, number: int) -> str:
        return f"chunk {'/'.join(map(str, self.known.index(number)))}"

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
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
    def _unchecked(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each stored chunk whether it is yet to be looked at: the file stays as it is."""
        return np.full(len(self.known.numbers), self.data.chunks is not None)

    def _check_chunks(self, region: Region) -> None:
        """Raise ValueError for a chunk that does not decode to its size. Call it under the lock."""
        if not self._unchecked.any():
            return
        nbytes, filters = prod(self.stored_chunks) * int(self.data.dtype.itemsize), filters_of(self.data)
        for index in touched(region, self.stored_chunks):
            place = self.known.place(number_of(index, self.known.grid))
            if place is None or not self._unchecked[place]:
                continue
            corner = tuple(at * extent for at, extent in zip(index, self.stored_chunks, strict=True))
            skipped, data = self.data.id.read_direct_chunk(corner)
            try:
                check_chunk(filters, skipped, data, nbytes)
            except (ValueError, zlib.error) as error:
                raise ValueError(f"{self.place(int(self.known.numbers[place]))}: {error}") from error
            self._unchecked[place] = False


def attributes_of(path: str) -> dict[str, Any]:
    """Return the attributes of a file that are numbers or texts, as plain data."""
    with h5py.File(path, "r") as opened:
        found = {name: np.asarray(value) for name, value in opened.attrs.items()}
    return {name: _decoded(value.tolist()) for name, value in found.items() if _is_plain(value)}


def _is_plain(value: np.ndarray[Any, Any]) -> bool:
    kind = value.dtype.kind
    return kind in "biufSU" or (kind == "O" and all(isinstance(one, str | bytes) for one in value.flat))


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_decoded, value))
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def open_arrays(path: str, names: Collection[str] | None) -> Opened:
    """Open and check the datasets of a file (those of ``names``, or all). Raises DatasetError."""
    mark = file_mark(path)
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        raise DatasetError(f"{path} is not a readable HDF5 file ({one_line(error)})") from error
    found, links = _datasets(opened)
    if names is not None:
        lost = sorted(set(names) - set(found))
        if lost and lost[0] in links:
            raise NoNumbersError(f"array {lost[0]!r} of {path}", links[lost[0]])
        if lost:
            raise DatasetError(f"{path} has no dataset {lost[0]!r}; it has {sorted(found)}")
        found = {name: found[name] for name in names}
    file, asked = Hdf5File(path, mark, threading.Lock()), names is not None
    arrays, left_out = open_each(sorted(found), lambda name: _opened(name, found[name], file), asked)
    return arrays, links | left_out


def _datasets(opened: h5py.File) -> tuple[dict[str, h5py.Dataset], dict[str, str]]:
    """Return the datasets of a file by all names, and name -> what is wrong with it, of links to none.

    The library follows no link, so nothing is opened outside the file.
    """
    found, links = dict[str, h5py.Dataset](), dict[str, str]()

    def visit(name: str, link: object) -> None:
        if not isinstance(link, h5py.HardLink):
            links[name] = join("/", dirname(name), link.path)[1:] if isinstance(link, h5py.SoftLink) else ""
        elif isinstance(item := opened[name], h5py.Dataset):
            found[name] = item

    opened.visititems_links(visit)
    for name, place in links.items():
        for _ in range(MOST_LINKS):
            place = links.get(place, place)
        if place in found:
            found[name] = found[place]
    return found, {name: "is a link to no array of the file; copy it in" for name in links.keys() - found}


def _opened(name: str, data: h5py.Dataset, file: Hdf5File) -> DataArray:
    """Check a dataset of a file by its metadata, before a chunk is read."""
    label = f"array {name!r} of {file.path}"
    if data.shape is None:
        raise NoNumbersError(label, "is empty; arrays have the sample axis first")
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
        name=name, where=file.path, shape=shape, dtype=data.dtype.newbyteorder("="),
        chunks=chunks, stored_chunks=stored, fill_value=None if undefined or never else data.fillvalue,
        source=Hdf5Source(data, file, label, stored),
    )  # fmt: skip


def filters_of(data: h5py.Dataset) -> list[int]:
    """The filters of a dataset's chunks by number, in the order in which they were applied."""
    settings = data.id.get_create_plist()
    return [int(settings.get_filter(place)[0]) for place in range(settings.get_nfilters())]


def refused(filters: Sequence[int]) -> str | None:
    """Why a row of filters is not read, as the end of a sentence; None if it is."""
    unknown = [code for code in filters if code not in FILTERS]
    if unknown:
        return f"uses HDF5 filter {unknown[0]}; allowed are {', '.join(FILTERS.values())}"
    compressors = [place for place, code in enumerate(filters) if code in (DEFLATE, LZF)]
    if len(compressors) > 1:
        return "compresses twice"
    if compressors and SHUFFLE in filters[compressors[0] :]:
        return "shuffles what is compressed"
    return None


def check_chunk(filters: Sequence[int], skipped: int, data: bytes, chunk_bytes: int) -> None:
    """Raise ValueError unless ``data`` decode to ``chunk_bytes``; ``skipped`` has bits of unused filters."""
    most, left = chunk_bytes + CHECKSUM_BYTES * len(filters), data
    for place, code in reversed(list(enumerate(filters))):
        if skipped >> place & 1:
            continue
        if code == FLETCHER32:
            left = left[:-CHECKSUM_BYTES]
        elif code == DEFLATE:
            left = inflate("zlib", left, most)
        elif code == LZF:
            left = bytes(lzf_bytes(left, most))
    if len(left) != chunk_bytes:
        raise ValueError(f"it decodes to {len(left):,} bytes, not the {chunk_bytes:,} that were declared")


def lzf_bytes(data: bytes, most: int) -> int:
    """Return how many bytes LZF data decode to. Raises ValueError for more than ``most``.

    A byte below 32 begins a run of literals, another one a reference to what came before, whose length has
    three bits, or those and a byte.

    >>> lzf_bytes(bytes([1, 7, 8, 0x40, 1, 0xE0, 20, 0]), 64)
    35
    """
    at = total = 0
    while at < len(data):
        control = data[at]
        if control < 32:
            total += control + 1
            at += control + 2
        elif control < 224:
            total += (control >> 5) + 2
            at += 2
        else:
            total += (data[at + 1] if at + 1 < len(data) else 0) + 9
            at += 3
        if total > most:
            raise ValueError(f"lzf would decode to more than the {most:,} bytes of a chunk")
    if at != len(data):
        raise ValueError("lzf data ends too early")
    return total
