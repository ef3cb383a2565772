"""What tells a dataset from one that was changed: its chunks with sizes and times, and some of their content.

What differs in times alone is either a copy or a change. Where all stored bytes are few, their checksum
decides. Else a copy is what has other times everywhere, and equal content wherever that is looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from oocdl.errors import DatasetError
from oocdl.storage.dataset.chunk_store import ChunkList, row_ranges
from oocdl.storage.dataset.data_array import DataArray
from oocdl.storage.dataset.dataset import Dataset
from oocdl.storage.dataset.sample_stack import StackedSource

Facts = Mapping[str, Any]  # what ``identity`` returns
RANGES = 64  # the most ranges of samples that are told apart
PIECES = 192  # about so many pieces of stored bytes are compared at least, where they are not compared whole
NOTHING = hashlib.blake2b(digest_size=6).hexdigest()  # the digest of a range without chunks
WHOLE_BYTES, WHOLE_CHUNKS = 16 << 20, 4096  # an array that stores no more is compared whole
SAMPLED_EXTENT = 8  # of the boxes whose values are read, in the middle of three samples


@dataclass(frozen=True)
class Comparison:
    """How an array differs from what it was, in words."""

    changed: str | None = None  # it is not the same
    copied: str | None = None  # it is taken for a copy of what it was


def identity(array: DataArray) -> dict[str, Any]:
    """Return what tells an array from another, as plain data. Reads some of its content."""
    known, source = array.known, array.source
    ranges = list(row_ranges(known.grid[0], RANGES))
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "fill": str(array.fill_value) if known.missing else None,
        "chunks": len(known.numbers),
        "sizes": _digests(known, ranges, (known.numbers, known.sizes)),
        "marks": _digests(known, ranges, (known.marks,)),
        "tells": source.tells,
        "file": list(source.file_mark),
        "content": _content(array, ranges),
        **({"samples": source.digest} if isinstance(source, StackedSource) else {}),
        "values": _values(array),
    }


def compare(array: DataArray, then: Facts, now: Facts) -> Comparison:
    """Compare the ``identity`` that an array had with the one that it has."""
    label = f"array '{array.name}'"
    if then["dtype"] != now["dtype"] or then["shape"][1:] != now["shape"][1:]:
        was, is_now = (f"{facts['dtype']} {facts['shape']}" for facts in (then, now))
        return Comparison(f"{label} was {was}, is {is_now}")
    if then["shape"] != now["shape"]:
        return Comparison(f"{label} had {then['shape'][0]} samples, has {now['shape'][0]}")
    if then.get("samples") != now.get("samples"):
        return Comparison(f"{label} has samples of other names or sizes")
    if then["fill"] != now["fill"] and then["chunks"] == now["chunks"]:
        return Comparison(f"{label} had the fill value {then['fill']}, has {now['fill']}")
    if then["sizes"] != now["sizes"]:
        was, are = then["chunks"], now["chunks"]
        where = _where(array, then["sizes"], now["sizes"])
        counted = "" if was == are else f" ({was:,} chunks, now {are:,})"
        return Comparison(f"{label} stores other chunks of {where}{counted}")
    if then["values"] != now["values"]:
        return Comparison(f"{label} has other values")
    if (then["marks"], then["file"]) == (now["marks"], now["file"]):
        return Comparison()
    return _compare_times(label, then, now, array)


def check_same(dataset: Dataset, identities: Mapping[str, Facts]) -> None:
    """Raise DatasetError if an array is not what another process has found it to be; copies will do."""
    for name, then in identities.items():
        array = dataset.arrays[name]
        changed = compare(array, then, identity(array)).changed
        if changed:
            raise DatasetError(f"{dataset.where} is not the same for the client and its workers: {changed}")


def _compare_times(label: str, then: Facts, now: Facts, array: DataArray) -> Comparison:
    """Compare arrays of equal sizes whose chunks have other times, or checksums."""
    where = _where(array, then["marks"], now["marks"])
    if then["tells"] != now["tells"] or now["content"] != then["content"]:
        return Comparison(f"{label} has other content in {where}")
    if _is_small(array.known) and now["content"]:
        return Comparison()  # all of it is equal
    partly = any(old == new != NOTHING for old, new in zip(then["marks"], now["marks"], strict=True))
    if now["tells"] == "checksum" or (now["tells"] == "time" and partly):
        return Comparison(f"{label} was changed in {where}, by its chunks' {now['tells']}s")
    if now["file"][0] and now["file"][0] == then["file"][0]:
        return Comparison(f"{label}: its file was written to; a copy of it would be compared by content")
    return Comparison(
        copied=f"{label} has other times and equal sizes everywhere, and equal content wherever that was "
        "looked at: it is taken for a copy. If it was made anew with other values, use resume='restart'"
    )


def _is_small(known: ChunkList) -> bool:
    return len(known.sizes) <= WHOLE_CHUNKS and int(known.sizes.sum()) <= WHOLE_BYTES


def _digests(known: ChunkList, ranges: Sequence[tuple[int, int]], columns: Sequence[Any]) -> list[str]:
    inside, found = prod(known.grid[1:]), []
    for start, stop in ranges:
        low, high = np.searchsorted(known.numbers, (start * inside, stop * inside))
        digest = hashlib.blake2b(digest_size=6)
        for column in columns:
            digest.update(column[low:high].tobytes())
        found.append(digest.hexdigest())
    return found


def _content(array: DataArray, ranges: Sequence[tuple[int, int]]) -> str:
    """A digest of stored bytes: of all if they are few, else of parts of one chunk of each range."""
    known, digest = array.known, hashlib.blake2b(digest_size=12)
    places, pieces = np.arange(len(known.numbers)), WHOLE_BYTES
    if not _is_small(known):
        inside = prod(known.grid[1:])
        starts = np.searchsorted(known.numbers, [start * inside for start, _ in ranges])
        places = np.unique(starts[starts < len(places)])
        pieces = max(3, PIECES // len(places))
    read = 0
    for place in places:
        for part in array.source.content(int(place), pieces):
            digest.update(part)
            read += len(part)
    return digest.hexdigest() if read else ""


def _values(array: DataArray) -> str:
    """A digest of a few values: those in the middle of three samples."""
    digest, half = hashlib.blake2b(digest_size=6), SAMPLED_EXTENT // 2
    middle = tuple((max(0, e // 2 - half), min(e, e // 2 + half + 1)) for e in array.shape[1:])
    for row in sorted({0, array.shape[0] // 2, array.shape[0] - 1}):
        digest.update(array.read(((row, row + 1), *middle)).tobytes())
    return digest.hexdigest()


def _where(array: DataArray, then: Sequence[str], now: Sequence[str]) -> str:
    """Which samples the ranges that differ hold."""
    samples, rows = array.shape[0], array.known.grid[0]
    extent = array.stored_chunks[0]
    if len(then) != len(now):
        return "all samples"
    pairs = zip(row_ranges(rows, RANGES), then, now, strict=True)
    ranges = [found for found, old, new in pairs if old != new]
    differing = [(low * extent, min(high * extent, samples) - 1) for low, high in ranges]
    texts = [f"{low} to {high}" if high > low else str(low) for low, high in differing]
    more = f" and {len(texts) - 3} more ranges" if len(texts) > 3 else ""
    return f"samples {', '.join(texts[:3])}{more}" if 0 < len(texts) < len(now) else "all samples"
