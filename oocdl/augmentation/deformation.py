"""Affine maps and smooth deformations: transforms that move voxels to places between voxels.

There a sample is read linearly, or for whole numbers at the nearest voxel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil, cos, floor, pi, sin, sqrt
from numbers import Real
from operator import add
from typing import Any, ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape, uniform
from oocdl.augmentation.transform import Operation, Sample, Transform, parts
from oocdl.graph.ir.index import Range, Region, region_shape, within

Ranges = float | Sequence[float | Sequence[float]] | None  # for each number a pair, or f for (-f, f)
Floats = Sequence[float]
Ints = Sequence[int]
Matrix = tuple[tuple[float, ...], ...]
_RANGES = ("rotate_range", "shear_range", "translate_range", "scale_range")
SPLINE_SQUARE = 151 / 315  # integral of the square of a cubic B-spline
PADDINGS = ("zeros", "border", "reflection")


@dataclass(frozen=True)
class Warp(Operation):
    """Every voxel of the output is what the input has at some point, which need not be a voxel."""

    shape: Shape
    padding: str  # outside of a sample: zeros, the nearest voxel, or its mirror image about its faces

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

    def _read(self, flat: Array, strides: Ints, first: Ints, part: Region, out: Array) -> None:
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


def _between(flat: Array, index: Array, shares: Sequence[Array], strides: Ints) -> Array:
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


@dataclass(frozen=True)
class Affine(Warp):
    """The point of a voxel is ``matrix @ (voxel, 1)``, both counted from the centre of the sample."""

    matrix: Matrix  # a row for each spatial axis, with the shift in its last column

    def points(self, spans: Region) -> Sequence[Array]:
        return [reduce(add, terms) for terms in self._terms(spans)]

    def bounds(self, spans: Region) -> Sequence[tuple[float, float]]:
        return [
            # Sums in the same order of the least and the greatest terms: no rounding takes a point beyond.
            (float(sum(term.min() for term in terms)), float(sum(term.max() for term in terms)))
            for terms in self._terms(spans)
        ]

    def _terms(self, spans: Region) -> Iterator[list[Array]]:
        centre = [(extent - 1) / 2 for extent in self.shape[1:]]
        for row, middle in zip(self.matrix, centre, strict=True):
            terms: list[Array] = [np.array(row[-1] + middle)]
            for axis, (low, high) in enumerate(spans):
                along = (np.arange(low, high) - centre[axis]) * row[axis]
                terms.append(along.reshape((-1,) + (1,) * (len(spans) - 1 - axis)))
            yield terms


@dataclass(frozen=True)
class Elastic(Warp):
    """The point of a voxel is the voxel moved by cubic B-splines between the nodes of a coarse grid.

    Each node has a vector, by its number and the key: numbers uniform in (-amplitude, amplitude).
    """

    key: str
    spacing: float  # voxels between two nodes
    amplitude: float

    def points(self, spans: Region) -> Sequence[Array]:
        nodes, firsts = self._nodes(spans)
        found = []
        for axis, moved in enumerate(nodes):
            for along, (low, high) in enumerate(spans):
                at = np.arange(low, high) / self.spacing
                weights = _spline(at - np.floor(at))
                index = np.floor(at).astype(np.intp) - firsts[along]
                column = (-1,) + (1,) * (len(spans) - 1)
                moved = np.moveaxis(moved, along, 0)
                total = moved[index] * weights[0].reshape(column)
                for tap in range(1, 4):
                    total += moved[index + tap] * weights[tap].reshape(column)
                moved = np.moveaxis(total, 0, along)
            low, high = spans[axis]
            found.append(moved + np.arange(low, high).reshape((-1,) + (1,) * (len(spans) - 1 - axis)))
        return found

    def bounds(self, spans: Region) -> Sequence[tuple[float, float]]:
        nodes, _ = self._nodes(spans)
        return [
            # Weights are positive and their sum is 1, but for rounding.
            (low + float(moved.min()) - 1e-6, high - 1 + float(moved.max()) + 1e-6)
            for (low, high), moved in zip(spans, nodes, strict=True)
        ]

    def _nodes(self, spans: Region) -> tuple[Array, list[int]]:
        """Return the vectors of all nodes that a region depends on, and the number of the first by axis."""
        counts = [ceil(extent / self.spacing) + 4 for extent in self.shape[1:]]
        held = [(floor(low / self.spacing), floor((high - 1) / self.spacing) + 4) for low, high in spans]
        shape, region = (len(spans), *counts), ((0, len(spans)), *held)
        drawn = uniform(self.key, shape, region)
        return (2 * drawn - 1) * self.amplitude, [low for low, _ in held]


def _spline(share: Array) -> list[Array]:
    """Return the weights of the four nodes around a point: a cubic B-spline."""
    rest = 1 - share
    outer = [side * side * side / 6 for side in (rest, share)]
    inner = [(side * side * (3 * side - 6) + 4) / 6 for side in (share, rest)]
    return [outer[0], *inner, outer[1]]


@dataclass(frozen=True)
class RandAffine(Transform):
    """Rotate (radians), shear, translate (voxels) and scale about the centre; a scale of f is 1 + (-f, f).

    As in MONAI the matrix goes from output to input, so that a scale above 1 makes things smaller.
    """

    spatial: ClassVar[bool] = True
    ranks: ClassVar[tuple[int, ...]] = (2, 3)
    prob: float = 0.1
    rotate_range: Ranges = None
    shear_range: Ranges = None
    translate_range: Ranges = None
    scale_range: Ranges = None
    padding_mode: str = "reflection"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_padding(self, self.padding_mode)
        for name in _RANGES:
            self._drawn(name, Draws())

    def check(self, spatial: Shape) -> None:
        super().check(spatial)
        rank = len(spatial)
        most = {"rotate_range": 2 * rank - 3, "shear_range": rank * (rank - 1)}
        for name in _RANGES:
            given, known = len(_each(getattr(self, name))), most.get(name, rank)
            if given > known:
                raise self._refuse(f"takes {known} ranges for {name} at most, got {given}")

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        angles, shears, shift, scales = (self._drawn(name, draws) for name in _RANGES)
        matrix = affine(len(sample.spatial), angles, shears, shift, [1 + scale for scale in scales])
        return Affine(sample.shape, self.padding_mode, matrix)

    def _drawn(self, name: str, draws: Draws) -> list[float]:
        return [draws.uniform(*self._range(name, one)) for one in _each(getattr(self, name))]


def _check_padding(transform: Transform, mode: str) -> None:
    if mode not in PADDINGS:
        raise transform._refuse(f"takes a padding_mode of {', '.join(PADDINGS)}, got {mode!r}")


def _each(ranges: Any) -> Sequence[Any]:
    return () if ranges is None else (ranges,) if isinstance(ranges, Real) else tuple(ranges)


def affine(rank: int, angles: Floats, shears: Floats, shift: Floats, scales: Floats) -> Matrix:
    """Return rotation @ shear @ translation @ scaling, as MONAI multiplies them; empty: nothing changes."""
    made, shear, moved, scaled = (np.eye(rank + 1) for _ in range(4))
    planes = ((0, 1),) if rank == 2 else ((1, 2), (2, 0), (0, 1))
    for angle, (first, second) in zip(angles, planes, strict=False):
        turn = np.eye(rank + 1)
        turn[first, first] = turn[second, second] = cos(angle)
        turn[second, first], turn[first, second] = sin(angle), -sin(angle)
        made = made @ turn
    places = [(row, column) for row in range(rank) for column in range(rank) if row != column]
    for place, number in zip(places, shears, strict=False):
        one = np.eye(rank + 1)
        one[place] = number
        shear = one @ shear  # MONAI's since 1.6: a composition, which keeps volumes
    moved[: len(shift), rank] = shift
    scaled[range(len(scales)), range(len(scales))] = scales
    return tuple(map(tuple, (made @ shear @ moved @ scaled)[:rank].tolist()))


@dataclass(frozen=True)
class Rand3DElastic(Transform):
    """Move voxels by a smooth field, of a width from ``sigma_range`` and a size from ``magnitude_range``.

    MONAI smooths a uniform number of each voxel with a Gaussian of sigma voxels, which needs the whole field.
    Here a coarse grid, sqrt(3) * sigma apart, has the uniform numbers, and cubic B-splines, whose deviation
    is sigma as well, are between: every part of the field can be had by itself. Its root mean square is that
    of MONAI's, its single numbers are not.
    """

    spatial: ClassVar[bool] = True
    ranks: ClassVar[tuple[int, ...]] = (3,)
    ranged: ClassVar[Mapping[str, float | None]] = {"sigma_range": 0.0, "magnitude_range": 0.0}
    sigma_range: Sequence[float]
    magnitude_range: Sequence[float]
    prob: float = 0.1
    padding_mode: str = "reflection"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._ends("sigma_range")[0] < 0.5:
            raise self._refuse(f"takes a sigma_range of at least 0.5 voxels, got {self.sigma_range!r}")
        _check_padding(self, self.padding_mode)

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        sigma = draws.uniform(*self._ends("sigma_range"))
        magnitude = draws.uniform(*self._ends("magnitude_range"))
        # A kernel's square sums up to 1 / (2 sqrt(pi) sigma) by axis, that of B-splines to SPLINE_SQUARE.
        amplitude = magnitude * (2 * sqrt(pi) * sigma * SPLINE_SQUARE) ** -1.5
        return Elastic(sample.shape, self.padding_mode, draws.key, sqrt(3) * sigma, amplitude)
