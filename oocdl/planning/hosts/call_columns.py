"""Holds the calls of a pass in columns of numbers, from which each member's part is picked and pickled.

A pass has a hundred thousand units, but only hundreds of kinds of them: units of a layer that share a program
differ only in their regions. Each kind, and each program, is pickled once for all members. Numbers tell where
calls are, what they read, and which calls read their results.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count
from operator import attrgetter
from typing import Any

import numpy as np

from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.hosts.call_part import KINDS, CallPart, CombineKind, UnitKind
from oocdl.planning.hosts.flat_pass import FlatPass, ends_of
from oocdl.planning.hosts.ragged import Ints, Ragged, counts_of, ragged, runs, small, starts_of
from oocdl.planning.task_key import TaskKey


class _Table:
    """A table of things that many calls share: each has a number, and is pickled once for all members."""

    def __init__(self) -> None:
        self.number: defaultdict[Any, int] = defaultdict(count().__next__)
        self._packed: list[bytes] = []

    def numbered(self, things: Sequence[Hashable]) -> Ints:
        """Return the number of each thing; a new one gets the next number."""
        return np.fromiter(map(self.number.__getitem__, things), np.int64, len(things))

    def packed(self, some: Ints) -> dict[int, bytes]:
        """Return some of the things, pickled, by number."""
        if not self._packed:
            self._packed += [pickle.dumps(thing, pickle.HIGHEST_PROTOCOL) for thing in self.number]
        return {place: self._packed[place] for place in some.tolist()}


@dataclass(frozen=True, eq=False, kw_only=True)
class CallColumns:
    """All calls of a pass in columns; ``CallPart`` has such columns of some of them."""

    flat: FlatPass
    columns: Ints
    """Kind (-1: it picks), number in the key, position, and first chunk of each call."""
    own_numbers: Ragged
    reads: Ragged
    uses: Ragged
    """Positions of the calls that read each chunk that is made."""
    kinds: _Table
    program_of: Ints
    """Number of the program of each kind; -1: it has none."""
    programs: _Table
    read_columns: Ints
    read_kinds: _Table
    places: Ints
    parts: Ragged
    grids: Sequence[tuple[int, ...]]
    ends: Ragged
    """Starts and stops of ranges: those of all ``flat.regions``, then those of axes of grids."""
    key_columns: Ints
    names: Sequence[str]

    def part(self, calls: Ints, chunks: Ints, regions: Ints) -> CallPart:
        """Return the part for the member that owns these calls, with further chunks and regions."""
        flat = self.flat
        own = calls[self.columns[0, calls] >= 0]
        columns = self.columns[:, own]
        kinds = np.unique(columns[0])
        programs = self.program_of[kinds]
        arguments, reads, made = (
            lists.take(own)
            for lists in (
                Ragged(flat.first, flat.source),
                self.reads,
                Ragged(flat.results - flat.inputs, flat.made),
            )
        )
        results = runs(flat.results[own], flat.results[own + 1] - flat.results[own])
        read_numbers = _used(self.read_columns.shape[1], reads.values)
        read_columns = self.read_columns[:, read_numbers]
        part_numbers = _used(len(self.places), read_columns[2])
        parts = self.parts.take(part_numbers)
        region_numbers = _used(len(self.ends.first) - 1, made.values, read_columns[1], parts.values, regions)
        chunks = _used(len(flat.keys), arguments.values, results, chunks)
        sums = flat.added[:, np.isin(flat.added[0], own)]
        return CallPart(
            numbers=small(own),
            columns=small(columns),
            own_numbers=self.own_numbers.take(own).small(),
            arguments=arguments.small(),
            reads=reads.small(),
            made=made.small(),
            uses=self.uses.take(results - flat.inputs).small(),
            sums=small(sums),
            kinds=self.kinds.packed(kinds),
            programs=self.programs.packed(np.unique(programs[programs >= 0])),
            read_numbers=small(read_numbers),
            read_columns=small(read_columns),
            read_kinds=self.read_kinds.packed(np.unique(read_columns[0])),
            part_numbers=small(part_numbers),
            places=small(self.places[part_numbers]),
            parts=parts.small(),
            grids=self.grids,
            region_numbers=small(region_numbers),
            ends=self.ends.take(region_numbers).small(),
            chunks=small(chunks),
            key_columns=small(self.key_columns[:, chunks]),
            names=self.names,
        )


def _used(count: int, *numbers: Ints) -> Ints:
    """Return which of ``count`` numbers occur, ascending."""
    there = np.zeros(count, bool)
    for some in numbers:
        there[some] = True
    return np.flatnonzero(there)


def columns_of(flat: FlatPass) -> CallColumns:
    """Turn the calls of a pass into columns."""
    calls = [call for call in flat.graph.calls if not isinstance(call, PickCall)]
    at = np.array([not isinstance(call, PickCall) for call in flat.graph.calls])
    kinds, programs, read_kinds, grids, names = (_Table() for _ in range(5))
    columns = np.full((4, len(at)), -1)
    columns[0, at] = kinds.numbered(_kinds(calls, programs))
    columns[1, at] = [call.key.number for call in calls]
    columns[2, at] = [call.position for call in calls]
    columns[3] = flat.results[:-1]

    def by_call(lists: Sequence[Sized], values: Ints) -> Ragged:
        counts = np.zeros(len(at), np.int64)
        counts[at] = counts_of(lists)
        return Ragged(starts_of(counts), values)

    own = [call.unit.shard if isinstance(call, UnitCall) else call.counts for call in calls]
    reads = [call.reads if isinstance(call, UnitCall) else () for call in calls]
    facts = attrgetter("value", "dtype", "order", "overwritten")
    of_reads = (
        read_kinds.numbered(list(map(facts, flat.reads.objects))),
        flat.reads.region,
        flat.reads.parts_of,
        [read.first for read in flat.reads.objects],
    )
    places, parts, ends = _parts(flat, grids)
    key_columns = _key_columns(flat.keys, names)
    return CallColumns(
        flat=flat,
        columns=columns,
        own_numbers=by_call(own, ragged(own).values),
        reads=by_call(reads, flat.reads.of_units),
        uses=ragged([positions for call in calls for positions in call.uses]),
        kinds=kinds,
        program_of=np.array([getattr(kind, "program", -1) for kind in kinds.number], np.int64),
        programs=programs,
        read_columns=np.stack(of_reads),
        read_kinds=read_kinds,
        places=places,
        parts=parts,
        grids=list(grids.number),
        ends=ends,
        key_columns=key_columns,
        names=list(names.number),
    )


def _kinds(calls: Sequence[UnitCall | CombineCall], programs: _Table) -> list[UnitKind | CombineKind]:
    """Return the kind of each call."""
    program_of = iter(
        programs.numbered([call.unit.program for call in calls if isinstance(call, UnitCall)]).tolist()
    )
    found: list[UnitKind | CombineKind] = []
    for call in calls:
        key = call.key[:3]
        if isinstance(call, CombineCall):
            found.append(CombineKind(key, call.combine, call.values, call.dtypes, call.buffer_bytes))
            continue
        costs = call.buffer_bytes, call.scratch_bytes
        shared = next(program_of), call.values, call.unit.counts, call.combines, call.dtypes
        found.append(UnitKind(key, call.unit.layer, *shared, *costs))
    return found


def _parts(flat: FlatPass, grids: _Table) -> tuple[Ints, Ragged, Ragged]:
    """Return the grid of each ``Parts`` (-1: it is a list), its regions or axes, and the ends of these."""
    parts, axes = flat.reads.parts, _Table()
    is_grid = np.array([one.listed is None for one in parts], bool)
    several = [one for one in parts if one.listed is None]
    places = np.full(len(parts), -1)
    places[is_grid] = grids.numbered([one.places for one in several])
    counts = np.diff(flat.reads.of_parts.first)
    counts[is_grid] = counts_of([one.axes for one in several])
    of_grid, values = np.repeat(is_grid, counts), np.empty(counts.sum(), np.int64)
    values[of_grid] = len(flat.regions) + axes.numbered([*chain.from_iterable(one.axes for one in several)])
    values[~of_grid] = flat.reads.of_parts.take(np.flatnonzero(~is_grid)).values
    more = ends_of(list(axes.number))
    ends = Ragged(
        np.concatenate((flat.ends.first, flat.ends.first[-1] + more.first[1:])),
        np.concatenate((flat.ends.values, more.values)),
    )
    return places, Ragged(starts_of(counts), values), ends


def _key_columns(keys: Sequence[TaskKey], names: _Table) -> Ints:
    """Return columns of the kind, layer, value and number of keys."""
    kinds, layers, values, numbers = zip(*keys, strict=True)
    number_of = {kind: place for place, kind in enumerate(KINDS)}
    columns = [number_of[kind] for kind in kinds], names.numbered(layers), names.numbered(values), numbers
    return np.array(columns, np.int64)
