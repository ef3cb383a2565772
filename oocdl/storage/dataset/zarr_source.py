"""Opens arrays of a Zarr group (format 2 or 3); refuses those whose reading is not safe and complete."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.core.array import AsyncArray
from zarr.storage import LocalStore, StorePath, ZipStore

from oocdl.errors import DatasetError
from oocdl.storage.dataset.bounded_codecs import bounded_v2, bounded_v3, most_bytes
from oocdl.storage.dataset.checked_store import CheckedStore, Chunks, RegularStore, chunks_of, parts_of
from oocdl.storage.dataset.chunk_list import MOST_CHUNKS, ChunkKeys, ChunkList, listed
from oocdl.storage.dataset.one_chunk import ChunkReader, LastChunk, chunk_reader
from oocdl.storage.zarr_json import UNFINISHED, grid

CODECS_V3 = frozenset({"bytes", "transpose", "blosc", "zstd", "gzip", "crc32c", "sharding_indexed"})
CODECS_V2 = frozenset({"blosc", "zstd", "zlib", "gzip", "lz4", "shuffle", "crc32c"})

NUMBER_KINDS = "biuf"
"""NumPy kinds that a dataset may have: bool, integers, floats."""
INDEX_BYTES = 16
INNER_BYTES = 128
"""What a shard takes at most for each chunk in it, beside its content: in its index, and for headers."""


@dataclass(frozen=True)
class ZarrArray:
    """Reads a Zarr array, each chunk of which has to be as it was when they were listed."""

    array: zarr.Array[Any]
    """As the library opens it: what it knows of itself is used, its chunks are not."""
    label: str
    last: LastChunk

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.array.dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of what is decoded together; in a shard, that of a chunk in it."""
        return self.array.chunks

    @property
    def fill_value(self) -> Any:
        """What a chunk that is not stored reads as; None if that is not defined."""
        return self.array.metadata.fill_value

    @property
    def stored_chunks(self) -> tuple[int, ...]:
        """Shape of what is stored together."""
        return self.array.shards or self.array.chunks

    @property
    def index_bytes(self) -> int:
        """What the index of a shard takes: offset and length of each chunk in it."""
        return 0 if self.array.shards is None else prod(self.stored_chunks) // prod(self.chunks) * INDEX_BYTES

    @cached_property
    def keys(self) -> ChunkKeys:
        """How its chunks are called."""
        document: Mapping[str, Any] = self.array.metadata.to_dict()
        extents = grid(self.shape, self.stored_chunks)
        if self.array.metadata.zarr_format == 2:
            return ChunkKeys(extents, "", document["dimension_separator"])
        encoding = document["chunk_key_encoding"]
        separator = encoding["configuration"]["separator"]
        return ChunkKeys(extents, f"c{separator}" if encoding["name"] == "default" else "", separator)

    @cached_property
    def stored(self) -> Chunks:
        """Where its chunks are."""
        return chunks_of(self.array.store, self.array.path, self.keys)

    @cached_property
    def known(self) -> ChunkList:
        """The chunks that are stored, listed once. Raises DatasetError if one is larger than it can be."""
        try:
            found = listed(self.keys.grid, self.stored.entries())
        except OSError as error:
            raise DatasetError(
                f"{self.label}: {error.filename or self.stored.prefix} cannot be read "
                f"({error.strerror or error}); it would read as the fill value: restore or fetch it "
                "(git annex get, datalad get)"
            ) from error
        inside = prod(self.stored_chunks) // prod(self.chunks) * INNER_BYTES
        most = most_bytes(prod(self.stored_chunks) * self.dtype.itemsize) + inside
        if len(found.sizes) and int(found.sizes.max()) > most:
            worst = self.keys.key(int(found.numbers[int(np.argmax(found.sizes))]))
            raise DatasetError(
                f"{self.label}: {self.stored.place(worst)} has {int(found.sizes.max()):,} bytes, a chunk "
                f"of its shape {list(self.stored_chunks)} takes at most {most:,}; write it again"
            )
        return found

    @cached_property
    def checked_store(self) -> CheckedStore:
        """Where the chunks that are read have to be as they were listed."""
        return CheckedStore(self.label, self.stored, self.known)

    @cached_property
    def one_chunk(self) -> ChunkReader | None:
        """What reads boxes of one chunk; None where only the library can."""
        return chunk_reader(self.array, self.checked_store, self.last)

    @cached_property
    def checked(self) -> zarr.Array[Any]:
        """The array that is read: from a store that checks chunks, by compressors with bounds."""
        array, store = self.array, self.checked_store
        metadata: Any = array.metadata
        if metadata.zarr_format == 2:
            nbytes = prod(self.chunks) * self.dtype.itemsize
            filters = metadata.filters and [bounded_v2(codec, nbytes) for codec in metadata.filters]
            metadata = replace(metadata, compressor=bounded_v2(metadata.compressor, nbytes), filters=filters)
        else:
            codecs = bounded_v3(metadata.codecs, metadata.to_dict()["codecs"])
            metadata = replace(metadata, codecs=codecs)
        path = StorePath(store, array.path)
        return zarr.Array(AsyncArray(metadata=metadata, store_path=path, config=array.async_array.config))

    @property
    def tells(self) -> str:
        """What tells stored chunks apart, beside their sizes."""
        return self.stored.marks

    @property
    def file_mark(self) -> tuple[int, int, int]:
        """Zeros: chunks have marks of their own, in a zip file too."""
        return 0, 0, 0

    def content(self, place: int, pieces: int) -> Iterator[bytes]:
        """The stored bytes of a chunk that is a file, or parts of them."""
        if self.tells == "time":
            path = self.stored.place(self.keys.key(int(self.known.numbers[place])))
            yield from parts_of(path, 0, int(self.known.sizes[place]), pieces)

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        found = None if self.one_chunk is None else self.one_chunk.read(where)
        if found is not None:
            return found
        self.last.leave()
        return self.checked[where]


def open_arrays(
    source: str | Store, group: str, where: str, names: Collection[str] | None
) -> dict[str, ZarrArray]:
    """Open and check the arrays of a group (those of ``names``, or all), by path. Raises DatasetError."""
    try:
        if isinstance(source, str) and source.lower().endswith(".zip") and os.path.isfile(source):
            source = ZipStore(source)
        place = source.root if type(source) is LocalStore else source
        if isinstance(place, Path) or (isinstance(place, str) and "://" not in place):
            source = RegularStore(place, read_only=True)
        opened = zarr.open_group(source, path=group, mode="r")
        # With names, an unreadable array beside them does no harm.
        unfinished = UNFINISHED in opened.attrs
        found = dict(opened.members(max_depth=None)) if names is None and not unfinished else {}
        found.update({name: opened[name] for name in names or () if name in opened})
    except Exception as error:  # zarr raises what its parsers raise; all mean the same here
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DatasetError(
            f"{where} is not a Zarr group that can be read ({reason}); "
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
    made = {name: ZarrArray(array, f"array {name!r} of {where}", last) for name, array in arrays.items()}
    for one in made.values():
        check_type(one.label, one.dtype, one.array.ndim)
        _check_codecs(one.label, one.array)
        _check_grid(one)
    return made


def check_type(label: str, dtype: Any, rank: int) -> None:
    """Raise DatasetError for a dtype that is no number (objects can run code when read), or rank 0."""
    kind = getattr(dtype, "kind", "?")
    if kind not in NUMBER_KINDS or dtype.fields is not None or dtype.shape:
        raise DatasetError(f"{label} has dtype {dtype}; only bool, integers and floats are read")
    if rank == 0:
        raise DatasetError(f"{label} is a single number; arrays have the sample axis first")


def _check_codecs(label: str, array: zarr.Array[Any]) -> None:
    document: Mapping[str, Any] = array.metadata.to_dict()
    if array.metadata.zarr_format == 3:
        used, allowed = _names_v3(document["codecs"]), CODECS_V3
    else:
        entries = [document.get("compressor"), *(document.get("filters") or ())]
        used = [_name(entry, "id") for entry in entries if entry is not None]
        allowed = CODECS_V2
    for name in used:
        if name not in allowed:
            raise DatasetError(
                f"{label} uses codec {name!r}, which is refused; allowed are "
                f"{', '.join(sorted(allowed))}: write the array again"
            )


def _names_v3(codecs: Any) -> list[str]:
    names = []
    for codec in codecs:
        names.append(_name(codec, "name"))
        inside = codec.get("configuration", {}) if isinstance(codec, Mapping) else {}
        for key in ("codecs", "index_codecs"):
            names += _names_v3(inside.get(key, ()))
    return names


def _name(entry: Any, key: str) -> str:
    if isinstance(entry, Mapping):
        return str(entry.get(key))
    return str(getattr(entry, "codec_id", entry))


def _check_grid(one: ZarrArray) -> None:
    """Raise DatasetError for chunks that are none, and for keys of a kind that is not known."""
    array, label = one.array, one.label
    document: Mapping[str, Any] = array.metadata.to_dict()
    kind = document.get("chunk_grid", {}).get("name", "regular")
    encoding = document.get("chunk_key_encoding", {}).get("name", "default")
    if kind != "regular" or encoding not in ("default", "v2"):
        raise DatasetError(
            f"{label} has a chunk grid {kind!r} with keys {encoding!r}; write it with regular chunks"
        )
    check_chunks(label, array.shape, (*one.stored_chunks, *array.chunks), one.stored_chunks)


def check_chunks(
    label: str, shape: tuple[int, ...], extents: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    """Raise DatasetError if extents of chunks are not positive, or if the grid of an array is absurd."""
    if any(extent < 1 for extent in extents):
        raise DatasetError(f"{label} has chunks of shape {list(stored)}; extents of chunks are at least 1")
    if prod(grid(shape, stored)) > MOST_CHUNKS:
        raise DatasetError(f"{label} of shape {list(shape)} has more chunks than there are numbers for them")
