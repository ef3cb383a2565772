"""Affine maps and smooth deformations: transforms that move voxels to places between voxels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil, cos, floor, pi, sin, sqrt
from numbers import Real
from operator import add
from typing import Any, ClassVar

import numpy as np

from oocdl.augmentation.draws import Array, Draws, Shape, uniform
from oocdl.augmentation.interpolation import PADDINGS, Warp
from oocdl.augmentation.transform import Operation, Sample, Transform
from oocdl.graph.ir.index import Region

Ranges = float | Sequence[float | Sequence[float]] | None
"""MONAI's: for each number a pair, or f for (-f, f); None: none is drawn."""
Matrix = tuple[tuple[float, ...], ...]
_RANGES = ("rotate_range", "shear_range", "translate_range", "scale_range")
SPLINE_SQUARE = 151 / 315  # integral of the square of a cubic B-spline


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


def affine(
    rank: int,
    angles: Sequence[float],
    shears: Sequence[float],
    shift: Sequence[float],
    scales: Sequence[float],
) -> Matrix:
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
