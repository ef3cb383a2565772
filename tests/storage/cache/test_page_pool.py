"""Pages of arrays: used again, and counted as the process' own only once they are written."""

from __future__ import annotations

import numpy as np

from oocdl.storage.cache.page_pool import HUGE_PAGE_BYTES, Pool

MIB = 1 << 20


def test_pages_are_touched_as_they_are_written() -> None:
    pool = Pool(1 << 30)
    array = pool.empty((8 * MIB,), np.uint8)
    assert (pool.mapped_bytes, pool.touched_bytes) == (8 * MIB, 0)
    array[0] = 1
    assert 0 < pool.touched_bytes <= HUGE_PAGE_BYTES
    array[...] = 1
    assert pool.touched_bytes == 8 * MIB
    del array
    assert pool.touched_bytes == 8 * MIB  # kept for the next one
    larger = pool.empty((10 * MIB,), np.uint8)
    assert (pool.mapped_bytes, pool.touched_bytes) == (10 * MIB, 8 * MIB)
    del larger
    pool.shrink(0)
    assert (pool.mapped_bytes, pool.touched_bytes) == (0, 0)
