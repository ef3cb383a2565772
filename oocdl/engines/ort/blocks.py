"""Convolutions in blocks of channels: onnxruntime's own layout, and its fastest kernel.

onnxruntime's optimizer gives images (not volumes, and never where weights are inputs) a layout
in which a block of channels, as many as a vector register holds, lies side by side: ``[n, c / b, h, w, b]``.
Its kernel for that is at the speed of the processor: 200 to 270 GFLOP/s of a core, where Conv of
volumes has 90 to 130. The operators are called here directly. Channels that lie last are already such blocks
where there is one block of them, else they are sorted, which is cheap.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import numpy as np

from oocdl.engines.ort.ort_session import REFUSALS, run
from oocdl.graph.ir.graph import Array

DOMAIN = "com.microsoft.nchwc"
"""The domain of operators that onnxruntime's optimizer puts in."""


@cache
def block() -> int:
    """Channels of a block on this processor; 1, with a warning, where there are no such kernels.

    Two places of many channels are sorted: the second one comes after a block of the first.
    """
    channels = 64
    given = np.arange(2 * channels, dtype=np.float32).reshape(1, 1, 2, channels)
    made = np.empty((1, channels, 1, 2), np.float32)
    try:
        run("ReorderInput", [given], [made], DOMAIN, channels_last=1)
    except REFUSALS:
        warnings.warn(
            "onnxruntime has no kernels for channels in blocks on this processor: convolutions of volumes "
            "take about twice as long; engine='torch' may be faster",
            stacklevel=2,
        )
        return 1
    return int(np.flatnonzero(made.ravel() == channels)[0])


def blocks_of(channels: int) -> int:
    """Return the number of blocks that ``channels`` take."""
    return -(-channels // block())


def sort_channels_last(x: Array) -> Array:
    """Sort ``x[n, h, w, c]`` into blocks, with the shape ``[n, c, h, w]``; one block is a view."""
    n, h, w, c = x.shape
    shape = (n, blocks_of(c) * block(), h, w)
    if c == block():
        return x.reshape(shape)
    made = np.empty(shape, np.float32)
    run("ReorderInput", [x], [made], DOMAIN, channels_last=1)
    return made


def sort_planes(x: Array, made: Array) -> None:
    """Sort ``x[n, c, h, w]`` into blocks."""
    run("ReorderInput", [x], [made], DOMAIN, channels_last=0)


def unsort(x: Array, made: Array, channels_last: bool) -> None:
    """Blocks as ``[n, h, w, c]`` (``channels_last``) or ``[n, c, h, w]``; what is there of ``made``."""
    channels = made.shape[-1 if channels_last else 1]
    run("ReorderOutput", [x], [made], DOMAIN, channels=channels, channels_last=int(channels_last))


def interleave(x: Array, made: Array) -> None:
    """``x[n, i, j, b]`` with ``i`` and ``j`` exchanged; ``b`` is a block's.

    That is what sorting does to ``j`` blocks of channels.
    """
    n, i, j, b = x.shape
    rows, columns = x.reshape(n, i, 1, j * b), made.reshape(n, j * b, i, 1)
    run("ReorderInput", [rows], [columns], DOMAIN, channels_last=1)


def convolve(
    x: Array,
    w: Array,
    made: Array,
    kernel: Sequence[int],
    pads: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    adds: bool = False,
) -> None:
    """The convolution of images of blocks; few channels, less than a block, lie in planes.

    ``adds``: to what is in ``made``.
    """
    args = [x, w, None, made] if adds else [x, w]
    slide = {"kernel_shape": tuple(kernel), "pads": tuple(pads), "dilations": tuple(dilations)}
    run("Conv", args, [made], DOMAIN, **slide, strides=(1, 1), group=1)
