"""Reads what lies in one chunk of a folder, by the thread that asks, and keeps what was decoded last.

The library hands each call to an event loop of its own: 0.3 ms for a chunk of a few KiB, which takes 0.03
here. Volumes are read piece by piece, and each piece of a chunk would decode all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numcodecs
import numpy as np
import numpy.typing as npt
import zarr

from oocdl.storage.dataset.bounded_codecs import bounded_v2
from oocdl.storage.dataset.checked_store import CheckedStore, Files

Array = npt.NDArray[Any]

COMPRESSORS = frozenset({"zstd", "blosc", "gzip"})
"""Compressors of format 3 that ``numcodecs`` has by the same name."""


@dataclass(eq=False)
class LastChunk:
    """The chunk that was decoded last, of all arrays of a dataset: it leaves before another comes.

    So it takes no more than reading one anyway does.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    of: tuple[str, str] | None = None
    """Label of its array, and its name."""
    array: Array | None = None

    def leave(self) -> None:
        """Forget it."""
        with self.lock:
            self.of = self.array = None


@dataclass(frozen=True, eq=False)
class ChunkReader:
    """Reads chunks of one array, whose files have to be as they were listed."""

    files: Files
    checked: CheckedStore
    last: LastChunk
    decode: Callable[[bytes], Any]
    dtype: np.dtype[Any]
    """Type of the stored bytes."""
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    """Order of the elements of a chunk."""

    def read(self, where: tuple[slice, ...]) -> Array | None:
        """A box of the array, read-only; None if it is not in one chunk, or that is not stored.

        Raises DatasetError if the chunk is not what it was; what the decoder raises.
        """
        index = tuple(part.start // extent for part, extent in zip(where, self.shape, strict=True))
        ends = tuple((part.stop - 1) // extent for part, extent in zip(where, self.shape, strict=True))
        if index != ends:
            return None
        name = self.files.keys.key_at(index)
        mark = self.files.mark(name)
        self.checked.check(name, mark, mark)
        if mark is None:
            return None
        begins = (at * extent for at, extent in zip(index, self.shape, strict=True))
        box = [slice(part.start - at, part.stop - at) for part, at in zip(where, begins, strict=True)]
        with self.last.lock:
            if self.last.of != (self.checked.label, name) or self.last.array is None:
                self.last.of = self.last.array = None
                before, stored, after = self.files.read(name, 0, mark[0])
                self.checked.check(name, before, after)
                self.last.array = self._decoded(stored)
                self.last.of = self.checked.label, name
            return self.last.array[tuple(box)]

    def _decoded(self, stored: bytes) -> Array:
        found = np.frombuffer(self.decode(stored), self.dtype).reshape(self.shape, order=self.order)
        found.flags.writeable = False
        return found


def chunk_reader(array: zarr.Array[Any], checked: CheckedStore, last: LastChunk) -> ChunkReader | None:
    """A reader of an array whose chunks are files of plain bytes, or of such and a compressor; else None."""
    metadata: Any = array.metadata
    files, dtype = checked.chunks, array.dtype
    if not isinstance(files, Files):
        return None
    order: Literal["C", "F"] = "C"
    if metadata.zarr_format == 2:
        if metadata.filters:
            return None
        codec, order = metadata.compressor, metadata.order
    else:
        serializer, *compressors = metadata.to_dict()["codecs"]
        names = [entry["name"] for entry in compressors]
        if serializer["name"] != "bytes" or len(names) > 1 or not COMPRESSORS.issuperset(names):
            return None
        codec = numcodecs.get_codec({"id": names[0]}) if names else None
        endian = serializer.get("configuration", {}).get("endian")
        dtype = dtype if endian is None else dtype.newbyteorder(endian)
    bounded = bounded_v2(codec, prod(array.chunks) * dtype.itemsize)
    decode = bytes if bounded is None else bounded.decode
    return ChunkReader(files, checked, last, decode, dtype, array.chunks, order)
