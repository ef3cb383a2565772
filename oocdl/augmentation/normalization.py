"""Normalisation: the statistics of samples, from blocks in a fixed order, and the numbers made of them.

A voxel becomes ``(clip(x, low, high) - shift) / divisor``, by sample and channel. Statistics are of float32
values; sums are in float64. An order statistic is exact: two passes count the upper and the lower 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np

from oocdl.augmentation.draws import Array
from oocdl.errors import DatasetError

METHODS = ("zscore", "zscore_nonzero", "percentiles", "ct")
LOWER, UPPER = 0.5, 99.5  # percentiles to clip at
LEAST, MOST = (float(end) for end in (np.finfo(np.float32).min, np.finfo(np.float32).max))
"""Where nothing is cut off."""
Blocks = Callable[[], Iterable[Array]]  # begins a pass over all blocks of what statistics are of


@dataclass
class Moments:
    """Count, mean and deviation of numbers, and their ends: by Chan, Golub and LeVeque (1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = inf
    high: float = -inf

    def add(self, block: Array) -> None:
        if block.size == 0:
            return
        values = block.astype(np.float64)
        mean = float(values.mean())
        values -= mean
        total = self.count + values.size
        delta = mean - self.mean
        self.squares += (
            float(np.square(values, out=values).sum()) + delta**2 * self.count * values.size / total
        )
        self.mean += delta * values.size / total
        self.count = total
        self.low, self.high = min(self.low, float(block.min())), max(self.high, float(block.max()))

    @property
    def deviation(self) -> float:
        """Deviation of all numbers, not of a sample of them, as NumPy's and MONAI's is; 1 where that is 0."""
        found = sqrt(self.squares / self.count) if self.count else 0.0
        # Of equal numbers the mean is rounded: their deviation is not quite 0.
        return found if found > 0 and self.low < self.high else 1.0


def moments(blocks: Blocks) -> Moments:
    """Return the moments of all blocks."""
    found = Moments()
    for block in blocks():
        found.add(block)
    return found


def percentiles(blocks: Blocks, asked: Sequence[float]) -> list[float]:
    """Return percentiles of all blocks, as NumPy interpolates them (linearly)."""
    upper = sum((_counted(_ordered(block) >> np.uint32(16)) for block in blocks()), _counted(np.empty(0)))
    last = int(upper.sum()) - 1
    if last < 0:
        raise DatasetError("normalize='ct' needs labelled voxels, and no sample that is trained on has any")
    places = [share / 100 * last for share in asked]
    bins = {rank: _bin(upper, rank) for place in places for rank in (int(place), min(int(place) + 1, last))}
    lower = {chosen: _counted(np.empty(0)) for chosen, _ in bins.values()}
    for block in blocks():
        bits = _ordered(block)
        for chosen, counts in lower.items():
            counts += _counted(bits[(bits >> np.uint32(16)) == chosen] & np.uint32(0xFFFF))
    found = {rank: _value(chosen, _bin(lower[chosen], rest)[0]) for rank, (chosen, rest) in bins.items()}
    ends = [(found[int(place)], found[min(int(place) + 1, last)], place % 1) for place in places]
    return [low + (high - low) * share for low, high, share in ends]


def _counted(numbers: Array) -> Array:
    return np.bincount(numbers.ravel().astype(np.intp), minlength=1 << 16)


def _bin(counts: Array, rank: int) -> tuple[int, int]:
    """Return the number at a rank, counted from 0, and its rank among those that are equal."""
    ends = np.cumsum(counts)
    found = int(np.searchsorted(ends, rank, side="right"))
    return found, rank - int(ends[found] - counts[found])


def _ordered(block: Array) -> Any:
    """Return the bits of float32 numbers as whole numbers in the same order."""
    bits = np.ascontiguousarray(block, np.float32).view(np.uint32)
    sign = np.uint32(1 << 31)
    return np.where(bits & sign, ~bits, bits | sign)


def _value(upper: int, lower: int) -> float:
    bits, sign = np.uint32(upper << 16 | lower), np.uint32(1 << 31)
    return float((bits ^ sign if bits & sign else ~bits).view(np.float32))


def numbers_of(method: str, blocks: Blocks) -> tuple[float, float, float, float]:
    """Return low, high, shift and divisor of one channel, by the numbers that its statistics are of."""
    low, high = LEAST, MOST
    if method in ("percentiles", "ct"):
        low, high = percentiles(blocks, (LOWER, UPPER))
    if method == "percentiles":
        return low, high, low, high - low if high > low else 1.0
    nonzero = method == "zscore_nonzero"
    found = moments(lambda: (block[block != 0] for block in blocks()) if nonzero else blocks())
    return low, high, found.mean, found.deviation
