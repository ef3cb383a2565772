"""Chooses the axes of a chain's loop: outer axes, rows and lanes, and where its reductions are complete.

A chain is built member by member; it ends where one loop cannot have the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from oocdl.fusion.codegen import CHUNK_ROWS, OUTER_AXES, knows
from oocdl.fusion.totals import PLANES
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction

MOST_ROW_LANES = 1024
"""Maximum elements of an innermost axis that is one row; a longer one is cut into rows."""
MOST_JOINED_LANES = 1 << 14
"""Maximum elements of an innermost axis whose sum is that of a row; a longer one is added up in memory."""
MOST_ROWS_AT_ONCE = 4096
"""Maximum rows of a reduction that is never added up in memory."""
REDUCTIONS = {
    **dict.fromkeys(("ReduceSum", "Moments", "ReduceMax"), ("float32", "float64")), "LogSumExp": ("float32",),
}  # fmt: skip
"""Reductions that loops compute, and the dtypes of what they reduce."""


@dataclass(frozen=True)
class AxisGroup:
    """Neighbouring axes of the domain that the loop iterates over as one."""

    axes: tuple[int, ...]
    extent: int


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduction, the column that it reduces, and the columns of its results."""

    item: Instruction
    column: int
    outs: tuple[int, ...]

    @cached_property
    def kept(self) -> tuple[bool, ...]:
        """Whether the result has it, for each axis of the domain."""
        rank = len(self.item.operands[0].shape)
        over = {axis % rank for axis in self.item.attrs["axes"]}
        return tuple(axis not in over for axis in range(rank))

    def keeps(self, group: AxisGroup) -> bool:
        """Whether the result has neighbouring axes."""
        return bool(group.axes) and self.kept[group.axes[0]]


@dataclass(frozen=True)
class Nest:
    """The loops over the domain: up to ``OUTER_AXES`` around the rows, rows, and lanes."""

    outer: tuple[AxisGroup, ...]
    rows: AxisGroup | None
    """None: the axis of the lanes is cut into rows."""
    lanes: AxisGroup
    across: bool = False
    """Whether reductions join all lanes of each row."""
    chunk_rows: int = CHUNK_ROWS
    """Rows that are reduced together."""

    def completes(self, total: Reduction) -> bool:
        """Whether a reduction is complete as soon as its rows are, or its row is."""
        if self.across:
            return True
        at_once = self.rows is not None and self.rows.extent <= self.chunk_rows and not total.keeps(self.rows)
        return at_once and all(map(total.keeps, self.outer)) and total.keeps(self.lanes)


def _groups(domain: Shape, alike: Iterable[tuple[bool, ...]], cropped: bool) -> list[AxisGroup]:
    """Join neighbouring axes of the domain where each of ``alike`` has the same flag for both.

    None are joined where an operand is ``cropped``.
    """
    flags, groups = [*zip(*alike, strict=True)], list[list[int]]()
    for axis in (axis for axis, extent in enumerate(domain) if extent > 1):
        if groups and not cropped and (not flags or flags[axis] == flags[groups[-1][-1]]):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return [AxisGroup(tuple(axes), prod(domain[a] for a in axes)) for axes in groups]


def _nest(
    domain: Shape, alike: Iterable[tuple[bool, ...]], cropped: bool, totals: Sequence[Reduction]
) -> Nest | None:
    """Choose outer axes, rows and lanes; None where no loop has all operands and reductions.

    ``alike``: for each operand, whether it varies along each axis.
    """
    groups = _groups(domain, {*alike, *(total.kept for total in totals)}, cropped) or [AxisGroup((), 1)]
    *before, lanes = groups
    rows = before[-1] if before else AxisGroup((), 1)
    at_once = any(total.item.op not in PLANES for total in totals)
    # All of them join all lanes, for each place before these.
    joined = bool(totals and lanes.axes) and not any(total.keeps(lanes) for total in totals)
    joined = joined and all(total.keeps(group) for total in totals for group in before)
    if joined and (at_once or lanes.extent <= MOST_JOINED_LANES):
        return Nest(tuple(before[:-1]), rows, lanes, across=True)
    inside = any(total.keeps(lanes) for total in totals)
    row_kept = any(total.keeps(rows) for total in totals)
    if at_once:
        nest = Nest(tuple(before[:-1]), rows, lanes, chunk_rows=MOST_ROWS_AT_ONCE)
        return nest if all(nest.completes(total) for total in totals) else None
    if row_kept and inside:
        return None
    if row_kept or (lanes.extent > MOST_ROW_LANES and not inside):
        return Nest(tuple(before), None, lanes)
    return Nest(tuple(before[:-1]), rows, lanes)


def computes(item: Instruction, dtypes: Mapping[int, str]) -> bool:
    """Whether loops compute an instruction; ``dtypes``: slot -> dtype."""
    if item.op in REDUCTIONS:
        return bool(item.attrs["axes"]) and dtypes[item.operands[0].slot] in REDUCTIONS[item.op]
    kinds = tuple([dtypes[operand.slot] for operand in item.operands])
    return len(item.outputs) == 1 and knows(item.op, kinds, item.dtypes[0])


class Draft:
    """The loop of a chain that is being built."""

    def __init__(self, domain: Shape) -> None:
        self.domain = domain
        self.made: set[int] = set()
        self.reduced: set[int] = set()
        """Slots of reductions' results, which no member may read."""
        self.alike: set[tuple[bool, ...]] = set()
        self.totals: list[Reduction] = []
        self.cropped = False
        self.nest: Nest | None = None

    def add(self, item: Instruction) -> bool:
        """Take in a member that loops compute; returns whether this one can have it."""
        shape = item.operands[0].shape if item.op in REDUCTIONS else item.kernel_shapes[0]
        if shape != self.domain:
            return False
        alike, cropped, rank = set(self.alike), self.cropped, len(shape)
        for operand in item.operands:
            if operand.slot in self.made:
                if operand.slot in self.reduced or operand.crop is not None or operand.shape != self.domain:
                    return False
            else:
                if len(operand.shape) > rank:
                    return False
                lead = (False,) * (rank - len(operand.shape))
                alike.add((*lead, *(extent > 1 for extent in operand.shape)))
                cropped = cropped or operand.crop is not None
        totals = [*self.totals, Reduction(item, 0, ())] if item.op in REDUCTIONS else self.totals
        if self.nest is None or (alike, cropped) != (self.alike, self.cropped) or totals is not self.totals:
            nest = _nest(self.domain, alike, cropped, totals)
            if nest is None or len(nest.outer) > OUTER_AXES:
                return False
            self.nest, self.alike, self.cropped = nest, alike, cropped
        if item.op in REDUCTIONS:
            self.totals.append(totals[-1])
            self.reduced.update(item.outputs)
        self.made.update(item.outputs)
        return True


def nest_of(domain: Shape, members: Iterable[Instruction]) -> Nest | None:
    """Return the loops of a chain; None where one loop cannot have all members."""
    draft = Draft(domain)
    return draft.nest if all(map(draft.add, members)) else None
