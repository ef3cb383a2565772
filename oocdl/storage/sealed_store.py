"""A folder as a Zarr store whose every read is verified: what zarr itself reads and writes goes here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import numpy as np
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from oocdl.errors import CorruptError, StoreError
from oocdl.graph.ir.array_layout import Array
from oocdl.storage.checksums import Record, read_verified, record_of
from oocdl.storage.files import reporting


class SealedStore(Store):
    """Reads what ``records`` say, by key, and nothing else; records what it writes.

    ``what`` names the array in errors. Raises CorruptError for a file that is lost or is not what was
    written, and, open for reading only, for a chunk that has no record: it is never the fill value. Raises
    StoreError instead if ``outdated`` says that newer versions of the run have replaced this one.
    """

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(
        self, root: Path, what: str, records: dict[str, Record], read_only: bool = True,
        outdated: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(read_only=read_only)
        self.root, self.what, self.records, self.outdated = root, what, records, outdated

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SealedStore) and (self.root, self.records) == (other.root, other.records)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes of a key, or a part of them, once all of them are verified."""
        data = await asyncio.to_thread(self.read, key)
        if data is None:
            return None
        match byte_range:
            case RangeByteRequest(start, end):
                data = data[start:end]
            case OffsetByteRequest(offset):
                data = data[offset:]
            case SuffixByteRequest(suffix):
                data = data[max(0, len(data) - suffix) :]
        return prototype.buffer.from_bytes(data.data)

    def read(self, key: str) -> Array | None:
        """Return the verified bytes of a key; None if the array has no such key."""
        record = self.records.get(key)
        if record is None:
            if self.read_only and key.split("/")[0].split(".")[0] == "c":
                raise CorruptError(f"{self.what} has no chunk {key} in {self.root}")
            return None
        what = f"{key} of {self.what} in {self.root}"
        # Made only once the file is known to have as many bytes.
        buffers = (np.empty(size, np.uint8) for size in (record.nbytes,))
        try:
            (data,) = read_verified(what, self.root / key, record, buffers)
        except CorruptError as error:
            if self.outdated is not None and self.outdated():
                raise StoreError(
                    f"{self.what} is gone, for the run was trained further: read it from the run again"
                ) from error
            raise
        return data

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        return key in self.records

    async def set(self, key: str, value: Buffer) -> None:
        """Write and record a key. Raises ResourceError if the disk is full, StoreError if it fails."""
        self._check_writable()
        await asyncio.to_thread(self._write, key, value.to_bytes())

    def _write(self, key: str, data: bytes) -> None:
        path = self.root / key
        with reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.records[key] = record_of(data)

    async def delete(self, key: str) -> None:
        self._check_writable()
        self.records.pop(key, None)
        (self.root / key).unlink(missing_ok=True)

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in sorted(self.records):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in sorted({key[len(start) :].split("/")[0] async for key in self.list_prefix(start)}):
            yield name
