"""Transforms of inputs that look at neighbours, along one axis after the other: blur, low resolution."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape
from oocdl.augmentation.transform import Operation, Sample, Transform
from oocdl.graph.ir.index import Range, Region, region_shape

TAILS = 4.0  # standard deviations at which MONAI cuts a kernel off
ByChannel = tuple[tuple[float, ...] | None, ...]  # a number for each axis; None: the channel stays as it is


@dataclass(frozen=True)
class Separable(Operation):
    """The same on one spatial axis after the other, with a number for each axis, by channel."""

    copies: ClassVar[int] = 3
    numbers: ByChannel
    shape: Shape

    def source(self, region: Region) -> Region:
        asked = [found for found in self.numbers[slice(*region[0])] if found is not None]
        spans = list(region)
        for axis in range(1, len(region)):
            for found in asked:
                low, high = self.reach(found[axis - 1], region[axis], self.shape[axis])
                spans[axis] = (min(low, spans[axis][0]), max(high, spans[axis][1]))
        return tuple(spans)

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        out = np.empty(region_shape(region), block.dtype)
        for number, channel in enumerate(range(*region[0])):
            made, numbers = block[number], self.numbers[channel]
            for axis, (held, wanted) in enumerate(zip(source[1:], region[1:], strict=True)):
                made = np.moveaxis(made, axis, 0)
                if numbers is None:
                    made = made[wanted[0] - held[0] : wanted[1] - held[0]]
                else:
                    made = self.along(made, numbers[axis], held[0], wanted, self.shape[axis + 1])
                made = np.moveaxis(made, 0, axis)
            out[number] = made
        return out

    @abstractmethod
    def reach(self, number: float, wanted: Range, extent: int) -> Range:
        """Return the places along an axis that those wanted depend on."""

    @abstractmethod
    def along(self, block: Array, number: float, first: int, wanted: Range, extent: int) -> Array:
        """Compute the places wanted, along axis 0 of a block whose first place there is ``first``."""


@dataclass(frozen=True)
class Smoothed(Separable):
    """A Gaussian kernel along each axis; the numbers are its standard deviations in voxels."""

    reflects: bool = False
    """Whether the sample is continued by its mirror image, and kernels have the sum 1; else by zeros."""

    def reach(self, number: float, wanted: Range, extent: int) -> Range:
        tail = len(_kernel(number)) // 2
        return max(wanted[0] - tail, 0), min(wanted[1] + tail, extent)

    def along(self, block: Array, number: float, first: int, wanted: Range, extent: int) -> Array:
        taps = np.array(_kernel(number))
        tail, count = len(taps) // 2, wanted[1] - wanted[0]
        if self.reflects:
            taps /= taps.sum()
        low, high = wanted[0] - tail, wanted[1] + tail
        if low >= 0 and high <= extent:
            block = block[low - first : high - first]
        else:
            places = np.arange(low, high)
            outside = (places < 0) | (places >= extent)
            if self.reflects and extent > 1:
                places = np.abs((places + extent - 1) % (2 * extent - 2) - extent + 1)
            block = block[np.clip(places - first, 0, len(block) - 1)]
            if not self.reflects:
                block[outside] = 0
        total: Array = np.zeros((count, *block.shape[1:]), block.dtype)
        for shift, tap in enumerate(taps.astype(block.dtype)):
            total += block[shift : shift + count] * tap
        return total


@dataclass(frozen=True)
class Coarse(Separable):
    """Fewer voxels, each the nearest one, and as many as before between these; the numbers are zooms."""

    def reach(self, number: float, wanted: Range, extent: int) -> Range:
        places, _ = _coarse(number, wanted, extent)
        return int(places.min()), int(places.max()) + 1

    def along(self, block: Array, number: float, first: int, wanted: Range, extent: int) -> Array:
        places, share = _coarse(number, wanted, extent)
        low: Array = block[places[0] - first]
        high: Array = block[places[1] - first]
        high -= low
        high *= share.astype(block.dtype).reshape((-1,) + (1,) * (block.ndim - 1))
        high += low
        return high


def _coarse(zoom: float, wanted: Range, extent: int) -> tuple[Array, Array]:
    """Return the two places that each wanted one lies between, and the share of the second.

    As PyTorch interpolates with "nearest-exact" to ``round(extent * zoom)`` voxels, and linearly back.
    """
    fewer = max(round(extent * zoom), 1)
    at = np.maximum((np.arange(*wanted) + 0.5) * (fewer / extent) - 0.5, 0)
    low = np.floor(at)
    both = np.stack([low, np.minimum(low + 1, fewer - 1)])
    places = np.minimum(np.floor((both + 0.5) * (extent / fewer)), extent - 1)
    return places.astype(np.intp), at - low


@lru_cache(maxsize=64)
def _kernel(sigma: float) -> tuple[float, ...]:
    """Return MONAI's kernel, the integral of a normal density over each voxel, in float64."""
    tail = int(max(sigma * TAILS, 0.5) + 0.5)
    scale = 1 / (math.sqrt(2) * sigma) if sigma else math.inf
    ends = [math.erf(scale * (place - 0.5)) for place in range(-tail, tail + 2)]
    return tuple((high - low) / 2 for low, high in zip(ends, ends[1:], strict=False))


@dataclass(frozen=True)
class RandGaussianSmooth(Transform):
    """Convolve with a Gaussian of deviations from these ranges, in voxels, along the first to third axis."""

    ranged: ClassVar[Mapping[str, float | None]] = {"sigma_x": 0.0, "sigma_y": 0.0, "sigma_z": 0.0}
    sigma_x: Sequence[float] = (0.25, 1.5)
    sigma_y: Sequence[float] = (0.25, 1.5)
    sigma_z: Sequence[float] = (0.25, 1.5)
    prob: float = 0.1

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        sigmas = tuple(draws.uniform(*self._ends(name)) for name in list(self.ranged)[: len(sample.spatial)])
        return Smoothed((sigmas,) * sample.channels, sample.shape)
