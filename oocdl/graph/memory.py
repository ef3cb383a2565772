"""What arrays take in memory: the one rule that plans and the RAM tier share."""

from __future__ import annotations

PAGE_BYTES = 4096
SMALL_BYTES = 32 << 10
"""Smaller arrays come from the heap: a page each would be mostly empty."""


def footprint(nbytes: int) -> int:
    """Bytes of memory that an array of ``nbytes`` takes in the tier: whole pages.

    >>> footprint(100), footprint(100_000)
    (100, 102400)
    """
    return nbytes if nbytes < SMALL_BYTES else -(-nbytes // PAGE_BYTES) * PAGE_BYTES
