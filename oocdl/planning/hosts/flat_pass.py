"""Turns a pass into arrays of numbers: who reads how much of what, for millions of arguments at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, CombineCall, PickCall, Read, UnitCall, made_regions
from oocdl.planning.hosts.ragged import Ints, counts_of, runs, starts_of
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatPass:
    """A pass in numbers. Chunks are numbered from the inputs of the pass to the results of calls, in order.

    The arguments of all calls follow each other in the calls' order; calls that pick have none.
    """

    graph: TaskGraph
    own: Ints
    """Place of each call, or of the call from which it picks."""
    tasks: Sequence[tuple[TaskKind, str]]
    """Kinds and layers in the keys of calls."""
    task_of: Ints
    """Place in ``tasks`` of each call, or of the call from which it picks."""
    positions: Ints
    """Plan position of each call; -1: it picks."""
    keys: Sequence[TaskKey]
    """Keys of the chunks."""
    number: dict[TaskKey, int]
    """Key -> the number of that chunk."""
    maker: Ints
    """Place in ``graph.calls`` of the call that makes each chunk; -1: the pass starts from it."""
    sizes: Ints
    """Bytes of each chunk."""
    results: Ints
    """First of the chunks that each call makes, and the end of the last."""
    first: Ints
    """First of the arguments of each call, and the end of the last."""
    source: Ints
    """Chunk that each argument is."""
    nbytes: Ints
    """Bytes that are read of each argument."""
    part: Ints
    """Place in ``regions`` of what is read of each argument; -1: all of it, as it is a partial sum."""
    cut: npt.NDArray[np.bool_]
    """Whether only a part of each argument is read."""
    regions: Sequence[Region]
    """Distinct regions: those that are read of chunks, and those that calls make."""
    read_runs: tuple[Ints, Ints]
    """Number that equal lists of arguments share, and their length, for each read of each unit and the sums
    of each call, in order; empty lists are left out."""
    adding: Ints
    """Places of the units that add to a partial sum."""

    @property
    def calls(self) -> Sequence[Call]:
        """The calls of the pass."""
        return self.graph.calls

    def readers(self, arguments: Ints) -> Ints:
        """Return the place of the call of each of some arguments."""
        return np.searchsorted(self.first, arguments, "right") - 1

    @property
    def inputs(self) -> int:
        """Number of chunks that the pass starts from."""
        return len(self.graph.inputs)

    def arguments_of(self, calls: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Return the numbers of all arguments of some calls, in order, and each one's place in ``calls``."""
        firsts = self.first[calls]
        counts = self.first[np.asarray(calls) + 1] - firsts
        return runs(firsts, counts), np.repeat(np.arange(len(counts)), counts)


def flatten(graph: TaskGraph) -> FlatPass:
    """Number the chunks and arguments of a pass."""
    calls = graph.calls
    units = [call for call in calls if isinstance(call, UnitCall)]
    working = [call for call in calls if not isinstance(call, PickCall)]
    works = np.array([not isinstance(call, PickCall) for call in calls], bool)
    makes = _spread(works, [call.dtypes for call in working])
    results = len(graph.inputs) + starts_of(makes)
    own = np.maximum.accumulate(np.where(makes > 0, np.arange(len(calls)), 0))
    tasks: dict[tuple[TaskKind, str], int] = {}
    task_of, positions = np.zeros(len(calls), np.int64), np.full(len(calls), -1)
    task_of[works] = [tasks.setdefault(call.key[:2], len(tasks)) for call in working]
    positions[works] = [call.position for call in working]
    # One result is named as its call is; several as the calls are that pick them, which follow it.
    named = (call.key for call, count in zip(calls, makes.tolist(), strict=True) if count < 2)
    keys = [*graph.inputs, *named]
    number = dict(zip(keys, range(len(keys)), strict=True))
    objects, of_units, last = _objects(units)
    parts = [*{id(read.parts): read.parts for read in objects}.values()]  # few, as most reads share theirs
    regions, (in_parts, made) = _numbered(
        list(chain.from_iterable(parts)), [region for call in working for region in made_regions(call)]
    )
    elements = _elements(regions)
    before = np.fromiter((graph.input_bytes[key] for key in graph.inputs), np.int64, len(graph.inputs))
    itemsizes = _itemsizes([dtype for call in working for dtype in call.dtypes])
    sizes = np.concatenate((before, elements[made] * itemsizes))
    place_of = {id(one): place for place, one in enumerate(parts)}
    parts_of = np.fromiter((place_of[id(read.parts)] for read in objects), np.int64, len(objects))
    counts = counts_of(parts)[parts_of]
    part = in_parts[runs(starts_of(counts_of(parts))[parts_of], counts)]
    source = _sources_of(objects, counts, units, last, number)
    nbytes = elements[part] * np.repeat(_itemsizes([read.dtype for read in objects]), counts)
    cut = nbytes != sizes[source]
    sums = _sums(zip(np.flatnonzero(works).tolist(), working, results[:-1][works].tolist(), strict=True))
    read_counts = _spread(works, [call.reads if isinstance(call, UnitCall) else () for call in working])
    sum_counts = np.bincount(np.array(sums.calls, np.int64), minlength=len(calls))
    column = runs(*(read_runs := _in_order(starts_of(counts), of_units, read_counts, sum_counts)))
    return FlatPass(
        graph=graph,
        own=own,
        tasks=list(tasks),
        task_of=task_of[own],
        positions=positions,
        keys=keys,
        number=number,
        maker=np.concatenate((np.full(len(before), -1), np.repeat(np.arange(len(calls)), makes))),
        sizes=sizes,
        results=results,
        first=starts_of(_spread(works, [call.arguments for call in working])),
        source=np.concatenate((source, np.array([number[key] for key in sums.keys], np.int64)))[column],
        nbytes=np.concatenate((nbytes, sizes[np.array(sums.alike, np.int64)]))[column],
        part=np.concatenate((part, np.full(len(sums.keys), -1)))[column],
        cut=np.concatenate((cut, np.zeros(len(sums.keys), bool)))[column],
        regions=regions,
        read_runs=read_runs,
        adding=np.unique(np.array(sums.adding, np.int64)),
    )


def _objects(units: Sequence[UnitCall]) -> tuple[list[Read], Ints, Ints]:
    """Return the distinct reads of units, which of these each read is, and the last place of each."""
    reads = list(chain.from_iterable([unit.reads for unit in units]))
    last = dict(zip(reads, range(len(reads)), strict=True))
    number = dict(zip(last, range(len(last)), strict=True))
    of_units = np.fromiter(map(number.__getitem__, reads), np.int64, len(reads))
    return list(last), of_units, np.fromiter(last.values(), np.int64, len(last))


def _sources_of(
    objects: Sequence[Read],
    counts: Ints,
    units: Sequence[UnitCall],
    last: Ints,
    number: Mapping[TaskKey, int],
) -> Ints:
    """Return the chunks that are the arguments of reads, ``counts`` of each.

    All units that share a read have the same arguments by it: those of its ``last`` unit are taken.
    """
    reader = np.searchsorted(np.cumsum(counts_of([unit.reads for unit in units])), last, "right")
    found = (
        units[unit].arguments[read.first : read.first + count]
        for unit, read, count in zip(reader.tolist(), objects, counts.tolist(), strict=True)
    )
    return np.fromiter(map(number.__getitem__, chain.from_iterable(found)), np.int64, int(counts.sum()))


def _in_order(begins: Ints, of_units: Ints, read_counts: Ints, sum_counts: Ints) -> tuple[Ints, Ints]:
    """Return where each read and sum begins among the arguments of all objects and sums, and its length.

    They are in the order of calls: each has the arguments of its reads, one after the other, then its partial
    sums. ``begins`` are the places of objects.
    """
    have = np.flatnonzero(sum_counts)
    before_sums = np.cumsum(read_counts)[have]
    counts = np.insert(np.diff(begins)[of_units], before_sums, sum_counts[have])
    sums = begins[-1] + starts_of(sum_counts[have])[:-1]
    starts = np.insert(begins[of_units], before_sums, sums)
    return starts[counts > 0], counts[counts > 0]


def _numbered(*lists: Sequence[Region]) -> tuple[list[Region], list[Ints]]:
    """Return all distinct regions of some lists, in order, and for each list which of them it has."""
    number: defaultdict[Region, int] = defaultdict(count().__next__)
    found = [np.fromiter(map(number.__getitem__, some), np.int64, len(some)) for some in lists]
    return list(number), found


def _elements(regions: Sequence[Region]) -> Ints:
    """Return the number of elements of each region."""
    counts = counts_of(regions)
    ends = np.fromiter(chain.from_iterable(chain.from_iterable(regions)), np.int64, 2 * int(counts.sum()))
    extents = np.append(ends[1::2] - ends[::2], 1)
    found: Ints = np.multiply.reduceat(extents, starts_of(counts)[:-1])
    found[counts == 0] = 1
    return found


def _itemsizes(dtypes: Sequence[str]) -> Ints:
    return np.fromiter(map(itemsize, dtypes), np.int64, len(dtypes))


class _Sums(NamedTuple):
    """Arguments that are partial sums, call by call."""

    keys: list[TaskKey]
    alike: list[int]
    """A chunk of the same size as each."""
    calls: list[int]
    """Place of the call of each."""
    adding: list[int]
    """Places of the units that add to one."""


def _sums(calls: Iterable[tuple[int, UnitCall | CombineCall, int]]) -> _Sums:
    """List the partial sums of all calls, which come with their places and the first chunks they make."""
    found = _Sums([], [], [], [])
    for place, call, first in calls:
        if isinstance(call, CombineCall):
            count, size = len(call.arguments), len(call.values)
            found.keys.extend(call.arguments)
            found.alike.extend([first + one % size for one in range(count)])
            found.calls.extend([place] * count)
        elif any(call.partial_sums):
            for result, partial_sum in enumerate(call.partial_sums):
                if partial_sum is not None:
                    found.keys.append(call.arguments[partial_sum[0]])
                    found.alike.append(first + result)
                    found.calls.append(place)
                    found.adding.append(place)
    return found


def _spread(works: npt.NDArray[np.bool_], lists: Sequence[Sized]) -> Ints:
    """Return the lengths of lists, one for each call that does not pick; 0 for those that do."""
    counts = np.zeros(len(works), np.int64)
    counts[works] = counts_of(lists)
    return counts


def first_of_each(codes: Ints) -> tuple[Ints, Ints]:
    """Return the places of the first of each distinct number, in order, and for each place which it is.

    >>> first_of_each(np.array([7, 3, 7, 5]))
    (array([0, 1, 3]), array([0, 1, 0, 2]))
    """
    shift = len(codes).bit_length()
    if int(codes.max(initial=0)).bit_length() + shift > 63:
        codes = np.unique(codes, return_inverse=True)[1]
    # Numbers that hold their places are sorted many times as fast as places by their numbers.
    ordered = codes << shift
    ordered |= np.arange(len(codes))
    ordered.sort()
    places = ordered & ((1 << shift) - 1)
    ordered >>= shift
    begins = np.diff(ordered, prepend=-1) > 0
    first = places[begins]
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    np.cumsum(begins, out=ordered)
    which = np.empty_like(places)
    which[places] = rank[ordered - 1]
    return first[order], which
