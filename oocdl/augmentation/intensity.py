"""Transforms of the numbers of inputs, each voxel by itself: scale, shift, contrast, gamma, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape, normal
from oocdl.augmentation.transform import Operation, Sample, Transform, parts
from oocdl.graph.ir.index import Region, within

Numbers = tuple[float, ...]
EPSILON = 1e-7  # MONAI adds it to the range of a sample that gamma divides by


@dataclass(frozen=True)
class Linear(Operation):
    """``factor * x + offset`` by channel, then cut off at ``low`` and ``high`` if these are given."""

    copies: ClassVar[int] = 1
    factors: Numbers
    offsets: Numbers
    low: Numbers | None = None
    high: Numbers | None = None

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        block *= _column(self.factors, region, block)
        if any(self.offsets):
            block += _column(self.offsets, region, block)
        if self.low is not None and self.high is not None:
            np.clip(block, _column(self.low, region, block), _column(self.high, region, block), out=block)
        return block

    def carried(self, ranges: Array) -> Array:
        made: Array = ranges * np.array(self.factors)[:, None] + np.array(self.offsets)[:, None]
        made[:, :2].sort(axis=1)
        if self.low is not None and self.high is not None:
            made = np.clip(made, np.array(self.low)[:, None], np.array(self.high)[:, None])
        return made


@dataclass(frozen=True)
class Gamma(Operation):
    """``((x - low) / (high - low)) ** gamma``, put back between low and high; or the same of ``-x``."""

    copies: ClassVar[int] = 1
    gammas: Numbers
    low: Numbers
    high: Numbers
    inverted: bool

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        low, high = (_column(ends, region, block) for ends in (self.low, self.high))
        # What other transforms put outside of the sample's range has no power.
        np.clip(block, low, high, out=block)
        block -= high if self.inverted else low
        block *= (-1 if self.inverted else 1) / (high - low + block.dtype.type(EPSILON))
        np.power(block, _column(self.gammas, region, block), out=block)
        block *= low - high if self.inverted else high - low
        block += high if self.inverted else low
        return block


@dataclass(frozen=True)
class Noise(Operation):
    """Normal numbers added, which are functions of the key and the global index."""

    copies: ClassVar[int] = 1
    key: str
    mean: float
    deviations: Numbers
    shape: Shape  # extents of the noise: of one channel, it is the same in all

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        for part in parts(region):
            channels = (0, 1) if self.shape[0] == 1 else part[0]
            drawn = normal(self.key, self.shape, (channels, *part[1:])).astype(block.dtype, copy=False)
            drawn = drawn * _column(self.deviations, part, block)
            if self.mean:
                drawn += block.dtype.type(self.mean)
            block[within(part, region)] += drawn
        return block


@dataclass(frozen=True)
class RandScaleIntensity(Transform):
    """``x * (1 + factor)``, with a factor from (-factors, factors) or from a pair."""

    ranged: ClassVar[Mapping[str, float | None]] = {"factors": None}
    factors: float | Sequence[float]
    prob: float = 0.1
    channel_wise: bool = False

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        drawn = draws.each(sample.channels, *self._ends("factors"), apart=self.channel_wise)
        return Linear(tuple(1 + factor for factor in drawn), (0.0,) * sample.channels)


@dataclass(frozen=True)
class RandShiftIntensity(Transform):
    """``x + offset``, with an offset from (-offsets, offsets) or from a pair."""

    ranged: ClassVar[Mapping[str, float | None]] = {"offsets": None}
    offsets: float | Sequence[float]
    prob: float = 0.1
    channel_wise: bool = False

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        drawn = draws.each(sample.channels, *self._ends("offsets"), apart=self.channel_wise)
        return Linear((1.0,) * sample.channels, drawn)


@dataclass(frozen=True)
class RandScaleIntensityFixedMean(Transform):
    """``(x - mean) * (1 + factor) + mean``: less or more contrast."""

    needs_ranges: ClassVar[bool] = True
    ranged: ClassVar[Mapping[str, float | None]] = {"factors": None}
    prob: float = 0.1
    factors: float | Sequence[float] = 0.0
    preserve_range: bool = False
    channel_wise: bool = False

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        drawn = draws.each(sample.channels, *self._ends("factors"), apart=self.channel_wise)
        low, high, means = _ranges(sample, self.channel_wise)
        offsets = tuple(-factor * mean for factor, mean in zip(drawn, means, strict=True))
        ends = (low, high) if self.preserve_range else (None, None)
        return Linear(tuple(1 + factor for factor in drawn), offsets, *ends)


@dataclass(frozen=True)
class RandAdjustContrast(Transform):
    """``((x - min) / (max - min)) ** gamma``, put back between min and max of the sample.

    ``gamma`` is from (0.5, gamma) or from a pair. With ``invert_image`` the same is done to ``-x``. With
    ``channel_wise``, which MONAI lacks, each channel has its own range and its own gamma.
    """

    needs_ranges: ClassVar[bool] = True
    ranged: ClassVar[Mapping[str, float | None]] = {"gamma": 0.5}
    prob: float = 0.1
    gamma: float | Sequence[float] = (0.5, 4.5)
    invert_image: bool = False
    channel_wise: bool = False

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        gammas = draws.each(sample.channels, *self._ends("gamma"), apart=self.channel_wise)
        low, high, _ = _ranges(sample, self.channel_wise)
        return Gamma(gammas, low, high, self.invert_image)


@dataclass(frozen=True)
class RandGaussianNoise(Transform):
    """Normal noise of a mean and of a deviation from (0, std), or of std itself (``sample_std=False``)."""

    ranged: ClassVar[Mapping[str, float | None]] = {"std": 0.0}
    prob: float = 0.1
    mean: float = 0.0
    std: float = 0.1
    sample_std: bool = True
    channel_wise: bool = False
    """Whether each channel has its own deviation, which MONAI lacks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("mean", self.mean), ("std", self.std)):
            if not isinstance(value, Real) or not isfinite(value):
                raise self._refuse(f"takes a number for {name}, got {value!r}")

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        low = 0.0 if self.sample_std else self.std
        drawn = draws.each(sample.channels, low, self.std, apart=self.channel_wise)
        return Noise(draws.key, self.mean, drawn, sample.shape)


def _ranges(sample: Sample, channel_wise: bool) -> tuple[Numbers, Numbers, Numbers]:
    """Return minimum, maximum and mean of each channel, or of all of them for each."""
    assert sample.ranges is not None, "a transform with needs_ranges gets them"
    low, high, mean = sample.ranges.T
    if not channel_wise:
        low, high, mean = (np.full_like(low, found) for found in (low.min(), high.max(), mean.mean()))
    return tuple(low.tolist()), tuple(high.tolist()), tuple(mean.tolist())


def _column(numbers: Numbers, region: Region, block: Array) -> Any:
    """Return the numbers of a region's channels, in the block's dtype, to broadcast over its voxels."""
    start, stop = region[0]
    return np.asarray(numbers[start:stop], block.dtype).reshape((-1,) + (1,) * (block.ndim - 1))
