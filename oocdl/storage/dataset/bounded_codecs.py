"""Compressors that decode no more than a chunk can hold: a few bytes could else fill all memory.

What a chunk decodes to follows from its declared shape. Blosc, LZ4 and most Zstandard frames say how much
they decode to, and allocate just that; of other Zstandard frames the blocks say how much it is at most; zlib
and gzip stop when told to.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer

ZSTD_FRAME, ZSTD_SKIPPABLE = 0xFD2FB528, 0x184D2A50
"""First four bytes of a frame, and of one that holds no data (its last four bits are free). RFC 8878."""
ZSTD_BLOCK_BYTES = 128 << 10
"""The most that a compressed block decodes to."""
SLACK_BYTES = 64 << 10
DEFLATED = {"zlib": zlib.MAX_WBITS, "gzip": 16 + zlib.MAX_WBITS}
"""Codecs of zlib, with the ``wbits`` of their format."""


class DecodedSizeError(ValueError):
    """A chunk would decode to more than its array declares."""


def most_bytes(chunk_bytes: int) -> int:
    """The most that any stage of encoding makes of a chunk of so many bytes.

    Compressors make what they cannot compress a little larger, and filters may stand before them.
    """
    return chunk_bytes + chunk_bytes // 8 + SLACK_BYTES


def decoded_bytes(name: str, data: memoryview) -> int | None:
    """How much a chunk decodes to, or an upper bound, by its header; None where there is no header."""
    if name == "blosc":
        return int.from_bytes(data[4:8], "little")
    if name == "lz4":
        return int.from_bytes(data[:4], "little")
    return _zstd_bytes(data) if name == "zstd" else None


def _zstd_bytes(data: memoryview) -> int:
    """What the frames of Zstandard data decode to at most.

    Where the first frame says its size, the decoder allocates that and takes no more.
    """
    total = at = 0
    while at + 4 <= len(data):
        magic = int.from_bytes(data[at : at + 4], "little")
        if magic & ~0xF == ZSTD_SKIPPABLE:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        if magic != ZSTD_FRAME or at + 5 > len(data):
            break  # what is no frame is for the decoder to refuse
        flags = data[at + 4]
        single, size_code = flags >> 5 & 1, flags >> 6
        window_bytes = 1 - single
        place = at + 5 + window_bytes + (0, 1, 2, 4)[flags & 3]
        size_bytes = (single, 2, 4, 8)[size_code]
        if size_bytes:
            size = int.from_bytes(data[place : place + size_bytes], "little")
            return total + size + (256 if size_bytes == 2 else 0)
        decoded, at = _zstd_blocks(data, place)
        total += decoded
        at += 4 * (flags >> 2 & 1)  # a checksum
    return total


def _zstd_blocks(data: memoryview, at: int) -> tuple[int, int]:
    """What the blocks of a frame decode to at most, and where they end."""
    total, last = 0, False
    while not last and at + 3 <= len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        total += size if kind < 2 else ZSTD_BLOCK_BYTES
        at += 3 + (1 if kind == 1 else size)
    return total, at


def check_decoded(name: str, data: memoryview, most: int) -> None:
    """Raise DecodedSizeError if a chunk says that it decodes to more than ``most`` bytes."""
    size = decoded_bytes(name, data)
    # Blocks of frames without a size are counted whole, though the last is shorter.
    if size is not None and size > most + ZSTD_BLOCK_BYTES:
        raise DecodedSizeError(_too_large(name, size, most))


def inflate(name: str, data: Any, most: int) -> bytes:
    """Decode zlib or gzip data, of one member or several; DecodedSizeError if there is more than ``most``."""
    found, left = [], most
    view = memoryview(data).cast("B")
    while len(view):
        decoder = zlib.decompressobj(DEFLATED[name])
        found.append(decoder.decompress(view, left + 1))
        left -= len(found[-1])
        if left < 0:
            raise DecodedSizeError(_too_large(name, most + 1, most))
        if not decoder.eof:
            raise ValueError(f"{name} data ends too early")
        view = memoryview(decoder.unused_data.lstrip(b"\0"))  # gzip files may be padded
    return found[0] if len(found) == 1 else b"".join(found)


def _too_large(name: str, size: int, most: int) -> str:
    return f"{name} would decode to {size:,} bytes or more, the declared chunk takes at most {most:,}"


class BoundedBytesCodec(BytesBytesCodec):
    """A compressor of Zarr format 3."""

    is_fixed_size = False

    def __init__(self, codec: BytesBytesCodec, name: str) -> None:
        self.codec, self.name = codec, name

    def to_dict(self) -> Any:
        """The metadata of the compressor itself."""
        return self.codec.to_dict()

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> BoundedBytesCodec:
        """The same around the compressor that fits the array."""
        return BoundedBytesCodec(self.codec.evolve_from_array_spec(array_spec), self.name)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """As the compressor does."""
        return self.codec.compute_encoded_size(input_byte_length, chunk_spec)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        most = most_bytes(prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize)
        data = chunk_data.as_numpy_array().view(np.uint8).data
        if self.name in DEFLATED:
            inflated = await asyncio.to_thread(inflate, self.name, data, most)
            return chunk_spec.prototype.buffer.from_bytes(inflated)
        check_decoded(self.name, data, most)
        return await self.codec._decode_single(chunk_data, chunk_spec)


def bounded_v3(codecs: Any, names: Any) -> tuple[Any, ...]:
    """The codecs of an array of format 3, compressors among them bounded; ``names``: metadata of them."""
    made = []
    for codec, entry in zip(codecs, names, strict=True):
        if isinstance(codec, ShardingCodec):
            inner = bounded_v3(codec.codecs, entry["configuration"]["codecs"])
            codec = replace(codec, codecs=inner)
        elif isinstance(codec, BytesBytesCodec) and entry["name"] != "crc32c":
            codec = BoundedBytesCodec(codec, entry["name"])
        made.append(codec)
    return tuple(made)


class BoundedCodec(Codec):  # type: ignore[misc]
    """A compressor of Zarr format 2."""

    codec_id = "bounded"

    def __init__(self, codec: Any, most: int) -> None:
        self.codec, self.most, self.name = codec, most, codec.codec_id

    def encode(self, buf: Any) -> Any:
        """As the compressor does."""
        return self.codec.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a chunk; DecodedSizeError if there is more in it than the array declares."""
        data = ensure_contiguous_ndarray(buf).view(np.uint8).data
        if self.name in DEFLATED:
            return inflate(self.name, data, self.most)
        check_decoded(self.name, data, self.most)
        return self.codec.decode(buf, out)

    def get_config(self) -> Any:
        """The metadata of the compressor itself."""
        return self.codec.get_config()


def bounded_v2(codec: Any, chunk_bytes: int) -> Any:
    """A compressor or filter of format 2, bounded; None for None."""
    return None if codec is None else BoundedCodec(codec, most_bytes(chunk_bytes))
