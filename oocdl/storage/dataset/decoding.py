"""Makes an array of the stored bytes of a chunk, which decode to just what its array declares.

A compressor decodes into a buffer of that size, so no chunk takes more memory, whatever stands in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numcodecs
import numpy as np

from oocdl.graph.ir.array_layout import Array

Shape = tuple[int, ...]

DEFLATED = {"zlib": zlib.MAX_WBITS, "gzip": 16 + zlib.MAX_WBITS}  # codecs of zlib -> ``wbits``
COMPRESSORS = frozenset({"blosc", "zstd", "lz4", *DEFLATED})
ADDED_BYTES = {"crc32c": 4, "shuffle": 0}  # what the other codecs that are read add to a chunk
V3 = frozenset({"blosc", "zstd", "gzip", "crc32c"})  # of bytes, as ``numcodecs`` calls them
SLACK_BYTES = 64 << 10


def most_bytes(chunk_bytes: int) -> int:
    """Maximum stored bytes of a chunk: compressors make what they cannot compress a little larger."""
    return chunk_bytes + chunk_bytes // 8 + SLACK_BYTES


def inflate(name: str, data: Any, most: int) -> bytes:
    """Decode zlib or gzip data, of one member or several; ValueError if there is more than ``most``."""
    found, left = [], most
    view = memoryview(data).cast("B")
    while len(view):
        decoder = zlib.decompressobj(DEFLATED[name])
        found.append(decoder.decompress(view, left + 1))
        left -= len(found[-1])
        if left < 0:
            raise ValueError(f"{name} would decode to more than the {most:,} bytes of a chunk")
        if not decoder.eof:
            raise ValueError(f"{name} data ends too early")
        view = memoryview(decoder.unused_data.lstrip(b"\0"))  # gzip files may be padded
    return found[0] if len(found) == 1 else b"".join(found)


class Codec(NamedTuple):
    """A codec of ``numcodecs``; the bytes that it was given vary behind a compressor."""

    name: str
    codec: Any
    nbytes: int | None

    def undo(self, data: Any) -> Any:
        """Return what it was given. What this raises says what is wrong with the data."""
        if self.name not in COMPRESSORS:
            return self.codec.decode(data)
        assert self.nbytes is not None
        if self.name in DEFLATED:
            return inflate(self.name, data, self.nbytes)
        target = np.empty(self.nbytes, np.uint8)
        try:  # of a buffer that is too large, decoders do not tell: one of a byte less has to be too small
            self.codec.decode(data, target[:-1])
        except (ValueError, RuntimeError):
            return self.codec.decode(data, target)
        raise ValueError(f"{self.name} data decode to fewer than the {self.nbytes:,} bytes of a chunk")


@dataclass(frozen=True)
class Decoder:
    """Makes arrays of the chunks of one array."""

    dtype: np.dtype[Any]  # type of the stored elements
    shape: Shape  # extents of a chunk in the order in which it is stored
    axes: Shape  # axes of the array among those of ``shape``
    codecs: tuple[Codec, ...]  # the last that was applied comes first
    nbytes: int | None  # stored bytes; None where they vary, as a compressor is among the codecs

    def __call__(self, stored: Any) -> Array:
        """Decode a chunk into an array that is not to be written to. Raises ValueError, or what codecs do."""
        for codec in self.codecs:
            stored = codec.undo(stored)
        made = np.frombuffer(stored, self.dtype).reshape(self.shape).transpose(self.axes)
        made.flags.writeable = False
        return made


def decoder_v2(shape: Shape, dtype: np.dtype[Any], metadata: Any) -> Decoder:
    """The decoder of an array of Zarr format 2. Raises ValueError for codecs that are not read."""
    row = [(codec.codec_id, codec) for codec in (*(metadata.filters or ()), metadata.compressor) if codec]
    axes = range(len(shape)) if metadata.order == "C" else reversed(range(len(shape)))
    return _decoder(shape, dtype, tuple(axes), row)


def decoder_v3(shape: Shape, dtype: np.dtype[Any], entries: Sequence[Mapping[str, Any]]) -> Decoder:
    """Return the decoder of a format 3 array, or of the chunks in its shards. Raises as ``decoder_v2``."""
    names = [str(entry["name"]) for entry in entries]
    serializer = names.index("bytes") if "bytes" in names else len(names)
    order = tuple(range(len(shape)))
    for name, entry in zip(names[:serializer], entries, strict=False):
        if name != "transpose":
            raise ValueError(f"codec {name!r}")
        order = tuple(order[axis] for axis in entry["configuration"]["order"])
    endian = entries[serializer].get("configuration", {}).get("endian")
    after = names[serializer + 1 :]
    row = [(name, numcodecs.get_codec({"id": name}) if name in V3 else None) for name in after]
    return _decoder(shape, dtype.newbyteorder(endian or "="), order, row)


def _decoder(shape: Shape, dtype: np.dtype[Any], order: Shape, row: Sequence[tuple[str, Any]]) -> Decoder:
    nbytes: int | None = prod(shape) * dtype.itemsize
    codecs: list[Codec] = []
    for name, codec in row:
        if codec is None or name not in COMPRESSORS | ADDED_BYTES.keys():
            raise ValueError(f"codec {name!r}")
        if name in COMPRESSORS and nbytes is None:
            raise ValueError("two compressors")
        codecs.insert(0, Codec(name, codec, nbytes))
        nbytes = None if name in COMPRESSORS or nbytes is None else nbytes + ADDED_BYTES[name]
    axes = tuple(order.index(axis) for axis in range(len(order)))
    return Decoder(dtype, tuple(shape[axis] for axis in order), axes, tuple(codecs), nbytes)
