"""What is done to the samples of a dataset before a network reads them: scaled, normalised, transformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oocdl.augmentation.crop import MOST_VOXELS
from oocdl.augmentation.draws import Array, Shape
from oocdl.augmentation.stream import CHAIN_BYTES, WORKING_BYTES, Stream
from oocdl.augmentation.transform import Transform

_BY_ARRAY = ("scale", "methods", "numbers", "ranges", "views")  # fields that map names of arrays


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
