"""Checksums of what is stored: of arrays, whole or block by block, and texts that hold their digest.

They are taken from the memory that is written, and compared with the memory that was read into: what is
used is what was verified. Runs have crc32c, as Zarr has it; sums of the spill stay in memory, and are CRC-32
by ISA-L, which takes half of the time and leaves other threads running.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from oocdl.errors import CorruptError
from oocdl.graph.ir.array_layout import PAGE_BYTES, Array
from oocdl.storage.files import as_bytes, regular

LEAST_BLOCK_BYTES = 64 << 10  # minimum size of a block: for smaller ones the calls cost more than the sums
MOST_BLOCK_BYTES = 256 << 10


class Record(NamedTuple):
    """Length in bytes and crc32c that a stored file must have."""

    nbytes: int
    crc: int


def record_of(data: bytes) -> Record:
    """Return the record of these bytes."""
    return Record(len(data), int(google_crc32c.value(data)))


def read_verified(what: str, path: Path, record: Record, buffers: Iterable[Array]) -> Iterator[Array]:
    """Read a file into arrays, one after the other, and yield each; the last may be filled in part.

    Raises CorruptError, which begins with ``what``, for a file that is lost or, at its end, for another one.
    """
    crc = 0
    try:
        with open(path, "rb", opener=regular) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes != record.nbytes:
                raise CorruptError(f"{what} has {nbytes} bytes, not {record.nbytes}")
            for buffer in buffers:
                count = file.readinto(as_bytes(buffer).data)
                crc = crc32c(as_bytes(buffer)[:count], crc)
                yield buffer
    except OSError as error:
        raise CorruptError(f"{what} is lost: {error.strerror or error}") from error
    if crc != record.crc:
        raise CorruptError(f"{what} is not what was written")


def why_wrong(path: Path, record: Record) -> str | None:
    """Read a file, and return why it is not what was written; None if it is. Takes memory for a block."""
    blocks = repeat(np.empty(MOST_BLOCK_BYTES, np.uint8), -(-record.nbytes // MOST_BLOCK_BYTES))
    try:
        deque(read_verified(str(path), path, record, blocks), maxlen=0)
    except CorruptError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class BlockSums:
    """The CRC-32 of each block of a file; the last block may be shorter."""

    nbytes: int  # size of the file
    block_bytes: int  # size of each block, in whole pages
    crcs: npt.NDArray[np.uint32]

    def wrong(self, start: int, runs: Sequence[Array]) -> tuple[int, int] | None:
        """Return the bytes (from, to) of the first block that is not what was written; None if all are.

        ``runs`` follow each other in the file; where they begin, ``start``, and end are borders of blocks.
        """
        first = start // self.block_bytes
        for number, crc in enumerate(_crcs(runs, self.block_bytes), first):
            if crc != self.crcs[number]:
                low = number * self.block_bytes
                return low, min(low + self.block_bytes, self.nbytes)
        return None


def block_sums(runs: Sequence[Array], block_bytes: int) -> BlockSums:
    """Return the checksums of a file that consists of these contiguous arrays, one after the other."""
    crcs = np.fromiter(_crcs(runs, block_bytes), np.uint32)
    return BlockSums(sum(run.nbytes for run in runs), block_bytes, crcs)


def block_bytes_for(row_bytes: int) -> int:
    """Return the size of blocks for a file of rows: a row is whole blocks, or a block is whole rows.

    That is where a row is whole pages. So a strip of rows is verified without reading much more than it.

    >>> block_bytes_for(512 << 10) >> 10, block_bytes_for(36 << 10) >> 10, block_bytes_for(1000) >> 10
    (256, 108, 64)
    """
    pages, rest = divmod(row_bytes, PAGE_BYTES)
    if rest or not pages:
        return LEAST_BLOCK_BYTES
    if row_bytes < LEAST_BLOCK_BYTES:
        return row_bytes * (2 * LEAST_BLOCK_BYTES // row_bytes)
    most = MOST_BLOCK_BYTES // PAGE_BYTES
    block = PAGE_BYTES * max(count for count in range(1, most + 1) if pages % count == 0)
    return block if block >= LEAST_BLOCK_BYTES else LEAST_BLOCK_BYTES


def crc32c(array: Array, before: int = 0) -> int:
    """Return the crc32c of a C-contiguous array's memory, after bytes whose crc32c is ``before``."""
    view = as_bytes(array).view()
    view.flags.writeable = False  # google_crc32c takes nothing else
    return int(google_crc32c.extend(before, view))


def sealed(kind: str, body: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Write plain data as JSON that holds its own SHA-256: ``{"digest": ..., kind: body}``.

    >>> unsealed("run", sealed("run", {"steps": 3}))
    {'steps': 3}
    """
    text = json.dumps(body, default=default)
    return f'{{"digest": "{hashlib.sha256(text.encode()).hexdigest()}", "{kind}": {text}}}\n'


def unsealed(kind: str, text: str) -> Any:
    """Return the data of what ``sealed`` wrote; ValueError if a single character of it is another."""
    found = re.fullmatch(rf'\{{"digest": "([0-9a-f]{{64}})", "{kind}": (.*)\}}\n', text, re.DOTALL)
    if found is None:
        raise ValueError("it is not in the form in which this version of oocdl writes it")
    if hashlib.sha256(found[2].encode()).hexdigest() != found[1]:
        raise ValueError("its digest does not match")
    try:
        return json.loads(found[2])
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def digest_of(text: str) -> str:
    """Return the digest that a sealed text holds."""
    return text[len('{"digest": "') :][:64]


def _crcs(runs: Sequence[Array], block_bytes: int) -> Iterator[int]:
    crc, left = 0, block_bytes
    for run in runs:
        # A run may be a single page, and there are thousands: this is all that is done for one.
        if run.nbytes < left:
            crc = isal_zlib.crc32(run, crc)
            left -= run.nbytes
            continue
        view, done = as_bytes(run), 0
        while done < view.size:
            part = view[done : done + left]
            crc = isal_zlib.crc32(part, crc)
            done += part.size
            left -= part.size
            if not left:
                yield crc
                crc, left = 0, block_bytes
    if left < block_bytes:
        yield crc
