"""Opens arrays of a Zarr group (format 2 or 3); refuses those whose reading is not safe and complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from math import prod
from typing import Any

import zarr
from zarr.abc.store import Store
from zarr.core.sync import sync

from oocdl.errors import DatasetError
from oocdl.storage.zarr_json import grid

CODECS_V3 = frozenset({"bytes", "transpose", "blosc", "zstd", "gzip", "crc32c", "sharding_indexed"})
CODECS_V2 = frozenset({"blosc", "zstd", "zlib", "gzip", "lz4", "shuffle", "crc32c"})

NUMBER_KINDS = "biuf"
"""NumPy kinds that a dataset may have: bool, integers, floats."""


def open_arrays(
    source: str | Store, group: str, where: str, allow_missing: bool, names: Collection[str] | None
) -> dict[str, zarr.Array[Any]]:
    """Open and check the arrays of a group (those of ``names``, or all), by path. Raises DatasetError."""
    try:
        opened = zarr.open_group(source, path=group, mode="r")
        # With names, an unreadable array beside them does no harm.
        found = dict(opened.members(max_depth=None)) if names is None else {}
        found.update({name: opened[name] for name in names or () if name in opened})
    except Exception as error:  # zarr raises what its parsers raise; all mean the same here
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DatasetError(
            f"{where} is not a Zarr group that can be read ({reason}); "
            "a dataset is a group with one array for each input and target"
        ) from error
    arrays = {name: item for name, item in sorted(found.items()) if isinstance(item, zarr.Array)}
    lost = sorted(set(names or ()) - set(arrays))
    if lost:
        raise DatasetError(f"{where} has no array {lost[0]!r}; at its top are {sorted(opened.keys())}")
    for name, array in arrays.items():
        label = f"array {name!r} of {where}"
        check_type(label, array.dtype, array.ndim)
        _check_codecs(label, array)
        if not allow_missing:
            _check_chunks(label, array)
    return arrays


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


def _check_chunks(label: str, array: zarr.Array[Any]) -> None:
    """Raise DatasetError if the grid has chunks that are not stored: they would read as the fill value."""
    stored_chunks = array.shards or array.chunks
    extents = grid(array.shape, stored_chunks)
    stored = sync(_keys(array.store, array.path))
    missing, first = 0, ""
    for index in product(*(range(count) for count in extents)):
        key = array.metadata.encode_chunk_key(index)
        if key not in stored:
            missing += 1
            first = first or key
    if missing:
        raise DatasetError(
            f"{label}: {missing} of {prod(extents)} chunks are missing, first {first}; they "
            "would read as its fill value, pass allow_missing_chunks=True to accept that"
        )


async def _keys(store: Store, path: str) -> set[str]:
    prefix = f"{path}/" if path else ""
    return {key[len(prefix) :] async for key in store.list_prefix(prefix)}
