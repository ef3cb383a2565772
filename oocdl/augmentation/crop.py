"""Random crops: a part of each sample, which is all that a network sees of it in a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape, bits
from oocdl.augmentation.transform import Operation, Sample, Transform, parts
from oocdl.graph.ir.index import Region, moved, region_shape, within

MOST_VOXELS = 4096  # foreground voxels that are kept of a sample, an equal share for each of its classes


@dataclass(frozen=True)
class Shifted(Operation):
    """A part of what is there, which begins so many voxels further on."""

    copies: ClassVar[int] = 1
    by: Shape

    def source(self, region: Region) -> Region:
        return moved(region, self.by)

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        return block


@dataclass(frozen=True)
class RandSpatialCrop(Transform):
    """Cut a part of ``roi_size`` voxels (a number: along each axis) out of each sample, at a random place.

    It is MONAI's with ``random_size=False``: all places inside of the sample are equally likely. A sample
    that is smaller stands in the middle of its part, as in nnU-Net: what is around it is 0 after normalising,
    and in labels the one that the loss ignores. It is the first transform; to the others the part is the
    sample.

    With the probability ``foreground`` the part is centred on a random voxel of a random class above 0 of the
    labels, as far as it fits; a sample without such voxels gets any place. In spirit that is nnU-Net's
    oversampling and MONAI's ``RandCropByPosNegLabel``. nnU-Net takes a fixed share of each batch, and such
    parts may stand out of the sample; MONAI takes classes by their numbers of voxels, and all other centres
    from the background. Here up to 4,096 voxels of a sample are kept to choose from, an equal share for each
    class (nnU-Net: 10,000 of a class).
    """

    spatial: ClassVar[bool] = True
    roi_size: int | Sequence[int]
    foreground: float = 0.0
    prob = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        extents = self.roi_size if isinstance(self.roi_size, Sequence) else (self.roi_size,)
        if not extents or not all(isinstance(one, Integral) and one >= 1 for one in extents):
            raise self._refuse(f"takes a roi_size of whole numbers from 1, got {self.roi_size!r}")
        if not isinstance(self.foreground, Real) or not 0 <= self.foreground <= 1:
            raise self._refuse(f"takes a foreground from 0 to 1, got {self.foreground!r}")

    def size(self, rank: int) -> Shape:
        """Return the extents of the part. Raises InputError if they are not as many as spatial axes."""
        found = tuple(self.roi_size) if isinstance(self.roi_size, Sequence) else (self.roi_size,) * rank
        if len(found) != rank:
            raise self._refuse(f"has a roi_size of {len(found)} extents, there are {rank} spatial axes")
        return found

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        centre: Sequence[Any] | None = None
        if draws.uniform() < self.foreground and sample.voxels:
            voxels = sample.voxels[draws.whole(len(sample.voxels))]
            centre = np.unravel_index(voxels[draws.whole(len(voxels))], region_shape(sample.box))
        by = [0]
        for axis, ((low, high), size) in enumerate(zip(sample.box, sample.spatial, strict=True)):
            free = max(high - low - size, 0)
            start = draws.whole(free + 1) if centre is None else int(centre[axis]) - size // 2
            # The view that is read has the middle of a sample, or all of it in its own middle.
            by.append(low + min(max(start, 0), free) if free else 0)
        return Shifted(tuple(by))


def crop_of(augment: Any) -> RandSpatialCrop | None:
    """Return the crop that ``augment=`` begins with; None: samples are trained on whole."""
    first = augment[0] if augment else None
    return first if isinstance(first, RandSpatialCrop) else None


def foreground_voxels(
    key: str, shape: Shape, blocks: Iterable[tuple[Region, Array]], ignored: int = 0
) -> list[Array]:
    """Return the places of voxels of each class above 0, in C order of the sample, from blocks of its labels.

    Chosen are those of the least random numbers by key and place, in whatever order blocks come.
    """
    held: dict[int, Array] = {}
    for region, labels in blocks:
        for part in parts(region):
            block = labels[within(part, region)]
            inside = (block > 0) & (block != ignored)
            if not inside.any():
                continue
            corner = [low for low, _ in part]
            places = np.ravel_multi_index(tuple((np.argwhere(inside) + corner).T), shape)
            rows = np.stack([bits(key, shape, part)[inside], places.astype(np.uint64)], 1)
            for one in np.unique(block[inside]).tolist():
                held[one] = np.append(held.get(one, rows[:0]), rows[block[inside] == one], 0)
            share = max(MOST_VOXELS // len(held), 1)
            held = {one: found[np.argsort(found[:, 0])[:share]] for one, found in held.items()}
    return [np.sort(found[:, 1]).astype(np.int64) for _, found in sorted(held.items())]
