"""``RegionIndex`` finds the pieces of a value that have a part of a region, without a look at each piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

from oocdl.graph.ir.index import Range, Region, intersect, is_empty


class RegionIndex:
    """Pieces of one value. Those of a grid are found axis by axis; others are looked at one after the other.

    >>> index = RegionIndex([((0, 2), (0, 4)), ((2, 3), (0, 4))])
    >>> index.overlaps(((1, 3), (1, 2)))
    [(0, ((1, 2), (1, 2))), (1, ((2, 3), (1, 2)))]
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        axes = [sorted(set(ranges)) for ranges in zip(*regions, strict=True)]
        disjoint = all(one[1] <= other[0] for axis in axes for one, other in pairwise(axis))
        self._is_grid = disjoint and prod(map(len, axes)) == len(set(regions)) == len(regions)
        self._axes = axes
        self._stops = [[stop for _, stop in axis] for axis in axes]
        self._number = {region: number for number, region in enumerate(regions)}
        self._known: list[dict[Range, list[tuple[Range, Range]]]] = [{} for _ in axes]

    def overlaps(self, region: Region) -> list[tuple[int, Region]]:
        """Return (number of the piece, its part of the region), in the order of the pieces."""
        if not self._is_grid:
            parts = ((number, intersect(held, region)) for number, held in enumerate(self._regions))
            return [(number, part) for number, part in parts if not is_empty(part)]
        axes = [self._along(axis, wanted) for axis, wanted in enumerate(region)]
        number = self._number
        found = [
            (number[tuple([held for held, _ in cell])], tuple([part for _, part in cell]))
            for cell in product(*axes)
        ]
        if len(found) > 1:
            found.sort()
        return found

    def _along(self, axis: int, wanted: Range) -> list[tuple[Range, Range]]:
        """Ranges of pieces along one axis, each with its part of the range that is wanted."""
        known = self._known[axis].get(wanted)
        if known is None:
            known, (start, stop) = [], wanted
            ranges = self._axes[axis]
            for low, high in ranges[bisect_right(self._stops[axis], start) :] if start < stop else ():
                if low >= stop:
                    break
                part = (low, high) if start <= low and high <= stop else (max(start, low), min(stop, high))
                known.append(((low, high), part))
            self._known[axis][wanted] = known
        return known
