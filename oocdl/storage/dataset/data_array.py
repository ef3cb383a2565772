"""One array of a dataset: what is known of it, and how it is read by region, whatever it is stored in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from oocdl.errors import DatasetError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region
from oocdl.storage.dataset.chunk_store import MOST_CHUNKS, ChunkList
from oocdl.storage.dataset.decoding import most_bytes
from oocdl.storage.zarr_json import grid

Shape = tuple[int, ...]

NUMBER_KINDS = "biuf"  # NumPy kinds that a dataset may have: bool, integers, floats
INNER_BYTES = 128  # of a shard for each chunk in it beside its content: in its index, and for headers


class Source(ABC):
    """The source of an array's chunks: a Zarr store, an HDF5 file, arrays in memory, samples side by side."""

    @property
    @abstractmethod
    def known(self) -> ChunkList:
        """The chunks that were stored when they were listed, which happens once."""

    @property
    def tells(self) -> str:
        """What tells stored chunks apart, beside their sizes: "time", "checksum", "place" or "none"."""
        return "checksum"

    @property
    def file_mark(self) -> tuple[int, int, int]:
        """Inode, size and time of the one file that holds the array; zeros where chunks have marks."""
        return 0, 0, 0

    @abstractmethod
    def place(self, number: int) -> str:
        """Return the place of a chunk, for messages."""

    @abstractmethod
    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        """Yield the bytes of the chunk at a place of ``known``, or so many pieces; none if marks tell all."""

    @abstractmethod
    def read(self, region: Region) -> Array:
        """Read a region. Raises DatasetError for a chunk that is not as listed, any error for a bad one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DataArray:
    """One array of a dataset, with the sample axis first."""

    name: str
    where: str  # name of the dataset, for messages
    shape: Shape  # samples come first
    dtype: np.dtype[Any]  # in native byte order
    chunks: Shape  # shape of the chunks: what is decoded together
    stored_chunks: Shape  # shape of what is stored together: of a shard, where there are shards
    index_bytes: int = 0  # size of the index of a shard, where there are shards
    fill_value: Any  # the value of all elements of a chunk that is not stored; None if it is not defined
    source: Source
    allow_missing_chunks: bool = True
    boxes: Sequence[Region] = ()  # where in a view each sample stands, behind the first axis
    title: str = ""  # name in the dataset, for messages, if it is another than ``name``

    @property
    def label(self) -> str:
        return f"array {(self.title or self.name)!r} of {self.where}"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def box(self, row: int) -> Region | None:
        """Return where in a view a sample stands; None if this is no view."""
        return self.boxes[row] if self.boxes else None

    def offset(self, row: int) -> Shape:
        """Return where the chunks of a sample begin, along the axes after the first."""
        return tuple(start for start, _ in self.box(row) or [(0, 0)] * (len(self.shape) - 1))

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of one chunk, with the index of its shard."""
        return prod(self.chunks) * self.itemsize + self.index_bytes

    @cached_property
    def reading_bytes(self) -> int:
        """The most that reading a chunk takes: as it is stored, decoded, and the part that was asked for."""
        stored_bytes = self.chunk_bytes
        if self.stored_chunks == self.chunks and len(self.source.known.sizes):
            stored_bytes = min(stored_bytes, int(self.source.known.sizes.max()))
        return 2 * self.chunk_bytes + stored_bytes

    @cached_property
    def known(self) -> ChunkList:
        """The chunks that are stored, listed at the first use.

        Raises DatasetError if one is too large, or if some are missing that may not be, or have no value.
        """
        found, fill = self.source.known, self.fill_value
        most = most_bytes(prod(self.stored_chunks) * self.itemsize)
        most += prod(self.stored_chunks) // prod(self.chunks) * INNER_BYTES
        if len(found.sizes) and int(found.sizes.max()) > most:
            worst = int(np.argmax(found.sizes))
            raise DatasetError(
                f"{self.label}: {self.source.place(int(found.numbers[worst]))} has {found.sizes[worst]:,} "
                f"bytes, a chunk of its shape {list(self.stored_chunks)} takes at most {most:,}; "
                "write it again"
            )
        if not found.missing:
            return found
        counted = f"{found.missing:,} of {prod(found.grid):,} chunks"
        gaps = np.append(found.numbers, -1) != np.arange(len(found.numbers) + 1)
        first = "/".join(map(str, found.index(int(np.argmax(gaps)))))
        if fill is None or not np.isfinite(fill):
            raise DatasetError(
                f"{self.label}: {counted} are not stored, first {first}, and its fill value is "
                f"{'not defined' if fill is None else fill}; write them"
            )
        if not self.allow_missing_chunks:
            raise DatasetError(
                f"{self.label}: {counted} are missing, first {first}; they would read as its fill value "
                f"{fill}, pass allow_missing_chunks=True to accept that"
            )
        return found

    def notes(self) -> list[str]:
        """Say how many chunks are not stored, and whether changes would go unnoticed."""
        notes = []
        if self.known.missing:
            notes.append(
                f"{self.name}: {self.known.missing:,} of {prod(self.known.grid):,} chunks are not stored "
                f"and read as their fill value {self.fill_value}"
            )
        if self.source.tells == "none":
            notes.append(
                f"{self.name}: its store tells neither sizes nor times of chunks; changes show only if a "
                "chunk is gone, or on resume in the values of three samples"
            )
        return notes

    def read(self, region: Region) -> Array:
        """Read ``region`` in native byte order, to be read only; only chunks that it touches are decoded.

        Raises DatasetError if a chunk cannot be decoded, or is not what it was when chunks were listed.
        """
        _ = self.known
        try:
            return np.asarray(self.source.read(region), self.dtype)
        except DatasetError:
            raise
        except Exception as error:  # codecs raise what they like; all mean the same here
            raise DatasetError(
                f"{self.label} cannot be read at {region}: "
                f"{one_line(error)}; restore or delete the damaged chunk"
            ) from error


def one_line(error: BaseException) -> str:
    """Return type and text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class NoNumbersError(DatasetError):
    """An array can be no input and no target, of whatever model: it is left out unless it is asked for."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(f"{label} {why}")
        self.why = why


Opened = tuple[list[DataArray], dict[str, str]]  # arrays; and name -> why it is left out, of others


def open_each(names: Iterable[str], open_one: Callable[[str], DataArray], asked: bool) -> Opened:
    """Open arrays by name; those that are not of numbers are left out, unless they are ``asked`` for."""
    found, left_out = list[DataArray](), dict[str, str]()
    for name in names:
        try:
            found.append(open_one(name))
        except NoNumbersError as error:
            if asked:
                raise
            left_out[name] = error.why
    return found, left_out


def check_type(label: str, dtype: Any, rank: int) -> None:
    """Raise NoNumbersError for a dtype that is no number (objects can run code when read), or rank 0."""
    kind = getattr(dtype, "kind", "?")
    if kind not in NUMBER_KINDS or dtype.fields is not None or dtype.shape:
        raise NoNumbersError(label, f"has dtype {dtype}; only bool, integers and floats are read")
    if rank == 0:
        raise NoNumbersError(label, "is a single number; arrays have the sample axis first")


def check_chunks(label: str, shape: Shape, chunks: Shape, stored: Shape) -> None:
    """Raise DatasetError if extents of chunks are not positive, or if the grid of an array is absurd."""
    if any(extent < 1 for extent in (*chunks, *stored)):
        raise DatasetError(f"{label} has chunks of shape {list(stored)}; extents of chunks are at least 1")
    if prod(grid(shape, stored)) > MOST_CHUNKS:
        raise DatasetError(f"{label} of shape {list(shape)} has more chunks than there are numbers for them")
