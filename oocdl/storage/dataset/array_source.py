"""NumPy arrays that the caller has in memory, or maps from a file: read in place, by blocks with checksums.

Their memory is the caller's: a budget counts it as what the process has before it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any, NoReturn

import numpy as np
from isal import isal_zlib

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import Region, as_slices
from oocdl.storage.dataset.chunk_list import ChunkKeys
from oocdl.storage.dataset.chunk_store import WHOLE, Chunks, Mark, Reading
from oocdl.storage.dataset.data_array import Array, DataArray, Shape, check_chunks, check_type
from oocdl.storage.dataset.decoding import Decoder
from oocdl.storage.dataset.zarr_source import LastChunk, ZarrSource
from oocdl.storage.files import as_bytes
from oocdl.storage.zarr_json import chunk_region, grid

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


class GivenBlocks(Chunks):
    """Blocks of an array in memory, by checksum."""

    tells = "checksum"

    def __init__(self, data: Array, blocks: Shape) -> None:
        self.data, self.blocks = data, blocks
        self.keys = ChunkKeys(grid(data.shape, blocks), "", ".")

    def names(self) -> Iterator[str]:
        return map(self.keys.key, range(prod(self.keys.grid)))

    def _region(self, block: str) -> Region:
        return chunk_region(tuple(map(int, block.split("."))), self.data.shape, self.blocks)

    def place(self, chunk: str) -> str:
        return f"at {self._region(chunk)}"

    def mark(self, chunk: str) -> Mark | None:
        return self.read(chunk)[0]

    def read(self, chunk: str, part: slice = WHOLE) -> Reading:
        # A copy: what is compared is what is used, whatever the caller does meanwhile.
        block = self.data[as_slices(self._region(chunk))].copy(order="C")
        mark = block.nbytes, int(isal_zlib.crc32(as_bytes(block)))
        if block.shape != self.blocks:
            lacking = (most - its for most, its in zip(self.blocks, block.shape, strict=True))
            block = np.pad(block, [(0, extent) for extent in lacking])
        return mark, as_bytes(block).data, mark


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
    last = LastChunk()
    return [_opened(name, given[name], last) for name in (sorted(given) if names is None else names)]


def _opened(name: str, data: Array, last: LastChunk) -> DataArray:
    label = f"array {name!r} of {WHERE}"
    check_type(label, data.dtype, data.ndim)
    blocks = _blocks(data.shape, data.dtype.itemsize)
    check_chunks(label, data.shape, blocks, blocks)
    decoder = Decoder(data.dtype, blocks, tuple(range(data.ndim)), (), prod(blocks) * data.itemsize)
    return DataArray(
        name=name,
        where=WHERE,
        shape=data.shape,
        dtype=data.dtype.newbyteorder("="),
        chunks=blocks,
        stored_chunks=blocks,
        fill_value=0,
        source=ZarrSource(label, data.shape, blocks, 0, GivenBlocks(data, blocks), decoder, None, last),
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
