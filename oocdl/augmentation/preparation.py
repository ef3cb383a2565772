"""What is done to samples on their way to the units that read them: scaled, normalised, and transformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from oocdl.augmentation.crop import MOST_VOXELS
from oocdl.augmentation.draws import Array, Draws, Shape
from oocdl.augmentation.normalization import LEAST
from oocdl.augmentation.transform import Operation, Sample, Transform, halves
from oocdl.graph.ir.index import Region, region_shape, within

_BY_ARRAY = ("scale", "methods", "numbers", "ranges", "views")  # fields that map names of arrays
CHAIN_BYTES = 16 << 20  # for the blocks of a chain, where chunks of the dataset are not large
WORKING_BYTES = 8 << 20  # room for what an operation computes ``PIECE_VOXELS`` at once with
Read = Callable[[Region, Array], None]  # puts a region of the sample, channels first, into an array


@dataclass(frozen=True, eq=False)
class Preparation:
    """What is done to the arrays of a dataset, by their names. It travels to workers."""

    scale: Mapping[str, float] = field(default_factory=dict)
    transforms: Sequence[Transform] = ()
    spatial: Shape = ()  # extents of the spatial axes of images
    methods: Mapping[str, str] = field(default_factory=dict)  # normalisation of each array that has one
    numbers: Mapping[str, Array] = field(default_factory=dict)  # ``Stream.numbers``, once measured
    ranges: Mapping[str, Array] = field(default_factory=dict)  # ``Stream.ranges``, once measured
    views: Mapping[str, str] = field(default_factory=dict)  # view -> its array, by which tables are found
    foreground: str = ""  # array of the labels whose voxels "ct" takes statistics of, or crops are centred on
    ignored: int = 0  # label that is no class
    voxels: Sequence[Sequence[Array]] = ()
    """``Stream.voxels``, once they are chosen; before, a sequence as long."""
    chain_bytes: int = CHAIN_BYTES

    @property
    def needs_ranges(self) -> bool:
        return any(transform.needs_ranges for transform in self.transforms)

    @property
    def nbytes(self) -> int:
        """Memory that it takes beside what reading a dataset takes: its tables, and blocks of a chain."""
        tables = sum(table.nbytes for table in (*self.numbers.values(), *self.ranges.values()))
        tables += 8 * MOST_VOXELS * len(self.voxels)
        return tables + (self.chain_bytes + WORKING_BYTES if self.transforms else 0)

    def joined(self, other: Preparation) -> Preparation:
        """Return what does the same as both, to the arrays of both."""
        both: dict[str, Any] = {name: {**getattr(self, name), **getattr(other, name)} for name in _BY_ARRAY}
        return replace(self, **both, spatial=self.spatial or other.spatial)

    def renamed(self, named: Callable[[str], str]) -> Preparation:
        of: dict[str, Any] = {n: {named(k): v for k, v in getattr(self, n).items()} for n in _BY_ARRAY}
        return replace(self, **of | {"views": {view: named(array) for view, array in of["views"].items()}})

    def plain(self) -> Preparation:
        """Return the same without transforms, as validations and predictions have it."""
        return replace(self, transforms=())

    def stream(self, name: str, shape: Shape, image_rank: int | None) -> Stream | None:
        """Return what is done to samples (of ``shape``) of an array; None: they are only scaled.

        ``image_rank``: spatial axes of an input that is an image; None: what is read is no such input.
        """
        rank, known = len(self.spatial), self.views.get(name, name)
        spatial = shape[-rank:] if name in self.views and rank else self.spatial
        table = None if image_rank is None else self.numbers.get(known)
        moved = bool(self.transforms) and is_moved(shape, spatial)
        if table is None and not moved:
            return None
        return Stream(
            chain_bytes=self.chain_bytes,
            transforms=self.transforms if moved else (),
            spatial=spatial,
            channel_axis=len(shape) > (rank if image_rank is None else image_rank),
            image=image_rank is not None,
            numbers=table,
            nonzero=self.methods.get(known) == "zscore_nonzero",
            ranges=self.ranges.get(known),
            voxels=self.voxels if moved else (),
        )


def is_moved(shape: Shape, spatial: Shape) -> bool:
    """Whether samples of a shape have these spatial axes, with a channel axis before them or without."""
    rank = len(spatial)
    return rank > 0 and rank <= len(shape) <= rank + 1 and shape[-rank:] == spatial


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
