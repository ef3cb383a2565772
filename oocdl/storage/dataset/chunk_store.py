"""The chunks of an array: which are stored, with what tells each from another, and how their store is read.

What tells a chunk from another depends on the store: size and time of its file, checksum in a zip file or
in memory; of other stores only the presence of a chunk is known. Chunks have numbers, in C order of the grid;
a list is as long as what is stored, never as what is declared.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.checksums import record_of
from oocdl.storage.files import NO_FILE, regular

Integers = npt.NDArray[np.int64]

MOST_CHUNKS = 2**62  # a grid of more chunks than this is a damaged one: their numbers would not be int64
Mark = tuple[int, int]  # size of a chunk in bytes, and its time or checksum; zeros where nothing is told
Reading = tuple[Mark | None, bytes | memoryview, Mark | None]  # bytes between two marks
WHOLE = slice(None)
PIECE_BYTES = 64 << 10  # how much is read of a file at a time to compare its content


@dataclass(frozen=True, eq=False)
class ChunkList:
    """The stored chunks of one array, ordered by number."""

    grid: tuple[int, ...]  # chunks along each axis, stored or not
    numbers: Integers
    sizes: Integers  # bytes as they are stored
    marks: Integers  # times of change in nanoseconds, or checksums, as the source has them
    missing: int  # chunks that are not stored

    def index(self, number: int) -> tuple[int, ...]:
        return index_of(number, self.grid)

    def place(self, number: int) -> int | None:
        """Return the place of a chunk in the list; None if it was not stored."""
        place = number if not self.missing else int(np.searchsorted(self.numbers, number))
        return place if place < len(self.numbers) and self.numbers[place] == number else None

    def find(self, number: int) -> tuple[int, int] | None:
        """Size and mark of a chunk; None if it was not stored."""
        place = self.place(number)
        return None if place is None else (int(self.sizes[place]), int(self.marks[place]))


def listed(grid: tuple[int, ...], entries: array[int]) -> ChunkList:
    """Make a list of entries in any order: number, size and mark of one chunk after the other, as int64."""
    table = np.frombuffer(entries, np.int64).reshape(-1, 3)
    table = table[np.argsort(table[:, 0], kind="stable")]
    numbers, sizes, marks = (np.ascontiguousarray(column) for column in table.T)
    return ChunkList(grid, numbers, sizes, marks, prod(grid) - len(table))


@dataclass(frozen=True)
class ChunkKeys:
    """How the chunks of a Zarr array are called: ``c/0/1`` or ``0.1``, below the array's own path."""

    grid: tuple[int, ...]
    lead: str  # before the first index: ``c/``, ``c.``, indices of axes that are left out, or nothing
    separator: str

    def key(self, number: int) -> str:
        """The name of a chunk."""
        return self.key_at(index_of(number, self.grid))

    def key_at(self, index: tuple[int, ...]) -> str:
        return self.lead + self.separator.join(map(str, index))

    def number(self, key: str) -> int | None:
        """The number of the chunk that has this name; None if no chunk has it.

        >>> keys = ChunkKeys((2, 3), "", ".")
        >>> keys.number("1.2"), keys.number("2.0"), keys.number("01.2"), keys.number(".zarray")
        (5, None, None, None)
        """
        match = self._pattern.fullmatch(key)
        index = tuple(map(int, match.groups())) if match else ()
        inside = match and all(at < extent for at, extent in zip(index, self.grid, strict=True))
        return number_of(index, self.grid) if inside else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        numbers = [r"(0|[1-9][0-9]{0,18})"] * len(self.grid)  # without sign or leading zeros
        return re.compile(re.escape(self.lead) + re.escape(self.separator).join(numbers))


def number_of(index: tuple[int, ...], grid: tuple[int, ...]) -> int:
    """The number of the chunk at an index."""
    return int(np.ravel_multi_index(index, grid))


def index_of(number: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the chunk of a number."""
    return tuple(int(at) for at in np.unravel_index(number, grid))


def row_ranges(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` into at most so many ranges of about equal length, half open."""
    count = min(rows, most)
    return pairwise([rows * part // count for part in range(count + 1)] if count else [])


class Chunks:
    """The chunks of one array in a store of which no more is known than which chunks it has."""

    tells: ClassVar[str] = "none"  # what tells chunks apart: "time", "checksum", or "none"

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
        mark = record_of(content)
        return mark, content[part], mark


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
                name, lead = below + entry.name, self.keys.lead
                is_part = lead.startswith(f"{name}/") or (name.startswith(lead) and entry.name.isdigit())
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
                return before, file.read(max(stop - start, 0)), _mark(os.fstat(file.fileno()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
                return None, b"", None  # or what stands there is no file
            raise


def _mark(known: os.stat_result) -> Mark:
    return known.st_size, known.st_mtime_ns


class RegularStore(LocalStore):
    """A local folder whose metadata are regular files: of a FIFO, reading would wait for ever."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
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
        assert store.path is not None
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
    """Read bytes of a file from ``start`` on: all, or so many pieces. Raises DatasetError if it cannot be."""
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
            f"{label}: {error.filename or chunks.prefix} cannot be read ({error.strerror or error}); it "
            "would read as the fill value: restore or fetch it (git annex get, datalad get)"
        ) from error
    return listed(chunks.keys.grid, found)
