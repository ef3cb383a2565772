"""A sample on its way from a dataset to the units that read it: normalised and transformed, box by box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape
from oocdl.augmentation.normalization import LEAST
from oocdl.augmentation.transform import Operation, Sample, Transform, halves
from oocdl.graph.ir.index import Region, region_shape, within

CHAIN_BYTES = 16 << 20  # for the blocks of a chain, where chunks of the dataset are not large
WORKING_BYTES = 8 << 20  # room for what an operation computes ``PIECE_VOXELS`` at once with

Read = Callable[[Region, Array], None]  # puts a region of the sample, channels first, into an array


@dataclass(frozen=True, eq=False)
class Stream:
    """What is done to the samples of one array, as one value of a network reads them."""

    chain_bytes: int
    transforms: Sequence[Transform] = ()  # by place; those that leave this array alone are left out of chains
    spatial: Shape = ()  # extents of the spatial axes, which are the last ones, where there are transforms
    channel_axis: bool = True  # whether samples have an axis of channels before these
    image: bool = False  # whether transforms of numbers apply as well; else these are labels
    numbers: Array | None = None  # low, high, shift and divisor, of shape (rows or 1, channels, 4)
    nonzero: bool = False  # whether zeros stay zeros
    ranges: Array | None = None  # ``Sample.ranges`` of each row, of shape (rows, channels, 3)
    voxels: Sequence[Sequence[Array]] = ()  # ``Sample.voxels`` of each row; none where no crop asks for them

    def operations(
        self, seed: int, number: int, row: int, channels: int, box: Region = ()
    ) -> list[Operation]:
        """Return the transforms of a sample in a pass, drawn, in order; ``box`` as in ``Sample``."""
        voxels = self.voxels[row] if self.voxels else ()
        ranges, found = None if self.ranges is None else self.ranges[row], list[Operation]()
        for place, transform in enumerate(self.transforms):
            if not (transform.spatial or self.image):
                continue
            draws = Draws(seed, number, row, place, type(transform).__name__)
            operation = transform.draw(draws, Sample(channels, self.spatial, ranges, box, voxels))
            if operation is not None:
                found.append(operation)
                ranges = None if ranges is None else operation.carried(ranges)
        return found

    def normalize(self, block: Array, row: int, region: Region) -> None:
        """Normalise a region of a sample in place, channels first."""
        if self.numbers is None:
            return
        table = self.numbers[row if len(self.numbers) > 1 else 0]
        for number, channel in enumerate(range(*region[0])):
            low, high, shift, divisor = table[channel].astype(block.dtype)
            part = block[number]
            zeros = part == 0 if self.nonzero else None
            if table[channel, 0] > LEAST:
                np.clip(part, low, high, out=part)
            part -= shift
            part /= divisor
            if zeros is not None:
                part[zeros] = 0


def evaluate(
    operations: Sequence[Operation], region: Region, read: Read, out: Array, most_bytes: int, dtype: Any
) -> None:
    """Fill ``out`` with a region of what the operations make of a sample, computed in ``dtype``.

    A region whose sources take more than ``most_bytes`` is cut in halves; values do not depend on that.
    """
    boxes, dtype = [region], np.dtype(dtype)
    for operation in reversed(operations):
        boxes.insert(0, operation.source(boxes[0]))
    steps = list(zip(operations, pairwise(boxes), strict=True))
    sizes = [one.copies * sum(prod(region_shape(box)) for box in pair) for one, pair in steps]
    if dtype.itemsize * max(sizes, default=0) > most_bytes and out.size > 1:
        for half in halves(region):
            evaluate(operations, half, read, out[within(half, region)], most_bytes, dtype)
        return
    ready = region_shape(boxes[0]) == region_shape(region) and dtype == out.dtype and out.flags.c_contiguous
    block: Array = out if ready or not steps else np.empty(region_shape(boxes[0]), dtype)
    read(boxes[0], block)
    for operation, (source, wanted) in steps:
        block = operation.apply(block, source, wanted)
    if block is not out:
        out[...] = block
