"""Limits of what a file may expand to: a few bytes of ONNX can ask for more than any machine has.

All bounds are here. They are far above what networks need, and keep the reader of any file to about a GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array

MOST_NODES = 200_000
"""Nodes, with those of functions wherever these are called, of every trip of a loop, and of windows."""
MOST_CALLS = 64
"""Functions that may call each other, one inside the other."""
MOST_INLINED_BYTES = 64 << 20
"""Bytes in the file of the nodes of functions, wherever these are called."""
MOST_TRIPS = 10_000
"""Trips of a loop, which is unrolled."""
MOST_CONSTANT_BYTES = 64 << 20
"""Bytes of a constant that is computed when a file is read."""
MOST_CONSTANTS_BYTES = 512 << 20
"""Bytes of all of these together."""
MOST_AXES = 32
"""Axes of a value."""
MOST_TAPS = 1 << 24
"""Elements that all windows along an axis read, of which there is a table: pooling, and resizing."""
MOST_ELEMENTS = 1 << 52
"""Elements of a value, whose number and bytes then are exact as any kind of number."""


def check_shape(shape: Sequence[int], what: str) -> None:
    """Raise ModelError for a value with more axes or elements than any may have, or a negative extent."""
    if len(shape) > MOST_AXES:
        raise ModelError(f"{what} has {len(shape)} axes; at most {MOST_AXES} are read")
    if min(shape, default=0) < 0:
        raise ModelError(f"{what} has the shape {list(shape)}, with a negative extent")
    if prod(shape) > MOST_ELEMENTS:
        raise ModelError(f"{what} has the shape {list(shape)}, of more than {MOST_ELEMENTS} elements")


def check_taps(extent: int, size: int, window: int) -> None:
    """Raise ModelError for a table that is too large: of ``window`` elements, wherever one starts or ends."""
    count = max(extent * (window == 0), size) * (window or 4)
    if count > MOST_TAPS:
        raise ModelError(
            f"the windows along an axis of {extent} read {count} elements; at most {MOST_TAPS} may"
        )


def numbered(count: int) -> Array:
    """Return the numbers below ``count``; raises ModelError for more than a constant may have."""
    if count * 8 > MOST_CONSTANT_BYTES:
        most = MOST_CONSTANT_BYTES // 8
        raise ModelError(f"it numbers the {count} places of an axis; at most {most} are numbered")
    return np.arange(count)
