"""Reads the chunks of a Zarr array, each of which has to be the one that was listed at opening.

Zarr gives the fill value for a chunk that is gone, and new bytes for one that was replaced. Here both are
errors. What tells a chunk from another depends on the store: size and time of its file, checksum in a zip
file or in memory; of other stores only the presence of a chunk is known.
"""

from __future__ import annotations

import asyncio
import os
import stat
import zipfile
from array import array
from pathlib import Path
from typing import Protocol

import google_crc32c
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, WrapperStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.dataset.chunk_list import ChunkKeys, ChunkList, index_of, listed

Mark = tuple[int, int]
"""Size of a stored chunk in bytes, and its time or checksum."""


class Chunks(Protocol):
    """The chunks of one array in a kind of store."""

    marks: str
    """What marks are: "time", "checksum", or "none"."""

    def entries(self) -> array[int]:
        """Number, size and mark of all that are stored."""
        ...

    def place(self, number: int) -> str:
        """Where a chunk is, for messages."""
        ...

    async def mark(self, number: int) -> Mark | None:
        """Size and mark of a chunk at the moment; None if it is not stored."""
        ...

    def content(self, number: int) -> bytes | None:
        """A chunk that the store would not read within bounds; None: it does."""
        ...


class _Files:
    """Chunks that are files: of a local store."""

    marks = "time"

    def __init__(self, root: Path, path: str, keys: ChunkKeys) -> None:
        self.folder, self.keys = os.path.join(root, path), keys

    def entries(self) -> array[int]:
        found = array("q")
        if self.keys.separator == "/":
            self._walk(os.path.join(self.folder, self.keys.lead), 0, 0, found)
            return found
        with os.scandir(self.folder) as entries:
            for entry in entries:
                number = self.keys.number(entry.name)
                if number is not None:
                    _add(found, number, entry)
        return found

    def _walk(self, folder: str, axis: int, before: int, found: array[int]) -> None:
        extent, last = self.keys.grid[axis], axis == len(self.keys.grid) - 1
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    at = index_of(entry.name, extent)
                    if at is None:
                        continue
                    number = before * extent + at
                    if last:
                        _add(found, number, entry)
                    else:
                        self._walk(entry.path, axis + 1, number, found)
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing is stored there

    def place(self, number: int) -> str:
        return os.path.join(self.folder, self.keys.key(number))

    async def mark(self, number: int) -> Mark | None:
        try:
            found = os.stat(self.place(number))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size, found.st_mtime_ns

    def content(self, number: int) -> bytes | None:
        return None


def _add(found: array[int], number: int, entry: os.DirEntry[str]) -> None:
    known = entry.stat()
    if stat.S_ISREG(known.st_mode):
        found.extend((number, known.st_size, known.st_mtime_ns))


class _Zipped:
    """Chunks in a zip file, which has checksums of them; the file itself must stay as it is."""

    marks = "checksum"

    def __init__(self, path: Path, inside: str, keys: ChunkKeys) -> None:
        self.path, self.keys = path, keys
        self.prefix = f"{inside}/" if inside else ""
        self.file = file_mark(path)
        self.known: ChunkList | None = None
        self.deflated: set[int] = set()

    def entries(self) -> array[int]:
        found = array("q")
        with zipfile.ZipFile(self.path) as file:
            for info in file.infolist():
                if info.filename.startswith(self.prefix):
                    number = self.keys.number(info.filename[len(self.prefix) :])
                    if number is not None:
                        found.extend((number, info.file_size, info.CRC))
                        if info.compress_type != zipfile.ZIP_STORED:
                            self.deflated.add(number)
        self.known = listed(self.keys.grid, found)
        return found

    def place(self, number: int) -> str:
        return f"{self.path}: {self.prefix}{self.keys.key(number)}"

    async def mark(self, number: int) -> Mark | None:
        assert self.known is not None
        if file_mark(self.path) != self.file:
            return -1, -1  # of no chunk
        return self.known.find(number)

    def content(self, number: int) -> bytes | None:
        if number not in self.deflated:
            return None
        with zipfile.ZipFile(self.path) as file:
            info = file.getinfo(self.prefix + self.keys.key(number))
            with file.open(info) as member:
                return member.read(info.file_size)  # inflates no more; all of it, so that its CRC is checked


class _Memory:
    """Chunks in memory, by checksum."""

    marks = "checksum"

    def __init__(self, store: Store, path: str, keys: ChunkKeys) -> None:
        self.store, self.keys = store, keys
        self.prefix = f"{path}/" if path else ""

    def entries(self) -> array[int]:
        return sync(self._entries())

    async def _entries(self) -> array[int]:
        found = array("q")
        async for key in self.store.list_prefix(self.prefix):
            number = self.keys.number(key[len(self.prefix) :])
            if number is not None:
                found.extend((number, *(await self.mark(number) or (0, 0))))
        return found

    def place(self, number: int) -> str:
        return f"{self.prefix}{self.keys.key(number)}"

    async def mark(self, number: int) -> Mark | None:
        found = await self.store.get(self.place(number), default_buffer_prototype())
        if found is None:
            return None
        content = found.to_bytes()
        return len(content), int(google_crc32c.value(content))

    def content(self, number: int) -> bytes | None:
        return None


class _Named(_Memory):
    """Chunks of a store that tells no more than their names."""

    marks = "none"

    async def mark(self, number: int) -> Mark | None:
        return (0, 0) if await self.store.exists(self.place(number)) else None

    async def _entries(self) -> array[int]:
        found = array("q")
        async for key in self.store.list_prefix(self.prefix):
            number = self.keys.number(key[len(self.prefix) :])
            if number is not None:
                found.extend((number, 0, 0))
        return found


def _range(wanted: ByteRequest | None, nbytes: int) -> slice:
    match wanted:
        case RangeByteRequest():
            return slice(wanted.start, wanted.end)
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


def chunks_of(store: Store, path: str, keys: ChunkKeys) -> Chunks:
    """The chunks of the array at ``path`` of a store."""
    if isinstance(store, LocalStore):
        return _Files(store.root, path, keys)
    if isinstance(store, ZipStore):
        return _Zipped(store.path, path, keys)
    kind = _Memory if isinstance(store, MemoryStore) else _Named
    return kind(store, path, keys)


class CheckedStore(WrapperStore[Store]):
    """A store for reading one array, whose chunks have to be those that ``known`` lists."""

    def __init__(
        self, store: Store, path: str, label: str, chunks: Chunks, known: ChunkList, keys: ChunkKeys
    ):
        super().__init__(store)
        self.prefix = f"{path}/" if path else ""
        self.label, self.chunks, self.known, self.keys = label, chunks, known, keys

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a chunk, or of a part of it; None if it was not stored when the list was made.

        Raises DatasetError if the chunk is gone, was changed, or is new.
        """
        number = self.keys.number(key[len(self.prefix) :])
        assert number is not None, key
        wanted = self.known.find(number)
        self._compare(number, wanted, await self.chunks.mark(number))
        if wanted is None:
            return None
        content = await asyncio.to_thread(self.chunks.content, number)
        if content is not None:
            found: Buffer | None = prototype.buffer.from_bytes(content[_range(byte_range, len(content))])
        else:
            found = await self._store.get(key, prototype, byte_range)
        # Again: it may have been changed while it was read.
        self._compare(number, wanted, None if found is None else await self.chunks.mark(number))
        return found

    def _compare(self, number: int, wanted: Mark | None, found: Mark | None) -> None:
        if found == wanted:
            return
        happened = "is gone" if found is None else "was changed" if wanted is not None else "is new"
        raise DatasetError(
            f"{self.label}: chunk {self.keys.key(number)} {happened} since the dataset was opened "
            f"({self.chunks.place(number)}); nothing was read of it. Restore it, and start again: "
            "a run goes on from its last commit"
        )
