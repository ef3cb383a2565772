"""NumPy arrays that the caller has in memory, or maps from a file: read in place, by blocks with checksums.

Their memory is the caller's: a budget counts it as what the process has before it begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import numpy as np
from isal import isal_zlib

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import Region, as_slices, intersect, region_shape, within
from oocdl.storage.dataset.chunk_list import ChunkList, listed, number_of
from oocdl.storage.dataset.data_array import Array, DataArray, Shape, check_chunks, check_type
from oocdl.storage.files import as_bytes
from oocdl.storage.zarr_json import chunk_region, grid, touched

BLOCK_BYTES = 1 << 20
SMALL_BYTES = 64 << 10
"""Samples of fewer bytes share a block."""
WHERE = "the arrays given"


class GivenArrays(dict[str, Array]):
    """Arrays by name, that no other process is sent."""

    def __repr__(self) -> str:
        return f"arrays {sorted(self)}"

    def __reduce__(self) -> NoReturn:
        """Raise DatasetError: who is about to send them calls it first."""
        raise DatasetError(
            "arrays in memory are read by this process alone; for a client, write them to Zarr: "
            "oocdl.data.convert('arrays.npz', 'data.zarr')"
        )


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Reads an array in memory, each block of which has to be as it was when it was listed."""

    label: str
    data: Array
    blocks: Shape

    @cached_property
    def known(self) -> ChunkList:
        """All blocks, each with the checksum that it has now."""
        extents, found = grid(self.data.shape, self.blocks), array("q")
        for number in range(prod(extents)):
            index = tuple(int(at) for at in np.unravel_index(number, extents))
            found.extend((number, *_mark(self._block(index))))
        return listed(extents, found)

    @property
    def tells(self) -> str:
        """What tells blocks apart, beside their sizes."""
        return "checksum"

    @property
    def file_mark(self) -> tuple[int, int, int]:
        """Zeros: there is no file."""
        return 0, 0, 0

    def place(self, number: int) -> str:
        """Return the place of a block, for messages."""
        return str(chunk_region(self.known.index(number), self.data.shape, self.blocks))

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        """Nothing: checksums tell all that there is."""
        yield from ()

    def read(self, region: Region) -> Array:
        """Read a region, block by block. Raises DatasetError for a block that was changed."""
        out = np.empty(region_shape(region), self.data.dtype)
        for index in touched(region, self.blocks):
            covered, block = chunk_region(index, self.data.shape, self.blocks), self._block(index)
            if _mark(block) != self.known.find(number_of(index, self.known.grid)):
                raise DatasetError(
                    f"{self.label} was changed at {covered} since it was given; none of that was used. "
                    "A run goes on from its last commit with the array as it was"
                )
            part = intersect(covered, region)
            out[within(part, region)] = block[within(part, covered)]
        return out

    def _block(self, index: Shape) -> Array:
        """Return a copy: what is compared is what is used, whatever the caller does meanwhile."""
        return self.data[as_slices(chunk_region(index, self.data.shape, self.blocks))].copy(order="C")


def _mark(block: Array) -> tuple[int, int]:
    return block.nbytes, int(isal_zlib.crc32(as_bytes(block)))


def open_arrays(given: Mapping[Any, Any], names: Collection[str] | None) -> list[DataArray]:
    """Open arrays by name (those of ``names``, or all). Raises DatasetError for what is no such array."""
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            kind = type(value).__name__
            raise DatasetError(
                f"a dataset in memory maps names to NumPy arrays, and {name!r} is of type {kind}; pass "
                "numpy.asarray(it), with the sample axis first, or write one sample at a time to Zarr"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise DatasetError(
                f"{name!r} is a masked array; say what is there instead: pass {name}.filled(..)"
            )
    lost = sorted(set(names or ()) - set(given))
    if lost:
        raise DatasetError(f"{WHERE} have no array {lost[0]!r}; they are {sorted(given)}")
    return [_opened(name, given[name]) for name in (sorted(given) if names is None else names)]


def _opened(name: str, data: Array) -> DataArray:
    label = f"array {name!r} of {WHERE}"
    check_type(label, data.dtype, data.ndim)
    blocks = _blocks(data.shape, data.dtype.itemsize)
    check_chunks(label, data.shape, blocks, blocks)
    return DataArray(
        name=name,
        where=WHERE,
        shape=data.shape,
        dtype=data.dtype.newbyteorder("="),
        chunks=blocks,
        stored_chunks=blocks,
        fill_value=0,
        source=ArraySource(label, data, blocks),
    )


def _blocks(shape: Shape, itemsize: int) -> Shape:
    """Blocks of a part of one sample, or of a few small ones, that are contiguous in C order.

    >>> _blocks((10, 1, 256, 256, 256), 4), _blocks((10_000, 4), 8)
    ((1, 1, 4, 256, 256), (2048, 4))
    """
    left, found = BLOCK_BYTES // itemsize, list[int]()
    for extent in reversed(shape[1:]):
        found.append(max(1, min(extent, left)))
        left //= max(extent, 1)
    rows = SMALL_BYTES // (max(prod(shape[1:]), 1) * itemsize)
    return (max(1, min(rows, shape[0])), *reversed(found))
