"""The chunks of a Zarr array in its store: lists them, and reads one between two looks at what it is.

What tells a chunk from another depends on the store: size and time of its file, checksum in a zip file or
in memory; of other stores only the presence of a chunk is known.
"""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.checksums import record_of
from oocdl.storage.dataset.chunk_list import ChunkKeys, ChunkList, index_of, listed
from oocdl.storage.files import NO_FILE, regular

Mark = tuple[int, int]
"""Size of a stored chunk in bytes, and its time or checksum; zeros where the store does not tell."""
Part = tuple[int, int] | int | None
"""What is read of a chunk: from one byte to another, so many at its end, or all."""
PIECE_BYTES = 64 << 10
"""How much is read of a file at a time to compare its content."""


class Chunks:
    """The chunks of one array in a store of which no more is known than which chunks it has."""

    tells: ClassVar[str] = "none"
    """What tells chunks apart: "time", "checksum", or "none"."""

    def __init__(self, store: Store, path: str, keys: ChunkKeys) -> None:
        self.store, self.keys = store, keys
        self.prefix = f"{path}/" if path else ""

    def entries(self) -> array[int]:
        """Number, size and mark of each chunk that is stored, one after the other."""
        found = array("q")
        for key in sync(self._listed()):
            number = self.keys.number(key[len(self.prefix) :])
            if number is not None:
                found.extend((number, *(self.mark(key[len(self.prefix) :]) or (0, 0))))
        return found

    async def _listed(self) -> list[str]:
        return [key async for key in self.store.list_prefix(self.prefix)]

    def place(self, chunk: str) -> str:
        """Return the place of a chunk, for messages."""
        return self.prefix + chunk

    def mark(self, chunk: str) -> Mark | None:
        """Return the mark that tells the chunk from others; None if the chunk is absent."""
        return (0, 0) if sync(self.store.exists(self.prefix + chunk)) else None

    def read(self, chunk: str, part: Part = None) -> tuple[Mark | None, bytes, Mark | None]:
        """Some bytes of a chunk between its marks before and after; None: it is not there."""
        wanted: ByteRequest | None = None
        if part is not None:
            wanted = SuffixByteRequest(part) if isinstance(part, int) else RangeByteRequest(*part)
        found = sync(self.store.get(self.prefix + chunk, default_buffer_prototype(), wanted))
        mark = None if found is None else (0, 0)
        return mark, b"" if found is None else found.to_bytes(), mark


class Memory(Chunks):
    """Chunks in memory, by checksum."""

    tells = "checksum"

    def mark(self, chunk: str) -> Mark | None:
        return self.read(chunk)[0]

    def read(self, chunk: str, part: Part = None) -> tuple[Mark | None, bytes, Mark | None]:
        there, content, _ = super().read(chunk)
        record = record_of(content)
        mark = None if there is None else (record.nbytes, record.crc)
        return mark, content[slice(*_range(part, len(content)))], mark


class Files(Chunks):
    """Chunks that are files of a local store, by size and time of change."""

    tells = "time"

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
        try:
            known = os.stat(self.place(chunk))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _mark(known) if stat.S_ISREG(known.st_mode) else None

    def read(self, chunk: str, part: Part = None) -> tuple[Mark | None, bytes, Mark | None]:
        try:
            with open(self.place(chunk), "rb", opener=regular) as file:
                before = _mark(os.fstat(file.fileno()))
                start, stop = _range(part, before[0])
                file.seek(start)
                content = file.read(stop - start)
                return before, content, _mark(os.fstat(file.fileno()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
                return None, b"", None  # or what stands there is no file
            raise


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


class Zipped(Chunks):
    """Chunks in a zip file, by the checksums that it has of them; the file itself must stay as it is."""

    tells = "checksum"

    def __init__(self, store: ZipStore, path: str, keys: ChunkKeys) -> None:
        super().__init__(store, path, keys)
        self.path, self.file_mark = store.path, file_mark(store.path)
        self.file = zipfile.ZipFile(self.path)
        self.members = {info.filename: info for info in self.file.infolist()}

    def entries(self) -> array[int]:
        found = array("q")
        for name in self.members:
            number = self.keys.number(name[len(self.prefix) :]) if name.startswith(self.prefix) else None
            if number is not None:
                found.extend((number, *(self.mark(name[len(self.prefix) :]) or (0, 0))))
        return found

    def place(self, chunk: str) -> str:
        return f"{self.path}: {self.prefix}{chunk}"

    def mark(self, chunk: str) -> Mark | None:
        if file_mark(self.path) != self.file_mark:
            return -1, -1  # of no chunk
        info = self.members.get(self.prefix + chunk)
        return None if info is None else (info.file_size, info.CRC)

    def read(self, chunk: str, part: Part = None) -> tuple[Mark | None, bytes, Mark | None]:
        before = self.mark(chunk)
        if before is None or before[0] < 0:
            return before, b"", before
        start, stop = _range(part, before[0])
        with self.file.open(self.prefix + chunk) as member:
            member.seek(start)
            content = member.read(stop - start)
        return before, content, self.mark(chunk)


def _range(part: Part, nbytes: int) -> tuple[int, int]:
    if isinstance(part, int):
        return max(0, nbytes - part), nbytes
    return (0, nbytes) if part is None else (part[0], min(part[1], nbytes))


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
        return Zipped(store, path, keys)
    return (Memory if isinstance(store, MemoryStore) else Chunks)(store, path, keys)


def list_chunks(label: str, chunks: Chunks) -> ChunkList:
    """List the chunks that are stored. Raises DatasetError if what stands in the place of one is no file."""
    try:
        return listed(chunks.keys.grid, chunks.entries())
    except OSError as error:
        raise DatasetError(
            f"{label}: {error.filename or chunks.prefix} cannot be read "
            f"({error.strerror or error}); it would read as the fill value: restore or fetch it "
            "(git annex get, datalad get)"
        ) from error
