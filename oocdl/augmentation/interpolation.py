"""Reads a sample at places between its voxels: linearly, or for whole numbers at the nearest one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Shape
from oocdl.augmentation.transform import Operation, parts
from oocdl.graph.ir.index import Range, Region, region_shape, within

PADDINGS = ("zeros", "border", "reflection")


@dataclass(frozen=True)
class Warp(Operation):
    """Every voxel of the output is what the input has at some point, which need not be a voxel."""

    copies: ClassVar[int] = 2
    shape: Shape
    padding: str
    """What is read outside of a sample: zeros, the nearest voxel, or its mirror image about its faces."""

    @abstractmethod
    def points(self, spans: Region) -> Sequence[Array]:
        """Return a coordinate for each spatial axis, in voxels, each an array of the region's shape."""

    @abstractmethod
    def bounds(self, spans: Region) -> Sequence[tuple[float, float]]:
        """Return numbers between which all of these coordinates are, by axis."""

    def source(self, region: Region) -> Region:
        bounds = zip(self.bounds(region[1:]), self.shape[1:], strict=True)
        return region[0], *(_needed(low, high, extent, self.padding) for (low, high), extent in bounds)

    def apply(self, block: Array, source: Region, region: Region) -> Array:
        zeros, widths, first = self.padding == "zeros", [(0, 0)], []
        for (low, high), extent in zip(source[1:], self.shape[1:], strict=True):
            # A point beyond the last voxel lies between that and a zero.
            before, after = int(zeros and low == 0), int((zeros and high == extent) or extent == 1)
            widths.append((before, after))
            first.append(low - before)
        if any(map(any, widths)):
            block = np.pad(block, widths) if zeros else np.pad(block, widths, "edge")
        out = np.empty(region_shape(region), block.dtype)
        strides = [int(np.prod(block.shape[axis + 1 :], dtype=int)) for axis in range(1, block.ndim)]
        flat = np.ascontiguousarray(block).reshape(len(block), -1)
        for part in parts(region[1:]):
            self._read(flat, strides, first, part, out[(slice(None), *within(part, region[1:]))])
        return out

    def _read(
        self, flat: Array, strides: Sequence[int], first: Sequence[int], part: Region, out: Array
    ) -> None:
        """Fill ``out`` with the values of all channels at the points of a part of the output."""
        linear, index, shares = out.dtype.kind == "f", np.zeros(()), []
        points = zip(self.points(part), self.shape[1:], strides, first, strict=True)
        for at, extent, stride, start in points:
            at = _inside(at, extent, self.padding)
            low = np.floor(at) if linear else np.rint(at)
            if linear:
                np.minimum(low, extent - 1 if self.padding == "zeros" else max(extent - 2, 0), out=low)
                shares.append((at - low).astype(out.dtype))
            low -= start
            low *= stride
            index = index + low
        places = index.astype(np.intp)
        for channel, made in zip(flat, out, strict=True):
            made[...] = _between(channel, places, shares, strides)


def _between(flat: Array, index: Array, shares: Sequence[Array], strides: Sequence[int]) -> Array:
    """Interpolate along the last axis first: all that is left of ``shares`` and ``strides``."""
    if not shares:
        return flat.take(index)
    low = _between(flat, index, shares[1:], strides[1:])
    high = _between(flat[strides[0] :], index, shares[1:], strides[1:])
    high -= low
    high *= shares[0]
    high += low
    return high


def _inside(at: Array, extent: int, padding: str) -> Array:
    """Return coordinates within a sample; for zeros, a voxel beyond it at most."""
    if padding == "zeros":
        return np.clip(at, -1, extent)
    if padding == "reflection":
        outside = (at < -0.5) | (at > extent - 0.5)
        if outside.any():
            at = np.where(outside, _reflected(at, extent), at)
    return np.clip(at, 0, extent - 1)


def _reflected(at: Array, extent: int) -> Array:
    found = np.abs((at + 0.5 + extent) % (2 * extent) - extent) - 0.5
    return np.asarray(found)


def _needed(low: float, high: float, extent: int, padding: str) -> Range:
    """Return the voxels that points between two coordinates depend on."""
    if padding == "reflection":
        sides = [floor((end + 0.5) / extent) for end in (low, high)]
        ends = [float(_reflected(np.array(end), extent)) for end in (low, high)]
        if sides[1] > sides[0] + 1:
            return 0, extent
        if sides[1] > sides[0]:
            ends.append(0.0 if sides[1] % 2 == 0 else extent - 1.0)
        # Rounding of what is reflected, which bounds and points do apart.
        low, high = min(ends) - 1e-6, max(ends) + 1e-6
    last = extent - 1 if padding == "zeros" else max(extent - 2, 0)
    start = min(max(floor(low), 0), max(last, 0))
    return start, max(min(floor(max(high, 0)) + 2, extent), start + 1)
