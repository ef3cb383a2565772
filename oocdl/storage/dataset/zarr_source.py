"""Opens arrays of a Zarr group (format 2 or 3) and reads them chunk by chunk, whatever their store is.

The library reads metadata, and no chunk: it gives the fill value for one that is gone, and new bytes for one
that was replaced. Here both are errors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.storage import LocalStore, ZipStore

from oocdl.errors import DatasetError
from oocdl.graph.ir.array_layout import Array
from oocdl.graph.ir.index import Region, intersect, region_shape, within
from oocdl.storage.dataset.chunk_store import (
    WHOLE,
    ChunkKeys,
    ChunkList,
    Chunks,
    Mark,
    RegularStore,
    chunks_of,
    list_chunks,
    parts_of,
)
from oocdl.storage.dataset.data_array import (
    DataArray,
    Opened,
    Shape,
    Source,
    check_chunks,
    check_type,
    one_line,
    open_each,
)
from oocdl.storage.dataset.decoding import Decoder, decoder_v2, decoder_v3, most_bytes
from oocdl.storage.dataset.ome_zarr import Sample, ome_folders, ome_samples
from oocdl.storage.dataset.sample_stack import named_samples, stacked
from oocdl.storage.zarr_json import CONVERSION, UNFINISHED, chunk_region, grid, touched

Names = Collection[str] | None  # of arrays; None: of all
Document = Mapping[str, Any]  # metadata of an array, as Zarr has them
Tables = dict[str, Array | None]  # the index of a shard by its key
SHARDED = "sharding_indexed"
NOT_STORED = 2**64 - 1  # offset and size, in the index of a shard, of a chunk that is not in it


@dataclass(eq=False)
class LastChunk:
    """The chunk that was decoded last, of all arrays of a dataset: it leaves before another comes."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    of: tuple[str, Shape] | None = None  # label of its array, and its index
    array: Array | None = None


@dataclass(frozen=True, eq=False)
class Shards:
    """The layout of chunks in shards."""

    inside: Shape  # chunks along each axis of a shard
    index: Decoder  # makes numbers of an index: offset and size of each chunk
    part: slice  # the part of a shard that holds its index: its end, or its beginning


@dataclass(frozen=True, eq=False)
class ZarrSource(Source):
    """Reads an array chunk by chunk, each of which has to be as it was when they were listed."""

    label: str
    shape: Shape
    chunks: Shape
    fill_value: Any
    stored: Chunks
    decoder: Decoder
    shards: Shards | None
    last: LastChunk
    allow_missing: bool = True  # whether shards may lack chunks: of shards themselves ``known`` says it

    @cached_property
    def known(self) -> ChunkList:  # of shards, if there are any
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

    def read(self, region: Region) -> Array:
        """Read a region, one chunk after the other; a part of one chunk is read-only."""
        indices = list(touched(region, self.chunks))
        if len(indices) == 1:
            (index,) = indices
            corner = tuple((at * size, (at + 1) * size) for at, size in zip(index, self.chunks, strict=True))
            return self._one_chunk(index)[within(region, corner)]
        with self.last.lock:
            self.last.of = self.last.array = None
        out, tables = np.empty(region_shape(region), self.decoder.dtype), Tables()
        for index in indices:
            covered = chunk_region(index, self.shape, self.chunks)
            part = intersect(covered, region)
            out[within(part, region)] = self._chunk(index, tables)[within(part, covered)]
        return out

    def _one_chunk(self, index: Shape) -> Array:
        """Return a chunk: the one that is kept, once it is checked, or else one that is decoded now."""
        last = self.last
        with last.lock:
            if last.of == (self.label, index) and last.array is not None:
                key, _ = self._key(index)
                self._check(key, self.stored.mark(key))
                return last.array
            last.of = last.array = None
            last.array = self._chunk(index, {})
            last.of = self.label, index
            return last.array

    def _key(self, index: Shape) -> tuple[str, Shape]:
        """The name under which a chunk is stored, and its index in the shard of that name."""
        if self.shards is None:
            return self.stored.keys.key_at(index), ()
        pairs = [divmod(at, count) for at, count in zip(index, self.shards.inside, strict=True)]
        return self.stored.keys.key_at(tuple(outer for outer, _ in pairs)), tuple(at for _, at in pairs)

    def _chunk(self, index: Shape, tables: Tables) -> Array:
        """Decode a chunk; ``tables`` keeps the index of one shard, None if that is not stored."""
        key, inside = self._key(index)
        part: slice | None = WHOLE
        try:
            if self.shards is not None:
                part = self._place(key, inside, self.shards, tables)
            stored = None if part is None else self._bytes(key, part)
            if stored is not None:
                return self.decoder(stored).reshape(self.chunks)
        except DatasetError:
            raise
        except Exception as error:  # codecs raise what they like
            raise ValueError(f"chunk {key}: {one_line(error)}") from error
        return np.broadcast_to(np.asarray(self.fill_value, self.decoder.dtype), self.chunks)

    def _place(self, key: str, inside: Shape, shards: Shards, tables: Tables) -> slice | None:
        """Return where a chunk lies in its shard; None if it is not stored, DatasetError if it is to be."""
        if key not in tables:
            tables.clear()
            stored = self._bytes(key, shards.part)
            tables[key] = None if stored is None else shards.index(stored)
        table = tables[key]
        offset, nbytes = (NOT_STORED, 0) if table is None else map(int, table[inside])
        if offset == NOT_STORED:
            if self.allow_missing:
                return None
            raise DatasetError(
                f"{self.label}: chunk {'/'.join(map(str, inside))} in shard {key} is missing; it would read "
                f"as its fill value {self.fill_value}, pass allow_missing_chunks=True to accept that"
            )
        if nbytes > most_bytes(prod(self.chunks) * self.decoder.dtype.itemsize):
            raise ValueError(f"its index says that chunk {inside} has {nbytes:,} bytes, which none can have")
        return slice(offset, offset + nbytes)

    def _bytes(self, key: str, part: slice) -> bytes | memoryview | None:
        """Return a part of what is stored under a name; None if nothing is. Raises what ``_check`` does."""
        before, content, after = self.stored.read(key, part)
        self._check(key, before, after)
        if before is None:
            return None
        if part.start is not None and len(content) != abs((part.stop or 0) - part.start):
            raise ValueError("an index says that bytes of it lie outside of it")
        return content

    def _check(self, key: str, *marks: Mark | None) -> None:
        """Raise DatasetError if a chunk is gone, was changed, or is new, by its marks, as around a read."""
        number = self.stored.keys.number(key)
        assert number is not None, key
        wanted = self.known.find(number)
        if all(mark == wanted for mark in marks):
            return
        happened = "was changed" if marks[0] and wanted else "is gone" if marks[0] is None else "is new"
        raise DatasetError(
            f"{self.label}: chunk {key} {happened} since the dataset was opened "
            f"({self.stored.place(key)}); nothing was computed from it. Restore it, and start again: "
            "a run goes on from its last commit"
        )


def store_of(source: str | Store) -> str | Store:
    """Return the store of a path, if it is local: a folder or a zip file."""
    if isinstance(source, str) and source.lower().endswith(".zip") and os.path.isfile(source):
        return ZipStore(source)
    place = source.root if type(source) is LocalStore else source
    is_path = isinstance(place, Path) or (isinstance(place, str) and "://" not in place)
    return RegularStore(place, read_only=True) if is_path else source  # type: ignore[arg-type]


def group_of(store: str | Store, group: str = "") -> zarr.Group:
    """Open a group. What is near is asked itself: a copy of all metadata (consolidated) may be outdated."""
    copied = False if isinstance(store, LocalStore | ZipStore) else None
    return zarr.open_group(store, path=group, mode="r", use_consolidated=copied)


def open_arrays(source: str | Store, group: str, where: str, names: Names, allow_missing: bool) -> Opened:
    """Open and check the arrays of a group (those of ``names``, or all). Raises DatasetError."""
    try:
        source = store_of(source)
        if images := ome_folders(getattr(source, "root", None)):
            return _stacks(_samples_of(images), where, names, allow_missing)
        opened = group_of(source, group)
        # With names, an unreadable array beside them does no harm.
        unfinished = UNFINISHED in opened.attrs
        found = dict(opened.members(max_depth=None)) if names is None and not unfinished else {}
        samples = {} if unfinished else named_samples(opened, where) or ome_samples(opened, where)
        if samples:
            return _stacks(samples, where, names, allow_missing)
        found.update({name: opened[name] for name in names or () if name in opened})
    except DatasetError:
        raise
    except Exception as error:  # zarr raises what its parsers raise; all mean the same here
        raise DatasetError(
            f"{where} is not a Zarr group that can be read ({one_line(error)}); "
            "a dataset is a group with one array for each input and target"
        ) from error
    if unfinished:
        what, cure = "prediction", "call predict again, which goes on with it"
        if opened.attrs[UNFINISHED] == CONVERSION:
            what, cure = "conversion", "convert again"
        raise DatasetError(f"{where} is a {what} that was not finished; {cure}")
    arrays = {name: item for name, item in sorted(found.items()) if isinstance(item, zarr.Array)}
    lost = sorted(set(names or ()) - set(arrays))
    if lost:
        raise DatasetError(f"{where} has no array {lost[0]!r}; at its top are {sorted(opened.keys())}")
    how = LastChunk(), allow_missing
    return open_each(arrays, lambda name: _opened(name, where, arrays[name], *how), names is not None)


def _samples_of(images: Sequence[Path]) -> dict[str, Sample]:
    """Return the samples of several images. Raises DatasetError for one that is none, or two of one name."""
    found: dict[str, Sample] = {}
    for image in images:
        samples = ome_samples(group_of(RegularStore(image, read_only=True)), str(image))
        if not samples or samples.keys() & found.keys():
            raise DatasetError(f"{image} is no image of OME-Zarr, or has the name of another one")
        found |= samples
    return found


def _stacks(samples: Mapping[str, Sample], where: str, names: Names, allow_missing: bool) -> Opened:
    """Open the arrays of all samples, and see those of one name as one. Raises DatasetError."""
    last = LastChunk()
    attributes = {title: sample.attributes for title, sample in samples.items()}

    def open_one(name: str) -> DataArray:
        members = []
        for title, (_, arrays, at) in samples.items():
            if name not in arrays:
                raise DatasetError(f"sample {title!r} of {where} has no array {name!r}, as others have")
            given = arrays[name], last, allow_missing, at.get(name, ())
            members.append(_opened(f"{title}/{name}", where, *given))
        return stacked(name, where, members, attributes)

    known = sorted(next(iter(samples.values())).arrays) if names is None else names
    return open_each(known, open_one, names is not None)


def _opened(
    name: str, where: str, array: zarr.Array[Any], last: LastChunk, allow_missing: bool, at: Shape = ()
) -> DataArray:
    """Check an array, or what is at indices of its first axes, by its metadata, before a chunk is read."""
    label, metadata = f"array {name!r} of {where}", array.metadata
    document: Document = metadata.to_dict()
    check_type(label, array.dtype, array.ndim)
    kind = document.get("chunk_grid", {}).get("name", "regular")
    named = document.get("chunk_key_encoding", {"name": "v2"})
    if kind != "regular" or named["name"] not in ("default", "v2"):
        told = f"a chunk grid {kind!r} with keys {named['name']!r}"
        raise DatasetError(f"{label} has {told}; write it with regular chunks")
    stored_chunks, left = array.shards or array.chunks, len(at)
    check_chunks(label, array.shape, array.chunks, stored_chunks)
    if max(stored_chunks[:left], default=1) > 1:
        raise DatasetError(f"{label} has several times in each chunk; write it with one in each")
    try:
        decoder, shards = _decoders(array, document, left)
    except ValueError as error:
        raise DatasetError(
            f"{label} uses {error}, which is refused; allowed are one of blosc, gzip, lz4, zlib and zstd, "
            "crc32c, shuffle and transpose, in chunks or shards of chunks: write the array again"
        ) from error
    shape, chunks, stored_chunks = array.shape[left:], array.chunks[left:], stored_chunks[left:]
    separator = named.get("configuration", {}).get("separator", document.get("dimension_separator"))
    lead = separator.join([*(["c"] if named["name"] == "default" else []), *map(str, at), ""])
    keys = ChunkKeys(grid(shape, stored_chunks), lead, separator)
    stored, fill = chunks_of(array.store, array.path, keys), metadata.fill_value
    return DataArray(
        name=name, where=where, shape=shape, dtype=array.dtype.newbyteorder("="),
        chunks=chunks, stored_chunks=stored_chunks, fill_value=fill,
        index_bytes=0 if shards is None else shards.index.nbytes or 0,
        source=ZarrSource(label, shape, chunks, fill, stored, decoder, shards, last, allow_missing),
    )  # fmt: skip


def _decoders(array: zarr.Array[Any], document: Document, left: int) -> tuple[Decoder, Shards | None]:
    """Return the decoder of chunks; shards lack ``left`` axes. Raises ValueError that names the bad codec."""
    if document["zarr_format"] == 2:
        return decoder_v2(array.chunks, array.dtype, array.metadata), None
    codecs = document["codecs"]
    if [codec["name"] for codec in codecs] != [SHARDED]:
        return decoder_v3(array.chunks, array.dtype, codecs), None
    inner, inside = codecs[0]["configuration"], grid(array.shards or (), array.chunks)[left:]
    index = decoder_v3((*inside, 2), np.dtype(np.uint64), inner["index_codecs"])
    if index.nbytes is None:
        raise ValueError("a compressed index of shards")
    decoder = decoder_v3(array.chunks, array.dtype, inner["codecs"])
    at_start = inner.get("index_location") == "start"
    part = slice(0, index.nbytes) if at_start else slice(-index.nbytes, None)
    return decoder, Shards(inside, index, part)
