"""Opens arrays of a Zarr group (format 2 or 3) and reads them chunk by chunk, whatever their store is.

The library decodes. It gives the fill value for a chunk that is gone, and new bytes for one that was
replaced; here both are errors.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.storage import LocalStore, WrapperStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.graph.ir.index import Region, as_slices, intersect, region_shape, within
from oocdl.storage.dataset.chunk_store import ChunkKeys, ChunkList, Chunks, chunks_of, list_chunks, parts_of
from oocdl.storage.dataset.data_array import Array, DataArray, Shape, check_chunks, check_type, one_line
from oocdl.storage.files import NO_FILE
from oocdl.storage.zarr_json import UNFINISHED, chunk_region, grid, touched

SHARDED = "sharding_indexed"
CODECS = {"bytes", "transpose", "shuffle", "crc32c", "blosc", "gzip", "lz4", "zlib", "zstd"}
"""Codecs that are read, of both formats; others may run code, or lose what was stored."""
INDEX_ENTRY_BYTES = 16
"""Bytes of a shard's index for each chunk."""


@dataclass(eq=False)
class LastChunk:
    """The chunk that was decoded last, of all arrays of a dataset: volumes are read piece by piece.

    It leaves before another comes, so it takes no more than reading one anyway does.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    of: tuple[str, Shape] | None = None
    """Label of its array, and its index."""
    array: Array | None = None

    def get(self, of: tuple[str, Shape], check: Callable[[], None], decode: Callable[[], Array]) -> Array:
        """Return a chunk: the one that is kept, once it is checked, or else one that is decoded now."""
        with self.lock:
            if self.of == of and self.array is not None:
                check()
                return self.array
            self.of = self.array = None
            self.array = decode()
            self.of = of
            return self.array

    def leave(self) -> None:
        """Forget it."""
        with self.lock:
            self.of = self.array = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ZarrArray(DataArray):
    """A Zarr array, each chunk of which has to be as it was when they were listed."""

    data: zarr.Array[Any]
    stored: Chunks
    last: LastChunk

    def _listed(self) -> ChunkList:
        return list_chunks(self.label, self.stored)

    @property
    def tells(self) -> str:
        return self.stored.tells

    def place(self, number: int) -> str:
        return self.stored.place(self.stored.keys.key(number))

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        if self.tells == "time":
            path = self.place(int(self.known.numbers[place]))
            yield from parts_of(path, 0, int(self.known.sizes[place]), pieces)

    def _read(self, region: Region) -> Array:
        """Read a region, one chunk after the other; a part of one chunk is read-only."""
        indices = list(touched(region, self.chunks))
        if len(indices) == 1:
            (index,) = indices
            check = partial(self._check, self._number(index))
            found = self.last.get((self.label, index), check, partial(self._chunk, index))
            return found[within(region, chunk_region(index, self.shape, self.chunks))]
        self.last.leave()
        out = np.empty(region_shape(region), self.dtype)
        for index in indices:
            covered = chunk_region(index, self.shape, self.chunks)
            part = intersect(covered, region)
            out[within(part, region)] = self._chunk(index)[within(part, covered)]
        return out

    def _number(self, index: Shape) -> int:
        """The number of the chunk, or of the shard that has the chunk, as it is stored."""
        sizes = zip(index, self.chunks, self.stored_chunks, strict=True)
        place = tuple(at * size // stored for at, size, stored in sizes)
        return int(np.ravel_multi_index(place, self.stored.keys.grid))

    def _chunk(self, index: Shape) -> Array:
        """Decode a chunk between two looks at what is stored: the library takes what is gone for fill."""
        number = self._number(index)
        self._check(number)
        try:
            found = np.asarray(self.data[as_slices(chunk_region(index, self.shape, self.chunks))])
        except Exception as error:  # codecs raise what they like
            raise ValueError(f"chunk {self.stored.keys.key(number)}: {one_line(error)}") from error
        self._check(number)
        found.flags.writeable = False
        return found

    def _check(self, number: int) -> None:
        """Raise DatasetError if a chunk is gone, was changed, or is new."""
        key, wanted = self.stored.keys.key(number), self.known.find(number)
        found = self.stored.mark(key)
        if found == wanted:
            return
        happened = "was changed" if found and wanted else "is gone" if found is None else "is new"
        raise DatasetError(
            f"{self.label}: chunk {key} {happened} since the dataset was opened "
            f"({self.stored.place(key)}); nothing was computed from it. Restore it, and start again: "
            "a run goes on from its last commit"
        )


class WholeParts(WrapperStore[Store]):
    """A store in which an empty file, or a part that is cut off, is an error: it would be read as fill.

    In a folder, so is what is no regular file: of a FIFO, reading would wait for ever.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.root = store.root if isinstance(store, LocalStore) else None

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes of a key, or a part of them. Raises ValueError for a part that is not there.

        Raises OSError for what is no file.
        """
        if self.root is not None and os.path.lexists(self.root / key) and not (self.root / key).is_file():
            raise OSError(errno.EINVAL, NO_FILE, str(self.root / key))
        found = await super().get(key, prototype, byte_range)
        nbytes = 0 if found is None else len(found)
        wanted = (
            byte_range.end - byte_range.start if isinstance(byte_range, RangeByteRequest) else nbytes or 1
        )
        if found is not None and nbytes != wanted:
            raise ValueError(f"{key} is empty, or its index says that a chunk lies outside of it")
        return found


def open_arrays(
    source: str | Store, group: str, where: str, names: Collection[str] | None
) -> list[DataArray]:
    """Open and check the arrays of a group (those of ``names``, or all). Raises DatasetError."""
    try:
        if isinstance(source, str) and source.lower().endswith(".zip") and os.path.isfile(source):
            source = ZipStore(source)
        if isinstance(source, str) and "://" not in source:
            source = LocalStore(source, read_only=True)
        store = source if isinstance(source, Store) else zarr.open_group(source, path=group, mode="r").store
        opened = zarr.open_group(WholeParts(store), path=group, mode="r")
        # With names, an unreadable array beside them does no harm.
        unfinished = UNFINISHED in opened.attrs
        found = dict(opened.members(max_depth=None)) if names is None and not unfinished else {}
        found.update({name: opened[name] for name in names or () if name in opened})
    except Exception as error:  # zarr raises what its parsers raise; all mean the same here
        raise DatasetError(
            f"{where} is not a Zarr group that can be read ({one_line(error)}); "
            "a dataset is a group with one array for each input and target"
        ) from error
    if unfinished:
        raise DatasetError(
            f"{where} is a prediction that was not finished; call predict again, which goes on with it"
        )
    arrays = {name: item for name, item in sorted(found.items()) if isinstance(item, zarr.Array)}
    lost = sorted(set(names or ()) - set(arrays))
    if lost:
        raise DatasetError(f"{where} has no array {lost[0]!r}; at its top are {sorted(opened.keys())}")
    last = LastChunk()
    return [_opened(name, where, array, store, last) for name, array in arrays.items()]


def _opened(name: str, where: str, array: zarr.Array[Any], store: Store, last: LastChunk) -> DataArray:
    """Check an array by its metadata, before a chunk is read."""
    label = f"array {name!r} of {where}"
    document: Mapping[str, Any] = array.metadata.to_dict()
    check_type(label, array.dtype, array.ndim)
    kind = document.get("chunk_grid", {}).get("name", "regular")
    encoding = document.get("chunk_key_encoding", {}).get("name", "default")
    if kind != "regular" or encoding not in ("default", "v2"):
        raise DatasetError(
            f"{label} has a chunk grid {kind!r} with keys {encoding!r}; write it with regular chunks"
        )
    stored_chunks = array.shards or array.chunks
    check_chunks(label, array.shape, array.chunks, stored_chunks)
    refused = [codec for codec in _codecs(document) if codec not in CODECS]
    if refused:
        raise DatasetError(
            f"{label} uses codec {refused[0]!r}, which is refused; allowed are blosc, gzip, lz4, zlib and "
            "zstd, crc32c, shuffle and transpose, in chunks or shards of chunks: write the array again"
        )
    keys, inside = _keys(document, grid(array.shape, stored_chunks)), grid(stored_chunks, array.chunks)
    # Of a shard the library makes one copy more than the three that a plan counts.
    shard_bytes = prod(inside) * INDEX_ENTRY_BYTES + prod(array.chunks) * array.dtype.itemsize // 3
    return ZarrArray(
        name=name,
        where=where,
        shape=array.shape,
        dtype=array.dtype.newbyteorder("="),
        chunks=array.chunks,
        stored_chunks=stored_chunks,
        shard_bytes=0 if array.shards is None else shard_bytes,
        fill_value=array.metadata.fill_value,
        data=array,
        stored=chunks_of(store, array.path, keys),
        last=last,
    )


def _codecs(document: Mapping[str, Any]) -> list[str]:
    """Return the names of an array's codecs: those of its chunks and of its index, where it has shards."""
    if document["zarr_format"] == 2:
        row = [*(document["filters"] or ()), *filter(None, [document["compressor"]])]
        return [str(getattr(codec, "codec_id", None) or codec["id"]) for codec in row]
    row = document["codecs"]
    if [codec["name"] for codec in row] == [SHARDED]:
        inner = row[0]["configuration"]
        row = [*inner["codecs"], *inner["index_codecs"]]
    return [str(codec["name"]) for codec in row]


def _keys(document: Mapping[str, Any], extents: Shape) -> ChunkKeys:
    """Return the keys of an array's chunks."""
    if document["zarr_format"] == 2:
        return ChunkKeys(extents, "", document["dimension_separator"])
    encoding = document["chunk_key_encoding"]
    separator = encoding["configuration"]["separator"]
    return ChunkKeys(extents, f"c{separator}" if encoding["name"] == "default" else "", separator)
