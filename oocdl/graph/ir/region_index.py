"""``RegionIndex`` finds the pieces of a value that have a part of a region, without a look at each piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from oocdl.graph.ir.index import Range, Region, intersect, is_empty, region_size


@dataclass(frozen=True, slots=True)
class Parts:
    """Regions in order: a list of them, or (a few tuples instead of hundreds) a grid of several by its axes.

    >>> list(Parts(None, axes=(((0, 2), (2, 3)), ((4, 5),))))
    [((0, 2), (4, 5)), ((2, 3), (4, 5))]
    """

    listed: tuple[Region, ...] | None = ()
    """Regions one by one; None: they are a grid."""
    axes: tuple[tuple[Range, ...], ...] = ()
    """Ranges of a grid along each axis; those of the last axis vary fastest."""
    places: tuple[int, ...] = ()
    """For each axis of the regions, its place among ``axes``; empty: the same."""

    @property
    def is_one(self) -> bool:
        """Whether it is a single region."""
        return self.listed is not None and len(self.listed) == 1

    def __len__(self) -> int:
        return prod(map(len, self.axes)) if self.listed is None else len(self.listed)

    def __iter__(self) -> Iterator[Region]:
        if self.listed is not None:
            return iter(self.listed)
        cells = product(*self.axes)
        return (tuple([cell[place] for place in self.places]) for cell in cells) if self.places else cells

    def size(self) -> int:
        """Return the number of elements of all regions together."""
        if self.listed is not None:
            return sum(map(region_size, self.listed))
        return prod([sum([stop - start for start, stop in ranges]) for ranges in self.axes])

    def sizes(self, factor: int = 1) -> list[int]:
        """Return ``factor`` times the number of elements of each region."""
        if self.listed is not None:
            return [factor * region_size(region) for region in self.listed]
        sizes = [factor]
        for ranges in self.axes:
            sizes = [size * (stop - start) for size in sizes for start, stop in ranges]
        return sizes


class RegionIndex:
    """Pieces of one value. Those of a grid are found axis by axis; others are looked at one after the other.

    >>> numbers, parts = RegionIndex([((0, 2), (0, 4)), ((2, 3), (0, 4))]).overlaps(((1, 3), (1, 2)))
    >>> numbers, list(parts)
    ([0, 1], [((1, 2), (1, 2)), ((2, 3), (1, 2))])
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._grid = _grid_of(regions)

    def overlaps(self, region: Region) -> tuple[list[int], Parts]:
        """Return the numbers of the pieces that have a part of the region, ascending, and these parts."""
        if self._grid is not None:
            return self._grid.overlaps(region)
        parts = ((number, intersect(held, region)) for number, held in enumerate(self._regions))
        overlapping = [(number, part) for number, part in parts if not is_empty(part)]
        return [number for number, _ in overlapping], Parts(tuple(part for _, part in overlapping))


class _Grid:
    """Pieces of a grid whose numbers grow, or fall, by an equal step along each axis."""

    def __init__(self, axes: Sequence[Sequence[Range]], first: int, steps: Sequence[int]) -> None:
        self._first = first
        self._axes = [
            (ranges, [stop for _, stop in ranges], step) for ranges, step in zip(axes, steps, strict=True)
        ]
        moving = [abs(step) for step in steps if step]
        same = moving == sorted(moving, reverse=True)
        order = range(len(axes)) if same else sorted(range(len(axes)), key=lambda axis: -abs(steps[axis]))
        self._order = list(order)
        self._places = () if same else tuple(self._order.index(axis) for axis in range(len(axes)))
        self._known: list[dict[Range, tuple[list[int], tuple[Range, ...]]]] = [{} for _ in axes]

    def overlaps(self, region: Region) -> tuple[list[int], Parts]:
        """See ``RegionIndex.overlaps``."""
        numbers, axes = [self._first], []
        for axis in self._order:
            wanted = region[axis]
            along = self._known[axis].get(wanted)
            if along is None:
                along = self._known[axis][wanted] = self._along(axis, wanted)
            steps, ranges = along
            axes.append(ranges)
            if len(steps) == 1:
                step = steps[0]
                numbers = [number + step for number in numbers] if step else numbers
            else:
                numbers = [number + step for number in numbers for step in steps]
        parts = Parts(None, tuple(axes), self._places)
        if len(numbers) != 1:
            return numbers, parts
        part = next(iter(parts))  # thousands of units need not hold the same region twice
        return numbers, Parts((region if part == region else part,))

    def _along(self, axis: int, wanted: Range) -> tuple[list[int], tuple[Range, ...]]:
        """For the pieces along one axis that are wanted, what each adds to the number, and its part."""
        ranges, stops, step = self._axes[axis]
        start, stop = wanted
        overlapping: list[tuple[int, Range]] = []
        first = bisect_right(stops, start)
        for place, (low, high) in enumerate(ranges[first:] if start < stop else (), first):
            if low >= stop:
                break
            whole = start <= low and high <= stop
            overlapping.append((step * place, ranges[place] if whole else (max(start, low), min(stop, high))))
        if step < 0:
            overlapping.reverse()
        return [number for number, _ in overlapping], tuple(part for _, part in overlapping)


def _grid_of(regions: Sequence[Region]) -> _Grid | None:
    """The grid that these regions are, in any order of axes and direction; None if they are none."""
    axes = [sorted(set(ranges)) for ranges in zip(*regions, strict=True)]
    disjoint = all(before[1] <= after[0] for axis in axes for before, after in pairwise(axis))
    if not disjoint or not prod(map(len, axes)) == len(set(regions)) == len(regions):
        return None
    places = [{piece: place for place, piece in enumerate(axis)} for axis in axes]
    number = {region: number for number, region in enumerate(regions)}
    low = tuple(axis[0] for axis in axes)
    first = number[low]
    steps = [
        number[(*low[:axis], ranges[1], *low[axis + 1 :])] - first if len(ranges) > 1 else 0
        for axis, ranges in enumerate(axes)
    ]
    for region, held in number.items():
        where = first
        for along, place, step in zip(region, places, steps, strict=True):
            where += step * place[along]
        if where != held:
            return None
    return _Grid(axes, first, steps)
