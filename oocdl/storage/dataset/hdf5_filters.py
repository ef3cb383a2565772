"""Checks what a stored chunk of HDF5 decodes to, before the library decodes it.

The library trusts a chunk: one that decodes to more than it should fills memory, and one that decodes to less
is read past its end, so that numbers are made of what lay there. Here each has to decode to just its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.storage.dataset.decoding import DecodedSizeError, inflate

DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
"""Filters by their registered numbers."""
FILTERS = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", LZF: "lzf"}
CHECKSUM_BYTES = 4


def refused(filters: Sequence[int]) -> str | None:
    """Why a row of filters is not read, as the end of a sentence; None if it is.

    >>> refused([2, 1, 3]) is None, refused([1, 1])
    (True, 'compresses twice')
    """
    unknown = [code for code in filters if code not in FILTERS]
    if unknown:
        return f"uses HDF5 filter {unknown[0]}; allowed are {', '.join(FILTERS.values())}"
    compressors = [place for place, code in enumerate(filters) if code in (DEFLATE, LZF)]
    if len(compressors) > 1:
        return "compresses twice"
    if compressors and SHUFFLE in filters[compressors[0] :]:
        return "shuffles what is compressed"
    return None


def check_chunk(filters: Sequence[int], skipped: int, data: bytes, chunk_bytes: int) -> None:
    """Raise ValueError unless stored ``data`` decode to ``chunk_bytes``.

    ``skipped`` has a bit for each of ``filters`` that was not applied, from the lowest on.
    """
    size, stored, compressor = chunk_bytes, len(data), None
    for place, code in enumerate(filters):
        if skipped >> place & 1 or code == SHUFFLE:
            continue
        if code in (DEFLATE, LZF):
            compressor = code
        elif compressor is None:
            size += CHECKSUM_BYTES
        else:
            stored -= CHECKSUM_BYTES
    if compressor == DEFLATE:
        found = len(inflate("zlib", memoryview(data)[:stored], size))
    else:
        found = stored if compressor is None else lzf_bytes(data, stored, size)
    if found != size:
        raise ValueError(f"it decodes to {found:,} bytes, not the {size:,} that were declared")


def lzf_bytes(data: bytes, stored: int, most: int) -> int:
    """What the first ``stored`` bytes of LZF data decode to. Raises DecodedSizeError for more than ``most``.

    A byte below 32 begins a run of literals, another one a reference to what came before, whose length has
    three bits, or those and a byte.

    >>> lzf_bytes(bytes([1, 7, 8, 0x40, 1, 0xE0, 20, 0]), 8, 64)
    35
    """
    at = total = 0
    while at < stored:
        control = data[at]
        if control < 32:
            total += control + 1
            at += control + 2
        elif control < 224:
            total += (control >> 5) + 2
            at += 2
        else:
            total += (data[at + 1] if at + 1 < stored else 0) + 9
            at += 3
        if total > most:
            raise DecodedSizeError(f"lzf would decode to more than the {most:,} bytes of a chunk")
    if at != stored:
        raise ValueError("lzf data ends too early")
    return total
