"""Convolutions of volumes at stride one, plane by plane, on kernels for images (``blocks``).

The planes that a plane of the result sees are taken for further channels of one image: where they lie
one after the other, that costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from oocdl.engines.ort.nchwc import blocks
from oocdl.engines.ort.nchwc.blocks import block, blocks_of
from oocdl.engines.ort.ort_channels_last import copy
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import Pads

SCRATCH_BYTES = 2 << 20
"""Bytes of a plane of ``dy`` that are taken at once: with fewer rows there are too many calls."""

MAX_PAIRED_CHANNELS = 128
"""Most channels whose weights are laid out for two planes at once, which takes four times their memory."""


def _filters(w: Array, planes: int, few: bool) -> Array:
    """``w[o, c, d, h, w]`` for ``planes`` planes of the result at once, in blocks.

    ``[planes, blocks of o, seen planes, blocks of c, h, w, c, o]``: plane p sees the seen ones from
    p on; ``few``: c is not blocked, and its axes are ``c, h, w, o``.
    """
    b, (o, c, depth, height, width) = block(), w.shape
    rows = c if few else blocks_of(c) * b
    whole = w
    if (blocks_of(o) * b, rows) != (o, c):
        whole = np.zeros((blocks_of(o) * b, rows, depth, height, width), np.float32)
        whole[:o, :c] = w
    if few:
        parts = whole.reshape(-1, b, c, depth, height, width).transpose(0, 3, 2, 4, 5, 1)
    else:
        parts = whole.reshape(-1, b, rows // b, b, depth, height, width).transpose(0, 4, 2, 5, 6, 3, 1)
    found = np.zeros((planes, len(parts), depth + planes - 1, *parts.shape[2:]), np.float32)
    for plane in range(planes):
        found[plane, :, plane : plane + depth] = parts
    return found


def _images(x: Array, channels_last: bool, planes: int) -> tuple[Array, bool]:
    """A sample as images, a plane each, and whether these have so few channels that they are not blocked."""
    if channels_last:
        return blocks.sort_channels_last(x), False
    x = np.ascontiguousarray(x.swapaxes(0, 1))
    if planes * x.shape[1] < block():
        return x, True
    made = np.empty((len(x), blocks_of(x.shape[1]) * block(), *x.shape[2:]), np.float32)
    blocks.sort_planes(x, made)
    return made, False


def convolve(
    x: Array, w: Array, pads: Pads, out: Array, x_channels_last: bool, out_channels_last: bool
) -> None:
    """The convolution of one sample with ``w[o, c, d, h, w]``.

    ``x`` and ``out`` are ``[d, h, w, c]`` without gaps (channels last), or ``[c, d, h, w]``.
    """
    b, filters = block(), w.shape[0]
    depth = out.shape[0 if out_channels_last else 1]
    # One block of filters does not fill the kernel's registers; two planes' blocks do, though a
    # quarter of what is multiplied is zeros.
    together = 2 if blocks_of(filters) == 1 and depth > 1 and w.shape[1] <= MAX_PAIRED_CHANNELS else 1
    images, few = _images(x, x_channels_last, w.shape[2] + together - 1)
    sides = (pads[1][0], pads[2][0], pads[1][1], pads[2][1])
    weights = {n: _filters(w, n, few) for n in {together, (depth - 1) % together + 1}}
    direct = out_channels_last and filters == b
    space = out.shape[1:3] if out_channels_last else out.shape[2:]
    buffer = None if direct else np.empty((together, blocks_of(filters) * b, *space), np.float32)
    for first in range(0, depth, together):
        count = min(together, depth - first)
        made = out[first : first + count] if buffer is None else buffer[:count]
        seen = weights[count].shape[2]
        low = first - pads[0][0]
        start, stop = max(-low, 0), min(len(images) - low, seen)
        if stop <= start:
            made[...] = 0
        else:
            part = np.ascontiguousarray(weights[count][:, :, start:stop])
            image = images[low + start : low + stop]
            blocks.convolve(
                image.reshape(1, -1, *image.shape[2:]),
                part.reshape(count * blocks_of(filters) * b, -1, *w.shape[3:]),
                made.reshape(1, -1, *space),
                w.shape[3:],
                sides,
            )
        if buffer is not None:
            _unsorted(made, out, first, out_channels_last)


def _unsorted(made: Array, out: Array, first: int, channels_last: bool) -> None:
    """Copy planes of blocks to the result."""
    if channels_last:
        blocks.unsort(made, out[first : first + len(made)], True)
        return
    planes = np.empty((len(made), out.shape[0], *out.shape[2:]), np.float32)
    blocks.unsort(made, planes, False)
    out[:, first : first + len(made)] = planes.swapaxes(0, 1)


def transposed(w: Array) -> Array:
    """Weights of the convolution that is the transpose of one with ``w`` at stride one."""
    return w.swapaxes(0, 1)[:, :, ::-1, ::-1, ::-1]


class WeightGradient:
    """The sum over places of ``x[place + tap, c] dy[place, o]``, samples one after the other.

    A block of rows of ``x`` is taken for channels, its columns with their channels for the columns
    of an image, and as many rows of ``dy`` for the filters: all columns of the kernel and all of
    its rows (for which there is a copy of the filters each) come out at once.
    """

    def __init__(self, shape: Sequence[int], pads: Pads) -> None:
        """``shape``: of the weights, ``[o, c, d, h, w]``."""
        self.shape, self.pads = tuple(shape), pads
        o, c, depth, height, width = self.shape
        self.total = np.zeros((blocks_of(o), depth, height * block(), 1, width * c), np.float32)

    def add(self, x: Array, dy: Array) -> None:
        """Add one sample: ``x[d, h, w, c]``, ``dy[d, h, w, o]``."""
        b = block()
        row_blocks = -(-x.shape[1] // b)
        scratch = min(SCRATCH_BYTES, dy.nbytes)
        most = max(scratch // (4 * b * b * self.shape[3] * dy.shape[2]), 1)
        count = -(-row_blocks // most)
        rows = -(-row_blocks // count) * b
        for first in range(0, x.shape[1], rows):
            self._rows(x, dy, first, min(rows, -(-(x.shape[1] - first) // b) * b))

    def _rows(self, x: Array, dy: Array, first: int, rows: int) -> None:
        """Add the products of ``rows`` rows of ``x`` from ``first`` on."""
        o, c, depth, height, width = self.shape
        images = self._images(x, first, rows, dy.shape[2] + width - 1)
        padded = np.zeros((rows + height - 1, dy.shape[2], block()), np.float32)
        filters = np.empty((height, rows // block(), dy.shape[2], block(), block()), np.float32)
        for place in range(len(dy)):
            low = place - self.pads[0][0]
            start, stop = max(-low, 0), min(len(x) - low, depth)
            if stop <= start:
                continue
            for part in range(blocks_of(o)):
                self._sort_filters(dy[place], part, first, padded, filters)
                blocks.convolve(
                    images[low + start : low + stop],
                    filters.reshape(height * block(), rows, 1, -1),
                    self.total[part, start:stop],
                    (1, dy.shape[2]),
                    dilations=(1, c),
                    adds=True,
                )

    def _images(self, x: Array, first: int, rows: int, columns: int) -> Array:
        """Rows of ``x`` as blocks of channels, plane by plane; zeros where there is padding."""
        planes, height, width, c = x.shape
        there = min(rows, height - first)
        padded = np.zeros((1, rows, 1, columns * c), np.float32)
        inside = padded.reshape(rows, columns, c)[:there, self.pads[2][0] : self.pads[2][0] + width]
        made = np.empty((planes, rows, 1, columns * c), np.float32)
        for place in range(planes):
            inside[...] = x[place, first : first + there]
            blocks.sort_planes(padded, made[place : place + 1])
        return made

    def _sort_filters(self, dy: Array, part: int, first: int, padded: Array, filters: Array) -> None:
        """A block of channels of a plane of ``dy[h, w, o]``, shifted by every row of the kernel.

        ``padded``: rows that ``filters`` see; zeros stay where ``dy`` has nothing.
        """
        b, height = block(), len(filters)
        mine = dy[..., part * b : (part + 1) * b]
        low = first + self.pads[1][0] - (height - 1)
        start, stop = max(-low, 0), min(len(dy) - low, len(padded))
        if mine.shape[-1] < b:
            padded[...] = 0
        if stop > start:
            copy(mine[low + start : low + stop], padded[start:stop, :, : mine.shape[-1]])
        rows = len(padded) - height + 1
        for row in range(height):
            shifted = padded[height - 1 - row : height - 1 - row + rows]
            blocks.interleave(shifted.reshape(rows // b, b, -1, b), filters[row])

    def result(self) -> Array:
        """Return the sum over all samples, ``[o, c, d, h, w]``."""
        o, c, depth, height, width = self.shape
        # In memory: blocks of o, d, h, (w, c), o.
        parts = self.total.reshape(-1, depth, height, width, c, block()).transpose(0, 5, 4, 1, 2, 3)
        return parts.reshape(-1, *self.shape[1:])[:o]


def padded_rows(height: int) -> float:
    """Rows that a weight gradient computes with, for each row that there is."""
    return -(-height // block()) * block() / height


def padded_channels(*channels: int) -> float:
    """Products that are computed, for each that is wanted."""
    return prod(blocks_of(n) * block() / n for n in channels)
