"""Mirrors and quarter turns: transforms that move voxels to places of voxels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape
from oocdl.augmentation.transform import Operation, Sample, Transform
from oocdl.graph.ir.index import Region


@dataclass(frozen=True)
class Mirrored(Operation):
    """The order along axes reversed."""

    axes: tuple[int, ...]  # axes of the sample
    shape: Shape

    def source(self, region: Region) -> Region:
        return tuple(
            (extent - high, extent - low) if axis in self.axes else (low, high)
            for axis, ((low, high), extent) in enumerate(zip(region, self.shape, strict=True))
        )

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        return np.ascontiguousarray(np.flip(block, self.axes))


@dataclass(frozen=True)
class Turned(Operation):
    """So many quarter turns in a plane, as ``numpy.rot90`` does them."""

    turns: int
    axes: tuple[int, int]  # axes of the sample, of equal extents
    extent: int

    def source(self, region: Region) -> Region:
        first, second = self.axes
        spans = list(region)
        for _ in range(self.turns % 4):
            low, high = spans[first]
            spans[first], spans[second] = spans[second], (self.extent - high, self.extent - low)
        return tuple(spans)

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        return np.ascontiguousarray(np.rot90(block, self.turns, self.axes))


@dataclass(frozen=True)
class RandFlip(Transform):
    """Mirror along one spatial axis, several, or (None) all of them together."""

    spatial: ClassVar[bool] = True
    prob: float = 0.1
    spatial_axis: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_kind(self, self._axes(0))

    def _axes(self, rank: int) -> Sequence[int]:
        asked: Any = self.spatial_axis
        axes: Any = (asked,) if isinstance(asked, Integral) else asked
        return range(rank) if asked is None else axes

    def check(self, spatial: Shape) -> None:
        super().check(spatial)
        _check_axes(self, self._axes(len(spatial)), spatial)

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        rank = len(sample.spatial)
        return Mirrored(tuple(axis % rank + 1 for axis in self._axes(rank)), sample.shape)


@dataclass(frozen=True)
class RandRotate90(Transform):
    """Turn by 1 to ``max_k`` quarter turns in the plane of two spatial axes of equal extents."""

    spatial: ClassVar[bool] = True
    prob: float = 0.1
    max_k: int = 3
    spatial_axes: Sequence[int] = (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_kind(self, self.spatial_axes)
        if not isinstance(self.max_k, Integral) or self.max_k < 1:
            raise self._refuse(f"takes a max_k of at least 1, got {self.max_k!r}")

    def check(self, spatial: Shape) -> None:
        super().check(spatial)
        _check_axes(self, self.spatial_axes, spatial)
        axes = [axis % len(spatial) for axis in self.spatial_axes]
        if len(axes) != 2:
            raise self._refuse(f"takes two spatial_axes, got {self.spatial_axes!r}")
        if spatial[axes[0]] != spatial[axes[1]]:
            extents = " and ".join(str(spatial[axis]) for axis in axes)
            raise self._refuse(
                f"needs axes of equal extents, axes {axes[0]} and {axes[1]} have {extents}; choose other "
                "spatial_axes, or RandAffine"
            )

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        first, second = (axis % len(sample.spatial) + 1 for axis in self.spatial_axes)
        return Turned(draws.whole(self.max_k) + 1, (first, second), sample.shape[first])


def _check_kind(transform: Transform, axes: Any) -> None:
    whole = isinstance(axes, Sequence) and all(isinstance(axis, Integral) for axis in axes)
    if not whole or len(set(axes)) < len(axes):
        raise transform._refuse(f"takes different axes, as whole numbers, got {axes!r}")


def _check_axes(transform: Transform, axes: Sequence[int], spatial: Shape) -> None:
    rank = len(spatial)
    places = {axis % rank for axis in axes if -rank <= axis < rank}
    if len(places) < len(axes):
        raise transform._refuse(
            f"names the spatial axes {tuple(axes)}, there are {rank}, 0 to {rank - 1}, each once"
        )
