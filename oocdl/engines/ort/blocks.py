"""Convolutions in blocks of channels: onnxruntime's own layout, and its fastest kernel.

onnxruntime's optimizer gives images (not volumes, and never where weights are inputs) a layout
in which a block of channels, as many as a vector register holds, lies side by side: ``[n, c / b, h, w, b]``.
Its kernel for that is at the speed of the processor: 200 to 270 GFLOP/s of a core, where Conv of
volumes has 90 to 130. The operators are written down here directly. Channels that lie channels_last are
already such blocks where there is one block of them, else they are sorted, which is cheap.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import numpy as np

from oocdl.engines.ort.ort_session import REFUSALS, Session, session_of
from oocdl.graph.ir.graph import Array

DOMAIN = "com.microsoft.nchwc"
"""The domain of operators that onnxruntime's optimizer puts in."""


@cache
def _sorter(channels_last: bool) -> Session:
    return session_of("ReorderInput", ["x"], 4, DOMAIN, channels_last=int(channels_last))


@cache
def _unsorter(channels: int, channels_last: bool) -> Session:
    return session_of("ReorderOutput", ["x"], 4, DOMAIN, channels=channels, channels_last=int(channels_last))


@cache
def _convolver(
    kernel: tuple[int, ...], pads: tuple[int, ...], dilations: tuple[int, ...], adds: bool
) -> Session:
    return session_of(
        "Conv",
        ["x", "w", "", "sum"] if adds else ["x", "w"],
        4,
        DOMAIN,
        kernel_shape=kernel,
        pads=pads,
        dilations=dilations,
        strides=[1, 1],
        group=1,
    )


@cache
def block() -> int:
    """Channels of a block on this processor; 1, with a warning, where there are no such kernels.

    Two places of many channels are sorted: the second one comes after a block of the first.
    """
    channels = 64
    try:
        session = _sorter(True)
    except REFUSALS:
        warnings.warn(
            "onnxruntime has no kernels for channels in blocks on this processor: convolutions of volumes "
            "take about twice as long; engine='torch' may be faster",
            stacklevel=2,
        )
        return 1
    given = np.arange(2 * channels, dtype=np.float32).reshape(1, 1, 2, channels)
    made = np.empty((1, channels, 1, 2), np.float32)
    session.run([given], [made])
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
    _sorter(True).run([x], [made])
    return made


def sort_planes(x: Array, made: Array) -> None:
    """Sort ``x[n, c, h, w]`` into blocks."""
    _sorter(False).run([x], [made])


def unsort(x: Array, made: Array, channels_last: bool) -> None:
    """Blocks as ``[n, h, w, c]`` (``channels_last``) or ``[n, c, h, w]``; what is there of ``made``."""
    _unsorter(made.shape[-1 if channels_last else 1], channels_last).run([x], [made])


def interleave(x: Array, made: Array) -> None:
    """``x[n, i, j, b]`` with ``i`` and ``j`` exchanged; ``b`` is a block's.

    That is what sorting does to ``j`` blocks of channels.
    """
    n, i, j, b = x.shape
    _sorter(True).run([x.reshape(n, i, 1, j * b)], [made.reshape(n, j * b, i, 1)])


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
    session = _convolver(tuple(kernel), tuple(pads), tuple(dilations), adds)
    session.run([x, w, made] if adds else [x, w], [made])
