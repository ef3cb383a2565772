"""The chunks of a Zarr array in its store: lists them, and tells what each is.

What tells a chunk from another depends on the store: size and time of its file, checksum in a zip file or
in memory; of other stores only the presence of a chunk is known. Chunks have numbers, in C order of the grid.
The list is as long as what is stored, never as what is declared.
"""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.checksums import record_of
from oocdl.storage.files import NO_FILE, regular

Integers = npt.NDArray[np.int64]
MOST_CHUNKS = 2**62
"""A grid of more chunks than this is a damaged one: their numbers would not be int64."""
Mark = tuple[int, int]
"""Size of a stored chunk in bytes, and its time or checksum; zeros where the store does not tell."""
PIECE_BYTES = 64 << 10
"""Bytes of a file that are read at a time to compare its content."""


@dataclass(frozen=True, eq=False)
class ChunkList:
    """The stored chunks of one array, ordered by number."""

    grid: tuple[int, ...]
    """Chunks along each axis, stored or not."""
    numbers: Integers
    sizes: Integers
    """Stored bytes of each chunk."""
    marks: Integers
    """Times of change in nanoseconds, or checksums, as the source has them."""

    @cached_property
    def missing(self) -> int:
        """Chunks that are not stored."""
        return prod(self.grid) - len(self.numbers)

    @property
    def first_missing(self) -> int:
        """The number of the first chunk that is not stored; the number of all chunks if there is none."""
        gaps = self.numbers != np.arange(len(self.numbers))
        return int(np.argmax(gaps)) if gaps.any() else len(self.numbers)

    def index(self, number: int) -> tuple[int, ...]:
        """The index in the grid of the chunk of a number."""
        return tuple(int(at) for at in np.unravel_index(number, self.grid))

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
    return ChunkList(grid, *(np.ascontiguousarray(column) for column in table.T))


@dataclass(frozen=True)
class ChunkKeys:
    """Names of the chunks of a Zarr array: ``c/0/1`` or ``0.1``, below the array's own path."""

    grid: tuple[int, ...]
    lead: str
    """Text before the first index: ``c/``, ``c.`` or nothing."""
    separator: str

    def key(self, number: int) -> str:
        """The name of a chunk.

        >>> ChunkKeys((2, 3), "c/", "/").key(5)
        'c/1/2'
        """
        return self.lead + self.separator.join(map(str, np.unravel_index(number, self.grid)))

    def number(self, key: str) -> int | None:
        """The number of the chunk that has this name; None if no chunk has it.

        >>> keys = ChunkKeys((2, 3), "", ".")
        >>> keys.number("1.2"), keys.number("2.0"), keys.number("01.2"), keys.number(".zarray")
        (5, None, None, None)
        """
        parts = key[len(self.lead) :].split(self.separator)
        if not key.startswith(self.lead) or len(parts) != len(self.grid):
            return None
        number = 0
        for part, extent in zip(parts, self.grid, strict=True):
            at = index_of(part, extent)
            if at is None:
                return None
            number = number * extent + at
        return number


def index_of(text: str, extent: int) -> int | None:
    """The index below ``extent`` that a text writes without sign or leading zeros; None if it writes none."""
    if not (text.isascii() and text.isdigit()) or (text[0] == "0" and text != "0") or len(text) > 19:
        return None
    at = int(text)
    return at if at < extent else None


def row_ranges(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` into at most so many ranges of about equal length, half open.

    >>> list(row_ranges(5, 2))
    [(0, 2), (2, 5)]
    """
    count = min(rows, most)
    edges = [rows * part // count for part in range(count + 1)] if count else []
    yield from zip(edges, edges[1:], strict=False)


class Chunks:
    """The chunks of one array in a store of which no more is known than which chunks it has."""

    tells: ClassVar[str] = "none"
    """Property that tells chunks apart: "time", "checksum", or "none"."""

    def __init__(self, store: Store, path: str, keys: ChunkKeys) -> None:
        self.store, self.keys = store, keys
        self.prefix = f"{path}/" if path else ""

    def entries(self) -> array[int]:
        """Number, size and mark of each chunk that is stored, one after the other."""
        found = array("q")
        for name in self.names():
            number = self.keys.number(name[len(self.prefix) :]) if name.startswith(self.prefix) else None
            if number is not None:
                found.extend((number, *(self.mark(name[len(self.prefix) :]) or (0, 0))))
        return found

    def names(self) -> Iterable[str]:
        """All keys of the store that may be chunks of the array."""
        return sync(self._listed())

    async def _listed(self) -> list[str]:
        return [key async for key in self.store.list_prefix(self.prefix)]

    def place(self, chunk: str) -> str:
        """Return the place of a chunk, for messages."""
        return self.prefix + chunk

    def mark(self, chunk: str) -> Mark | None:
        """Return the mark that tells the chunk from others; None if the chunk is absent."""
        return (0, 0) if sync(self.store.exists(self.prefix + chunk)) else None


class Memory(Chunks):
    """Chunks in memory, by checksum."""

    tells = "checksum"

    def mark(self, chunk: str) -> Mark | None:
        found = sync(self.store.get(self.prefix + chunk, default_buffer_prototype()))
        record = None if found is None else record_of(found.to_bytes())
        return None if record is None else (record.nbytes, record.crc)


class Files(Chunks):
    """Chunks that are files of a local store, by size and time of change."""

    tells = "time"

    def __init__(self, store: LocalStore, path: str, keys: ChunkKeys) -> None:
        super().__init__(store, path, keys)
        self.folder = os.path.join(store.root, path)

    def entries(self) -> array[int]:
        found = array("q")
        nested = self.keys.separator == "/"
        self._walk(self.keys.lead * nested, (len(self.keys.grid) - 1) * nested, found)
        return found

    def _walk(self, lead: str, depth: int, found: array[int]) -> None:
        """Find the chunks whose names begin with ``lead`` and lie so many folders below it."""
        folder = os.path.join(self.folder, lead).rstrip("/")
        if not os.path.lexists(folder):
            return  # nothing is stored there
        with os.scandir(folder) as entries:
            for entry in entries:
                if depth:
                    if index_of(entry.name, self.keys.grid[-1 - depth]) is not None:
                        self._walk(f"{lead}{entry.name}/", depth - 1, found)
                elif (number := self.keys.number(lead + entry.name)) is not None:
                    found.extend((number, *_entry_mark(entry)))

    def place(self, chunk: str) -> str:
        return f"{self.folder}/{chunk}"

    def mark(self, chunk: str) -> Mark | None:
        try:
            known = os.stat(self.place(chunk))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _mark(known) if stat.S_ISREG(known.st_mode) else None


def _mark(known: os.stat_result) -> Mark:
    return known.st_size, known.st_mtime_ns


def _entry_mark(entry: os.DirEntry[str]) -> Mark:
    """Return a mark. Raises OSError for what is no file: it must not read as an absent chunk."""
    known = entry.stat()
    if not stat.S_ISREG(known.st_mode):
        raise OSError(errno.EINVAL, NO_FILE, entry.path)
    return _mark(known)


class Zipped(Chunks):
    """Chunks in a zip file, by the checksums that it has of them; the file itself must stay as it is."""

    tells = "checksum"

    def __init__(self, store: ZipStore, path: str, keys: ChunkKeys) -> None:
        super().__init__(store, path, keys)
        self.path, self.file_mark = store.path, file_mark(store.path)
        with zipfile.ZipFile(self.path) as file:
            self.members = {info.filename: info for info in file.infolist()}

    def names(self) -> Iterable[str]:
        return self.members

    def place(self, chunk: str) -> str:
        return f"{self.path}: {self.prefix}{chunk}"

    def mark(self, chunk: str) -> Mark | None:
        if file_mark(self.path) != self.file_mark:
            return -1, -1  # of no chunk
        info = self.members.get(self.prefix + chunk)
        return None if info is None else (info.file_size, info.CRC)


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
