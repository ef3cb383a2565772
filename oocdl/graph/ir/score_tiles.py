"""Cuts the scores of attention [batch, groups, heads, queries, keys] into tiles, which are never stored.

Engines compute one tile after the other; the rule of the operator bounds its scratch by the same cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from oocdl.graph.ir.graph import Attrs, Shape
from oocdl.graph.ir.index import Range

Band = tuple[int | None, int | None]
"""Query i sees the keys from ``i + band[0]`` up to and including ``i + band[1]``; None: no end."""

NO_BAND: Band = (None, None)
TILE_ELEMENTS = 1 << 18
"""Scores of a tile: 1 MiB of float32, which stays in a core's cache."""
MOST_KEYS = 1024
"""Keys of a tile: a product of fewer rows than columns reads its columns too often."""
MOST_MASKS = 4
"""Masks that an attention may have, uniform numbers by which weights are dropped included."""
BANDED_QUERIES = 256
"""The most queries of a tile where there is a band: the fewer, the fewer keys that they do not see."""
LEAST_ALONE = 1 << 18
"""Scores of a pair of batch and group from which on its products are computed by themselves; smaller ones
are computed many at a time, as a call costs more than they do."""


@dataclass(frozen=True)
class Tiling:
    """Numbers of batches, groups, queries (of all heads of a group) and keys of a tile."""

    batch: int
    groups: int
    queries: int
    keys: int


def drops(attrs: Attrs) -> bool:
    """Whether weights of attention are dropped, by uniform numbers that are its last operand."""
    return bool(attrs.get("ratio", 0.0) > 0)


def tiling(q: Shape, keys: int, most_keys: int = MOST_KEYS, band: Band = NO_BAND) -> Tiling:
    """Cut the scores of queries of shape ``q`` [batch, groups, heads, queries, size] with ``keys`` keys.

    >>> tiling((2, 3, 1, 4096, 64), 4096)
    Tiling(batch=1, groups=1, queries=256, keys=1024)
    >>> tiling((2, 3, 1, 49, 32), 49)
    Tiling(batch=2, groups=3, queries=49, keys=49)
    """
    batch, groups, heads, queries, _ = q
    columns = min(keys, most_keys)
    rows = max(1, min(queries, TILE_ELEMENTS // (heads * columns)))
    rows = rows if band == NO_BAND else min(rows, BANDED_QUERIES)
    alone = heads * rows * columns
    pairs = 1 if alone >= LEAST_ALONE else TILE_ELEMENTS // alone
    if pairs < groups:
        return Tiling(1, pairs, rows, columns)
    return Tiling(min(batch, pairs // groups), groups, rows, columns)


def parts(extent: int, size: int) -> Iterator[Range]:
    """Cut ``range(extent)`` into ranges of ``size``, the last of them smaller."""
    return ((start, min(start + size, extent)) for start in range(0, extent, size))


def pairs(q: Shape, found: Tiling) -> Iterator[tuple[slice, slice]]:
    """Yield the batches and groups of tiles."""
    for batch, groups in product(parts(q[0], found.batch), parts(q[1], found.groups)):
        yield slice(*batch), slice(*groups)


def seen_keys(band: Band, rows: Range, keys: int) -> Range:
    """Return the range of keys, which may be empty, outside of which none of ``rows`` sees any.

    >>> seen_keys((None, 0), (4, 6), 9), seen_keys((-2, 2), (4, 6), 9)
    ((0, 6), (2, 8))
    """
    low, high = band
    start = 0 if low is None else max(0, rows[0] + low)
    stop = keys if high is None else min(keys, rows[1] + high)
    return min(start, max(stop, 0)), max(stop, 0)


def computed_tiles(q: Shape, keys: int, band: Band) -> tuple[int, int]:
    """Return how many tiles are computed one after another, and how many scores they have together.

    >>> computed_tiles((4, 8, 1, 512, 64), 512, (None, 0)), computed_tiles((1, 2, 1, 1024, 64), 1024, NO_BAND)
    ((32, 6291456), (8, 2097152))
    """
    tile = tiling(q, keys, band=band)
    alike = -(-q[0] // tile.batch) * -(-q[1] // tile.groups)
    tiles = scores = 0
    for rows in parts(q[3], tile.queries):
        start, stop = seen_keys(band, rows, keys)
        tiles += alike * -(-(stop - start) // tile.keys)
        scores += q[0] * q[1] * q[2] * (rows[1] - rows[0]) * (stop - start)
    return tiles, scores


def sees_all(band: Band, rows: Range, keys: Range) -> bool:
    """Whether each of ``rows`` sees each of ``keys``."""
    low, high = band
    return (low is None or rows[1] - 1 + low <= keys[0]) and (high is None or keys[1] - 1 <= rows[0] + high)


def seen_scores(band: Band, queries: int, keys: int) -> int:
    """Return how many scores ``queries`` queries and ``keys`` keys have that are seen.

    >>> seen_scores((None, 0), 3, 3), seen_scores((None, None), 3, 3)
    (6, 9)
    """
    low, high = band
    places = np.arange(queries)
    start = 0 if low is None else np.maximum(places + low, 0)
    stop = keys if high is None else np.minimum(places + high + 1, keys)
    return int(np.maximum(np.broadcast_to(stop - start, places.shape), 0).sum())
