"""How large a bomb is, and a place where it must not go off."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

HUGE_BYTES = 128 << 20
MOST_BYTES = 8 << 20


@contextmanager
def little_memory(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """What is allocated inside stays below so many bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
