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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.checksums import record_of
from oocdl.storage.dataset.chunk_list import ChunkKeys, ChunkList, listed
from oocdl.storage.files import NO_FILE, regular

Mark = tuple[int, int]
"""Size of a stored chunk in bytes, and its time or checksum; zeros where the store does not tell."""
Reading = tuple[Mark | None, bytes, Mark | None]
"""Bytes of a chunk between its marks before and after; None: it is not there."""
WHOLE = slice(None)
PIECE_BYTES = 64 << 10
"""How much is read of a file at a time to compare its content."""


class Chunks:
    """The chunks of one array in a store of which no more is known than which chunks it has."""

    tells: ClassVar[str] = "none"
    """What tells chunks apart: "time", "checksum", or "none"."""

    def __init__(self, store: Store, path: str, keys: ChunkKeys) -> None:
        self.store, self.keys = store, keys
        self.prefix = f"{path}/" if path else ""

    def names(self) -> Iterable[str]:
        """Yield the names of chunks, and of whatever else stands among them."""

        async def listed() -> list[str]:
            return [key.removeprefix(self.prefix) async for key in self.store.list_prefix(self.prefix)]

        return sync(listed())

    def place(self, chunk: str) -> str:
        """Return the place of a chunk, for messages."""
        return self.prefix + chunk

    def mark(self, chunk: str) -> Mark | None:
        """Return the mark that tells the chunk from others; None if the chunk is absent."""
        return (0, 0) if sync(self.store.exists(self.prefix + chunk)) else None

    def read(self, chunk: str, part: slice = WHOLE) -> Reading:
        """Read a part of a chunk, by its first and last byte, or by how many bytes are left of its end."""
        content = self.content(chunk, part)
        mark = None if content is None else (0, 0)
        return mark, content or b"", mark

    def content(self, chunk: str, part: slice) -> bytes | None:
        """Return what the store holds of a part of a chunk; None if it has no such chunk."""
        wanted: ByteRequest | None = None
        if part != WHOLE:
            is_end = part.stop is None
            wanted = SuffixByteRequest(-part.start) if is_end else RangeByteRequest(part.start, part.stop)
        found = sync(self.store.get(self.prefix + chunk, default_buffer_prototype(), wanted))
        return None if found is None else found.to_bytes()


class Memory(Chunks):
    """Chunks in memory, by checksum."""

    tells = "checksum"

    def mark(self, chunk: str) -> Mark | None:
        return self.read(chunk)[0]

    def read(self, chunk: str, part: slice = WHOLE) -> Reading:
        content = self.content(chunk, WHOLE)
        if content is None:
            return None, b"", None
        record = record_of(content)
        return (record.nbytes, record.crc), content[part], (record.nbytes, record.crc)


class Files(Chunks):
    """Chunks that are files of a local store, by size and time of change."""

    tells = "time"

    def __init__(self, store: LocalStore, path: str, keys: ChunkKeys) -> None:
        super().__init__(store, path, keys)
        self.folder = os.path.join(store.root, path)
        self.depth = keys.key_at((0,) * len(keys.grid)).count("/")

    def names(self, below: str = "") -> Iterator[str]:
        with os.scandir(f"{self.folder}/{below}") as entries:
            for entry in entries:
                name = below + entry.name
                is_part = entry.name.isdigit() or entry.name == "c"
                if is_part and name.count("/") < self.depth:
                    yield from self.names(f"{name}/")  # raises OSError for what is no folder
                else:
                    yield name

    def place(self, chunk: str) -> str:
        return f"{self.folder}/{chunk}"

    def mark(self, chunk: str) -> Mark | None:
        try:
            known = os.stat(self.place(chunk))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _mark(known) if stat.S_ISREG(known.st_mode) else None

    def read(self, chunk: str, part: slice = WHOLE) -> Reading:
        try:
            with open(self.place(chunk), "rb", opener=regular) as file:
                before = _mark(os.fstat(file.fileno()))
                start, stop, _ = part.indices(before[0])
                file.seek(start)
                content = file.read(max(stop - start, 0))
                return before, content, _mark(os.fstat(file.fileno()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
                return None, b"", None  # or what stands there is no file
            raise


def _mark(known: os.stat_result) -> Mark:
    return known.st_size, known.st_mtime_ns


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
        with zipfile.ZipFile(self.path) as file:
            self.members = {
                info.filename.removeprefix(self.prefix): (info.file_size, info.CRC)
                for info in file.infolist()
                if info.filename.startswith(self.prefix)
            }

    def names(self) -> Iterable[str]:
        return self.members

    def place(self, chunk: str) -> str:
        return f"{self.path}: {self.prefix}{chunk}"

    def mark(self, chunk: str) -> Mark | None:
        if file_mark(self.path) != self.file_mark:
            return -1, -1  # of no chunk
        return self.members.get(chunk)

    def read(self, chunk: str, part: slice = WHOLE) -> Reading:
        before = self.mark(chunk)
        if before is None or before[0] < 0:
            return before, b"", before
        return before, self.content(chunk, part) or b"", self.mark(chunk)


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
    found = array("q")
    try:
        for name in chunks.names():
            number = chunks.keys.number(name)
            if number is None:
                continue
            mark = chunks.mark(name)
            if mark is None:  # a chunk that is there must not read as one that is not
                raise OSError(errno.EINVAL, NO_FILE, chunks.place(name))
            found.extend((number, *mark))
    except OSError as error:
        raise DatasetError(
            f"{label}: {error.filename or chunks.prefix} cannot be read "
            f"({error.strerror or error}); it would read as the fill value: restore or fetch it "
            "(git annex get, datalad get)"
        ) from error
    return listed(chunks.keys.grid, found)
