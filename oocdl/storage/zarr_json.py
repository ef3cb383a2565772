"""The few Zarr v3 files that are written by hand: array and group metadata, chunk names.

The metadata are what the zarr library makes, letter by letter: a run verifies them. Arrays are uncompressed
little-endian bytes, so a chunk file is the array's memory. Chunk names use the separator ``.`` (``c.0.1``),
which the specification allows: one folder for each array, so one folder to make and to sync.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from oocdl.graph.ir.index import Region

Attributes = Mapping[str, Any]
UNFINISHED = "oocdl_unfinished"  # attribute of a group that is still being written: it is no dataset yet
CONVERSION = "a conversion"  # its value for what ``oocdl.data`` writes; of a prediction it is another


def array_json(
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: np.dtype[Any],
    attributes: Attributes | None = None,
    order: tuple[int, ...] | None = None,
) -> str:
    """Return the ``zarr.json`` of an array; ``order`` lists the axes of a chunk's file, outermost first."""
    stored = dtype if dtype.kind in "biufc" else np.dtype(f"u{dtype.itemsize}")
    # Zarr has no name for bfloat16: its bits are kept as integers.
    named = {} if stored == dtype else {"dtype": dtype.name}
    endian = {"configuration": {"endian": "little"}} if stored.itemsize > 1 else {}
    moved = [] if order is None else [{"name": "transpose", "configuration": {"order": list(order)}}]
    document = {
        "shape": list(shape),
        "data_type": stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": np.zeros((), stored).item(),
        "codecs": [*moved, {"name": "bytes", **endian}],
        "attributes": {**named, **(attributes or {})},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
    return json.dumps(document)


def group_json(attributes: Attributes | None = None) -> str:
    """Return the ``zarr.json`` of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})})


def chunk_key(index: tuple[int, ...]) -> str:
    """Return the file name of a chunk.

    >>> chunk_key((0, 12)), chunk_key(())
    ('c.0.12', 'c')
    """
    return ".".join(["c", *map(str, index)])


def grid(shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(-(-extent // size) for extent, size in zip(shape, chunks, strict=True))


def touched(region: Region, chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the chunks that a region touches, in C order."""
    return product(
        *(
            range(start // size, -(-stop // size)) if start < stop else range(0)
            for (start, stop), size in zip(region, chunks, strict=True)
        )
    )


def chunk_region(index: tuple[int, ...], shape: tuple[int, ...], chunks: tuple[int, ...]) -> Region:
    """Return the region of its array that a chunk covers, clipped at the border."""
    return tuple(
        (at * size, min((at + 1) * size, extent))
        for at, size, extent in zip(index, chunks, shape, strict=True)
    )
