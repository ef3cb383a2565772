"""Holds some calls of a pass as they travel to a member: numbers, and kinds of calls, pickled before.

The member makes from them the keys of chunks, the regions and its calls, which are equal to those of the pass
in all that they say.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.index import Range, Region
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.region_index import Parts
from oocdl.graph.partition.unit import Unit
from oocdl.planning.calls import Call, CombineCall, PickCall, Read, UnitCall
from oocdl.planning.hosts.ragged import Ints, Ragged
from oocdl.planning.task_key import TaskKey, TaskKind

KINDS = tuple(TaskKind)
"""Kinds of tasks; the place of each is the number that stands for it."""


class UnitKind(NamedTuple):
    """The facts that many units share."""

    key: tuple[TaskKind, str, str]
    """Key of a call without its number."""
    layer: int
    program: int
    """Number of the program in the pass."""
    names: tuple[str, ...]
    """Names of the values that a unit makes."""
    counts: tuple[int, ...]
    combines: tuple[str | None, ...]
    dtypes: tuple[str, ...]
    buffer_bytes: int
    scratch_bytes: int


class CombineKind(NamedTuple):
    """The facts that many calls which combine sums share."""

    key: tuple[TaskKind, str, str]
    combine: str
    values: tuple[str, ...]
    dtypes: tuple[str, ...]
    buffer_bytes: int


class ReadKind(NamedTuple):
    """The facts that many reads share."""

    value: str
    dtype: str
    order: Order
    overwritten: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class CallPart:
    """Some calls, with all regions and keys of chunks that their member needs.

    All numbers are those of the whole pass; what has no number here is not known.
    """

    numbers: Ints
    """Numbers of the calls, without those that pick: these follow their calls."""
    columns: Ints
    """Kind, number in the key, position, and first chunk of each call."""
    own_numbers: Ragged
    """Shard of each unit; for a call that combines, the elements that went into each partial sum."""
    arguments: Ragged
    """Chunks that are the arguments of each call."""
    reads: Ragged
    """Numbers of the reads of each call."""
    made: Ragged
    """Regions of the results of each call."""
    uses: Ragged
    """Positions of the readers of each result of each call."""
    sums: Ints
    """Call, result, argument and elements so far of each partial sum that a unit adds to."""
    kinds: Mapping[int, bytes]
    programs: Mapping[int, bytes]
    read_numbers: Ints
    read_columns: Ints
    """Kind, region, parts and first argument of each read."""
    read_kinds: Mapping[int, bytes]
    part_numbers: Ints
    places: Ints
    """Place of each ``Parts`` in ``grids``; -1: it is a list."""
    parts: Ragged
    """Regions of each list, or axes of each grid."""
    grids: Sequence[tuple[int, ...]]
    region_numbers: Ints
    ends: Ragged
    """Starts and stops of the ranges of each region, or axis of a grid."""
    chunks: Ints
    key_columns: Ints
    """Kind, layer, value and number of the key of each chunk."""
    names: Sequence[str]
    """Names of layers and values."""

    @cached_property
    def keys(self) -> Mapping[int, TaskKey]:
        """Keys of chunks, by their numbers."""
        kinds, layers, values, numbers = self.key_columns.tolist()
        name = self.names.__getitem__
        made = map(TaskKey, map(KINDS.__getitem__, kinds), map(name, layers), map(name, values), numbers)
        return dict(zip(self.chunks.tolist(), made, strict=True))

    @cached_property
    def regions(self) -> Mapping[int, Region]:
        """Regions, and axes of grids, by their numbers."""
        known: dict[Range, Range] = {}
        made = (
            tuple([known.setdefault(one, one) for one in zip(ends[::2], ends[1::2], strict=True)])
            for ends in self.ends.lists()
        )
        return dict(zip(self.region_numbers.tolist(), made, strict=True))

    @cached_property
    def calls(self) -> Mapping[int, Call]:
        """The calls, by their numbers in the pass, and those that pick their results."""
        kinds = {number: pickle.loads(packed) for number, packed in self.kinds.items()}
        programs = {number: pickle.loads(packed) for number, packed in self.programs.items()}
        reads, sums = self._reads(), self._sums()
        key, region, read = self.keys.__getitem__, self.regions.__getitem__, reads.__getitem__
        uses = self.uses.lists()
        found: dict[int, Call] = {}
        for number, (which, of_key, position, first), own, arguments, read_numbers, made in zip(
            self.numbers.tolist(), self.columns.T.tolist(), self.own_numbers.lists(),
            self.arguments.lists(), self.reads.lists(), self.made.lists(), strict=True,
        ):  # fmt: skip
            kind = kinds[which]
            facts = _Facts(
                key=TaskKey(kind.key[0], kind.key[1], kind.key[2], of_key),
                position=position,
                own=tuple(own),
                arguments=tuple(map(key, arguments)),
                regions=tuple(map(region, made)),
                uses=tuple([tuple(next(uses)) for _ in kind.dtypes]),
            )
            if isinstance(kind, CombineKind):
                found[number] = _combine_call(kind, facts)
            else:
                some = tuple(map(read, read_numbers))
                found[number] = _unit_call(kind, facts, programs[kind.program], some, sums.get(number, {}))
            if len(kind.dtypes) > 1:
                for place in range(len(kind.dtypes)):
                    found[number + 1 + place] = PickCall(key(first + place), facts.key, place)
        return found

    def _reads(self) -> dict[int, tuple[Read, tuple[str, Region]]]:
        """Return reads by their numbers, each with value and region as ``Unit`` has them."""
        kinds = {number: ReadKind(*pickle.loads(packed)) for number, packed in self.read_kinds.items()}
        grids, regions = self.grids, self.regions
        parts = {}
        for number, grid, some in zip(
            self.part_numbers.tolist(), self.places.tolist(), self.parts.lists(), strict=True
        ):
            ranges = tuple([regions[one] for one in some])
            parts[number] = Parts(ranges) if grid < 0 else Parts(None, ranges, grids[grid])
        found = {}
        for number, (which, region, of, first) in zip(
            self.read_numbers.tolist(), self.read_columns.T.tolist(), strict=True
        ):
            kind, where = kinds[which], regions[region]
            made = Read(kind.value, where, kind.dtype, parts[of], first, kind.order, kind.overwritten)
            found[number] = made, (kind.value, where)
        return found

    def _sums(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Return a mapping of calls to results to (argument, elements)."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for call, result, argument, elements in self.sums.T.tolist():
            found.setdefault(call, {})[result] = argument, elements
        return found


class _Facts(NamedTuple):
    """The facts of a call that are not those of its kind."""

    key: TaskKey
    position: int
    own: tuple[int, ...]
    arguments: tuple[TaskKey, ...]
    regions: tuple[Region, ...]
    uses: tuple[tuple[int, ...], ...]


def _combine_call(kind: CombineKind, facts: _Facts) -> CombineCall:
    return CombineCall(
        key=facts.key,
        position=facts.position,
        combine=kind.combine,
        arguments=facts.arguments,
        values=kind.values,
        counts=facts.own,
        region=facts.regions[0],
        dtypes=kind.dtypes,
        uses=facts.uses,
        buffer_bytes=kind.buffer_bytes,
    )


def _unit_call(
    kind: UnitKind,
    facts: _Facts,
    program: Program,
    reads: Sequence[tuple[Read, tuple[str, Region]]],
    sums: Mapping[int, tuple[int, int]],
) -> UnitCall:
    makes = tuple(zip(kind.names, facts.regions, strict=True))
    unit = Unit(kind.layer, facts.own, tuple([one for _, one in reads]), program, makes, kind.counts)
    return UnitCall(
        key=facts.key,
        position=facts.position,
        unit=unit,
        arguments=facts.arguments,
        reads=tuple([read for read, _ in reads]),
        partial_sums=tuple([sums.get(place) for place in range(len(makes))]),
        combines=kind.combines,
        dtypes=kind.dtypes,
        uses=facts.uses,
        buffer_bytes=kind.buffer_bytes,
        scratch_bytes=kind.scratch_bytes,
    )
