"""Reads the chunks of a Zarr array, each of which has to be the one that was listed at opening.

Zarr gives the fill value for a chunk that is gone, and new bytes for one that was replaced. Here both are
errors. What tells a chunk from another depends on the store: size and time of its file, checksum in a zip
file or in memory; of other stores only the presence of a chunk is known.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, WrapperStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.checksums import crc32c
from oocdl.storage.dataset.chunk_list import ChunkKeys, ChunkList, index_of, listed
from oocdl.storage.files import NO_FILE, regular

Mark = tuple[int, int]
"""Size of a stored chunk in bytes, and its time or checksum; zeros where the store does not tell."""
Found = tuple[Mark | None, Buffer | None, Mark | None]
"""A chunk, and its mark before and after it was read; None if it was not there."""
AT_ONCE_BYTES = 256 << 10
"""Files of at least this size are read where they are asked for: one of smaller ones is not worth a thread,
but many at a time are."""


PIECE_BYTES = 64 << 10
"""How much is read of a file at a time to compare its content."""


class Chunks:
    """The chunks of one array in a store of which no more is known than which chunks it has."""

    marks: ClassVar[str] = "none"
    """What tells chunks apart: "time", "checksum", or "none"."""

    def __init__(self, store: Store, path: str, keys: ChunkKeys) -> None:
        self.store, self.keys = store, keys
        self.prefix = f"{path}/" if path else ""

    def entries(self) -> array[int]:
        """Number, size and mark of each chunk that is stored, one after the other."""
        return sync(self._entries())

    async def _entries(self) -> array[int]:
        found = array("q")
        async for key in self.store.list_prefix(self.prefix):
            chunk = key[len(self.prefix) :]
            number = self.keys.number(chunk)
            if number is not None:
                found.extend((number, *await self._listed_mark(chunk)))
        return found

    async def _listed_mark(self, chunk: str) -> Mark:
        return 0, 0

    def place(self, chunk: str) -> str:
        """Where a chunk is, for messages."""
        return self.prefix + chunk

    async def get(self, chunk: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Found:
        """Read a chunk or a part of it."""
        found = await self.store.get(self.prefix + chunk, prototype, byte_range)
        mark = None if found is None else (0, 0)
        return mark, found, mark


class _Memory(Chunks):
    """Chunks in memory, by checksum."""

    marks = "checksum"

    async def _listed_mark(self, chunk: str) -> Mark:
        mark, _, _ = await self.get(chunk, default_buffer_prototype(), None)
        return mark or (0, 0)

    async def get(self, chunk: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Found:
        found = await self.store.get(self.prefix + chunk, prototype)
        if found is None:
            return None, None, None
        content = found.as_numpy_array().view(np.uint8)
        mark = content.nbytes, crc32c(np.ascontiguousarray(content))
        return mark, found[_range(byte_range, content.nbytes)], mark


class Files(Chunks):
    """Chunks that are files of a local store, by size and time of change."""

    marks = "time"

    def __init__(self, store: LocalStore, path: str, keys: ChunkKeys) -> None:
        super().__init__(store, path, keys)
        self.folder = os.path.join(store.root, path)

    def entries(self) -> array[int]:
        found = array("q")
        if self.keys.separator == "/":
            self._walk(os.path.join(self.folder, self.keys.lead), 0, 0, found)
            return found
        with os.scandir(self.folder) as entries:
            for entry in entries:
                number = self.keys.number(entry.name)
                if number is not None:
                    found.extend((number, *_entry_mark(entry)))
        return found

    def _walk(self, folder: str, axis: int, before: int, found: array[int]) -> None:
        extent, last = self.keys.grid[axis], axis == len(self.keys.grid) - 1
        if not os.path.lexists(folder):
            return  # nothing is stored there
        with os.scandir(folder) as entries:
            for entry in entries:
                at = index_of(entry.name, extent)
                if at is None:
                    continue
                number = before * extent + at
                if last:
                    found.extend((number, *_entry_mark(entry)))
                else:
                    self._walk(entry.path, axis + 1, number, found)

    def place(self, chunk: str) -> str:
        return f"{self.folder}/{chunk}"

    def mark(self, chunk: str) -> Mark | None:
        """Size and time of a chunk's file; None if it is not there."""
        try:
            known = os.stat(self.place(chunk))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _mark(known) if stat.S_ISREG(known.st_mode) else None

    async def get(self, chunk: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Found:
        mark = self.mark(chunk)
        if mark is None:
            return None, None, None
        wanted = _range(byte_range, mark[0])
        start, nbytes = wanted.start, wanted.stop - wanted.start
        if nbytes >= AT_ONCE_BYTES:
            before, content, after = self.read(chunk, start, nbytes)
        else:
            before, content, after = await asyncio.to_thread(self.read, chunk, start, nbytes)
        return before, None if before is None else prototype.buffer.from_bytes(content), after

    def read(self, chunk: str, start: int, nbytes: int) -> tuple[Mark | None, bytes, Mark | None]:
        """Some bytes of a chunk's file between its marks before and after; None: it is not there."""
        try:
            with open(self.place(chunk), "rb", opener=regular) as file:
                before = _mark(os.fstat(file.fileno()))
                file.seek(start)
                content = file.read(nbytes)
                after = _mark(os.fstat(file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return None, b"", None
        return before, content, after


def _mark(known: os.stat_result) -> Mark:
    return known.st_size, known.st_mtime_ns


def _entry_mark(entry: os.DirEntry[str]) -> Mark:
    """Raises OSError for what is no file: a chunk that is there must not read as one that is not."""
    known = entry.stat()
    if not stat.S_ISREG(known.st_mode):
        raise OSError(errno.EINVAL, NO_FILE, entry.path)
    return _mark(known)


class RegularStore(LocalStore):
    """A local folder whose metadata are regular files: of a FIFO, reading would wait for ever."""

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return the bytes of a key; None if it is not there. Raises OSError if it is no file."""
        place = self.root / key
        if os.path.lexists(place) and not place.is_file():
            raise OSError(errno.EINVAL, NO_FILE, str(place))
        return await super().get(key, prototype, byte_range)


class _Zipped(Chunks):
    """Chunks in a zip file, by the checksums that it has of them; the file itself must stay as it is."""

    marks = "checksum"

    def __init__(self, store: ZipStore, path: str, keys: ChunkKeys) -> None:
        super().__init__(store, path, keys)
        self.path, self.mark = store.path, file_mark(store.path)
        self.deflated: set[int] = set()
        self.known: ChunkList | None = None

    def entries(self) -> array[int]:
        found = array("q")
        with zipfile.ZipFile(self.path) as file:
            for info in file.infolist():
                if not info.filename.startswith(self.prefix):
                    continue
                number = self.keys.number(info.filename[len(self.prefix) :])
                if number is not None:
                    found.extend((number, info.file_size, info.CRC))
                    if info.compress_type != zipfile.ZIP_STORED:
                        self.deflated.add(number)
        self.known = listed(self.keys.grid, found)
        return found

    def place(self, chunk: str) -> str:
        return f"{self.path}: {self.prefix}{chunk}"

    async def get(self, chunk: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Found:
        number = self.keys.number(chunk)
        before = self._current(number)
        if before is None or before[0] < 0:
            return before, None, before
        if number in self.deflated:
            content = await asyncio.to_thread(self._inflated, chunk)
            found: Buffer | None = prototype.buffer.from_bytes(content[_range(byte_range, len(content))])
        else:
            found = await self.store.get(self.prefix + chunk, prototype, byte_range)
        return before, found, self._current(number)

    def _current(self, number: int | None) -> Mark | None:
        if file_mark(self.path) != self.mark:
            return -1, -1  # of no chunk
        return None if number is None or self.known is None else self.known.find(number)

    def _inflated(self, chunk: str) -> bytes:
        # The store's own reader would inflate all that is there, whatever size the file states.
        with zipfile.ZipFile(self.path) as file:
            info = file.getinfo(self.prefix + chunk)
            with file.open(info) as member:
                return member.read(info.file_size)


def _range(wanted: ByteRequest | None, nbytes: int) -> slice:
    match wanted:
        case RangeByteRequest():
            return slice(wanted.start, min(wanted.end, nbytes))
        case OffsetByteRequest():
            return slice(wanted.offset, nbytes)
        case SuffixByteRequest():
            return slice(max(0, nbytes - wanted.suffix), nbytes)
    return slice(0, nbytes)


def file_mark(path: str | Path) -> tuple[int, int, int]:
    """Inode, size in bytes and time of change in nanoseconds of a file; zeros where there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def parts_of(path: str, start: int, nbytes: int, pieces: int) -> Iterator[bytes]:
    """Read bytes of a file from ``start`` on: all, or so many pieces from the first to the last.

    Raises DatasetError if the file cannot be read.
    """
    step = PIECE_BYTES
    offsets: Sequence[int] = range(0, nbytes, step)
    if len(offsets) > pieces > 1:
        offsets = [(nbytes - step) * number // (pieces - 1) for number in range(pieces)]
    try:
        with open(path, "rb", opener=regular) as file:
            for offset in offsets:
                file.seek(start + offset)
                yield file.read(min(step, nbytes - offset))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error}); restore the dataset") from error


def chunks_of(store: Store, path: str, keys: ChunkKeys) -> Chunks:
    """The chunks of the array at ``path`` of a store."""
    if isinstance(store, LocalStore):
        return Files(store, path, keys)
    if isinstance(store, ZipStore):
        return _Zipped(store, path, keys)
    return (_Memory if isinstance(store, MemoryStore) else Chunks)(store, path, keys)


class CheckedStore(WrapperStore[Store]):
    """A store for reading one array, whose chunks have to be those that ``known`` lists."""

    def __init__(self, label: str, chunks: Chunks, known: ChunkList) -> None:
        super().__init__(chunks.store)
        self.label, self.chunks, self.known = label, chunks, known

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a chunk, or of a part of it; None if it was not stored when the list was made.

        Raises DatasetError as ``check`` does.
        """
        chunk = key[len(self.chunks.prefix) :]
        before, found, after = await self.chunks.get(chunk, prototype, byte_range)
        self.check(chunk, before, after)
        return found

    def check(self, chunk: str, before: Mark | None, after: Mark | None) -> None:
        """Raise DatasetError if a chunk is gone, was changed, or is new, by its marks around a read."""
        number = self.chunks.keys.number(chunk)
        assert number is not None, chunk
        wanted = self.known.find(number)
        if before == wanted == after:
            return
        happened = "was changed" if before and wanted else "is gone" if before is None else "is new"
        raise DatasetError(
            f"{self.label}: chunk {chunk} {happened} since the dataset was opened "
            f"({self.chunks.place(chunk)}); nothing was computed from it. Restore it, and start again: "
            "a run goes on from its last commit"
        )
