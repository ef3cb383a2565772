"""All units of a layer, put together from a few that are derived in full.

To derive regions and program of a shard takes milliseconds, and a layer may have thousands. But each axis of
a region follows at most one cut class; along a class, pieces of equal size differ by a shift alone. So some
shards along each class are derived (a *scan*), those between are shifted, and any other shard takes each
axis from the scan of its class. Its program is that of the shard whose pieces have, class by class, the
first of the same programs. A layer that is not so (some shards read a value and others do not) has no
``ShardGrid``; its shards are derived one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from oocdl.graph.ir.index import Range, Region
from oocdl.graph.partition.unit import Shard, Unit

MIN_SHARDS, MIN_SHARDS_ALONG = 32, 8
"""Layers of fewer shards are derived one by one, as scans would take as long; the second is for shards
along one class that do not differ by a shift alone."""

Derive = Callable[[Shard], Unit]
IsEven = Callable[[int, int, int], bool]
"""(class by its place in the grid, low, high): whether pieces from low to high differ by equal shifts."""
Regions = tuple[tuple[str, Region], ...]


@dataclass(frozen=True, eq=False)
class _Axes:
    """One value's regions: the constant ones, and for each axis that follows a class its ranges by piece."""

    name: str
    constant: Region
    follows: tuple[tuple[int, int, Sequence[Range]], ...]
    """(axis, class, range for each piece)"""
    known: dict[Shard, tuple[str, Region]] = field(default_factory=dict)
    """Pieces of the classes that it follows -> (name, region), which shards with these pieces share."""

    def region(self, shard: Shard) -> tuple[str, Region]:
        """Return the value's name and the shard's region of it."""
        pieces = tuple(shard[place] for _, place, _ in self.follows)
        if pieces not in self.known:
            region = list(self.constant)
            for (axis, _, ranges), piece in zip(self.follows, pieces, strict=True):
                region[axis] = ranges[piece]
            self.known[pieces] = self.name, tuple(region)
        return self.known[pieces]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardGrid:
    """The shards of one layer."""

    scans: Sequence[Sequence[Unit]]
    """For each class the units along it, the other classes at their middle pieces."""
    firsts: Sequence[Sequence[int]]
    """For each class and piece, the first piece whose unit in the scan has the same program."""
    middle: Unit
    reads: Sequence[_Axes]
    makes: Sequence[_Axes]
    kinds: dict[Shard, Unit]
    """One shard for each program that there may be, derived in full."""

    def unit(self, shard: Shard) -> Unit:
        """One unit, put together."""
        alike = tuple(first[piece] for first, piece in zip(self.firsts, shard, strict=True))
        along = [scan[piece] for scan, piece in zip(self.scans, shard, strict=True)]
        counts = self.middle.counts
        if any(unit.counts != counts for unit in along):
            each = zip(*(unit.counts for unit in along), counts, strict=True)
            counts = tuple(prod(numbers[:-1]) // numbers[-1] ** (len(along) - 1) for numbers in each)
        return Unit(
            layer=self.middle.layer,
            shard=shard,
            reads=tuple(axes.region(shard) for axes in self.reads),
            program=self.kinds[alike].program,
            makes=tuple(axes.region(shard) for axes in self.makes),
            counts=counts,
        )

    def units(self) -> list[Unit]:
        """All units, the last class varying fastest."""
        return [self.unit(shard) for shard in product(*(range(len(scan)) for scan in self.scans))]


def find_shard_grid(pieces: Shard, distinct: Shard, derive: Derive, is_even: IsEven) -> ShardGrid | None:
    """The shards of a layer with so many ``pieces`` of each class; None if they have to be derived each.

    ``distinct``: pieces of each class that do not differ by a shift alone.
    """
    along = max(pieces, default=1) == prod(pieces) and prod(distinct) >= MIN_SHARDS_ALONG
    if prod(pieces) < MIN_SHARDS and not along:
        return None
    middle = tuple(count // 2 for count in pieces)
    base = derive(middle)
    scans = [_scan(place, pieces, middle, derive, is_even) for place in range(len(pieces))]
    if any(_structure(unit) != _structure(base) for scan in scans for unit in scan):
        return None
    reads = _axes([[unit.reads for unit in scan] for scan in scans], base.reads)
    makes = _axes([[unit.makes for unit in scan] for scan in scans], base.makes)
    if reads is None or makes is None:
        return None
    firsts: list[list[int]] = []
    for scan in scans:
        first: dict[str, int] = {}
        firsts.append([first.setdefault(unit.program.key, piece) for piece, unit in enumerate(scan)])
    kinds = {shard: derive(shard) for shard in product(*(sorted(set(first)) for first in firsts))}
    grid = ShardGrid(scans=scans, firsts=firsts, middle=base, reads=reads, makes=makes, kinds=kinds)
    for shard, full in kinds.items():
        made = grid.unit(shard)
        if (made.reads, made.makes, made.counts) != (full.reads, full.makes, full.counts):
            return None
    return grid


def _structure(unit: Unit) -> object:
    """Return the facts that all shards must share: values, operators and their numbers of operands."""
    names = [name for name, _ in (*unit.reads, *unit.makes)]
    return names, [(step.op, len(step.operands)) for step in unit.program.instructions]


def _scan(place: int, pieces: Shard, middle: Shard, derive: Derive, is_even: IsEven) -> list[Unit]:
    """The units along one class. Where three of them have one program and equal shifts, those between do."""
    units: dict[int, Unit] = {}

    def at(piece: int) -> Unit:
        if piece not in units:
            units[piece] = derive((*middle[:place], piece, *middle[place + 1 :]))
        return units[piece]

    def fill(low: int, high: int) -> None:
        if high - low < 3:
            for piece in range(low, high + 1):
                at(piece)
            return
        first, second, last = at(low), at(low + 1), at(high)
        same = first.program.key == second.program.key == last.program.key
        facts = last.reads, last.makes, last.counts
        if same and is_even(place, low, high) and _shifted(first, second, high - low) == facts:
            for piece in range(low + 2, high):
                reads, makes, counts = _shifted(first, second, piece - low)
                shard = (*middle[:place], piece, *middle[place + 1 :])
                units[piece] = Unit(first.layer, shard, reads, first.program, makes, counts)
            return
        fill(low, (low + high) // 2)
        fill((low + high) // 2 + 1, high)

    count = pieces[place]
    fill(0, 0)
    if count > 1:
        fill(count - 1, count - 1)
        fill(1, count - 2)
    return [units[piece] for piece in range(count)]


def _shifted(first: Unit, second: Unit, times: int) -> tuple[Regions, Regions, tuple[int, ...]]:
    """The regions of the unit that is so many times as far from the first as the second is."""

    def moved(one: Range, other: Range) -> Range:
        return one[0] + times * (other[0] - one[0]), one[1] + times * (other[1] - one[1])

    def shift(some: Regions, others: Regions) -> Regions:
        return tuple(
            (name, tuple(map(moved, before, after)))
            for (name, before), (_, after) in zip(some, others, strict=True)
        )

    return shift(first.reads, second.reads), shift(first.makes, second.makes), first.counts


def _axes(scans: Sequence[Sequence[Regions]], base: Regions) -> list[_Axes] | None:
    """For each value, which axes follow which class; None if one axis follows several."""
    axes: list[_Axes] = []
    for index, (name, constant) in enumerate(base):
        follows: list[tuple[int, int, Sequence[Range]]] = []
        for axis, usual in enumerate(constant):
            for place, scan in enumerate(scans):
                ranges = [regions[index][1][axis] for regions in scan]
                if any(each != usual for each in ranges):
                    follows.append((axis, place, ranges))
        if len({axis for axis, _, _ in follows}) < len(follows):
            return None
        axes.append(_Axes(name, constant, tuple(follows)))
    return axes
