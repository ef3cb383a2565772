"""A pass in arrays of numbers: who reads what of whom, for millions of arguments at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, CombineCall, PickCall, UnitCall, made_of, parts_of
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, result_key

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class FlatPass:
    """Chunks and arguments by number. Chunks: what the pass starts from, then what calls make, in order.

    The arguments of all calls follow each other in the calls' order; calls that pick have none.
    """

    graph: TaskGraph
    keys: Sequence[TaskKey]
    """Of the chunks."""
    number: dict[TaskKey, int]
    """Key -> the number of that chunk."""
    maker: Ints
    """For each chunk the place in ``graph.calls`` of the call that makes it; -1: it is there before."""
    sizes: Ints
    """Bytes of each chunk."""
    results: Ints
    """For each call, and once more at the end: the first of the chunks that it makes."""
    first: Ints
    """For each call, and once more at the end: the first of its arguments."""
    source: Ints
    """For each argument the chunk that it is."""
    nbytes: Ints
    """For each argument how many bytes are read of it."""
    part: Ints
    """For each argument the place in ``regions`` of what is read of it; -1: all, it is a partial sum."""
    regions: Sequence[Region]
    """All different ones that are read."""

    @property
    def inputs(self) -> int:
        """How many chunks are there before."""
        return len(self.graph.inputs)

    def arguments_of(self, calls: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Numbers of all arguments of some calls, in order, and of each the place of its call there."""
        firsts = self.first[calls]
        counts = self.first[np.asarray(calls) + 1] - firsts
        return runs(firsts, counts), np.repeat(np.arange(len(counts)), counts)


def flatten(graph: TaskGraph) -> FlatPass:
    """Number the chunks and arguments of a pass."""
    keys, maker, sizes, results = _chunks(graph)
    number = {key: place for place, key in enumerate(keys)}
    which, reads = _reads(graph.calls, number)
    column = runs(reads.first[which], np.diff(reads.first)[which])
    added, nbytes, at = _partial_sums(graph.calls)
    # Arguments of units go read by read; between them are partial sums.
    among = np.ones(len(column) + len(at), bool)
    among[at] = False

    def merged(of_reads: Ints, of_sums: Sequence[int] | int) -> Ints:
        found = np.empty(len(among), np.int64)
        found[among], found[at] = of_reads[column], of_sums
        return found

    counts = (0 if isinstance(call, PickCall) else len(call.arguments) for call in graph.calls)
    return FlatPass(
        graph=graph,
        keys=keys,
        number=number,
        maker=np.array(maker, np.int64),
        sizes=np.array(sizes, np.int64),
        results=np.array(results, np.int64),
        first=starts_of(np.fromiter(counts, np.int64, len(graph.calls))),
        source=merged(reads.source, [number[key] for key in added]),
        nbytes=merged(reads.nbytes, nbytes),
        part=merged(reads.part, -1),
        regions=reads.regions,
    )


def _chunks(graph: TaskGraph) -> tuple[list[TaskKey], list[int], list[int], list[int]]:
    """Keys, makers and sizes of chunks, and the first chunk of each call."""
    keys = list(graph.inputs)
    maker, sizes = [-1] * len(keys), [graph.input_bytes[key] for key in keys]
    results: list[int] = []
    for place, call in enumerate(graph.calls):
        results.append(len(keys))
        if isinstance(call, PickCall):
            continue
        made = made_of(call)
        if len(made) == 1:
            keys.append(call.key)
        else:
            values = call.values if isinstance(call, CombineCall) else [name for name, _ in call.unit.makes]
            keys += [result_key(call.key, value, len(values)) for value in values]
        maker += [place] * len(made)
        sizes += [one.nbytes for one in made]
    return keys, maker, sizes, [*results, len(keys)]


class _Reads(NamedTuple):
    """The arguments of distinct reads: of each read those of the first unit that has it."""

    first: Ints
    """For each read, and once more at the end: its first argument."""
    source: Ints
    """For each argument the chunk that it is."""
    nbytes: Ints
    """Bytes that are read of it."""
    part: Ints
    """The place in ``regions`` of what is read of it."""
    regions: list[Region]


def _reads(calls: Sequence[Call], number: Mapping[TaskKey, int]) -> tuple[Ints, _Reads]:
    """For all reads of units, in order, which of the distinct ones they are, and these.

    Units share most of their reads, and reads most of their parts, so little is looked at one by one.
    """
    units = [call for call in calls if isinstance(call, UnitCall)]
    flat = [read for unit in units for read in unit.reads]
    last = dict(zip(map(id, flat), range(len(flat)), strict=True))
    places = np.fromiter(last.values(), np.int64, len(last))
    ends = np.cumsum(np.fromiter((len(unit.reads) for unit in units), np.int64, len(units)))
    reads = [flat[place] for place in places.tolist()]
    known = {id(read.parts): read.parts for read in reads}
    list_of = dict(zip(known, range(len(known)), strict=True))
    lists = np.fromiter((list_of[id(read.parts)] for read in reads), np.int64, len(reads))
    regions: dict[Region, int] = {}
    part = [regions.setdefault(region, len(regions)) for parts in known.values() for region in parts]
    elements = [one for parts in known.values() for one in parts.sizes()]
    starts = starts_of(np.fromiter(map(len, known.values()), np.int64, len(known)))
    counts = np.diff(starts)[lists]
    item = np.fromiter((itemsize(read.dtype) for read in reads), np.int64, len(reads))
    arguments = (
        units[reader].arguments[read.first : read.first + count]
        for reader, read, count in zip(
            np.searchsorted(ends, places, "right").tolist(), reads, counts.tolist(), strict=True
        )
    )
    column = runs(starts[lists], counts)
    source = map(number.__getitem__, chain.from_iterable(arguments))
    found = _Reads(
        first=starts_of(counts),
        source=np.fromiter(source, np.int64, len(column)),
        nbytes=np.array(elements, np.int64)[column] * np.repeat(item, counts),
        part=np.array(part, np.int64)[column],
        regions=list(regions),
    )
    place_of = dict(zip(last, range(len(last)), strict=True))
    return np.fromiter(map(place_of.__getitem__, map(id, flat)), np.int64, len(flat)), found


def _partial_sums(calls: Sequence[Call]) -> tuple[list[TaskKey], list[int], list[int]]:
    """The arguments that are partial sums, their bytes, and their places among all arguments."""
    keys: list[TaskKey] = []
    sizes: list[int] = []
    at: list[int] = []
    first = 0
    for call in calls:
        if isinstance(call, PickCall):
            continue
        if isinstance(call, CombineCall):
            keys += call.arguments
            sizes += [nbytes for _, nbytes in parts_of(call)]
            at += range(first, first + len(call.arguments))
        elif any(call.partial_sums):
            made = made_of(call)
            for sum_, one in zip(call.partial_sums, made, strict=True):
                if sum_ is not None:
                    keys.append(call.arguments[sum_[0]])
                    sizes.append(one.nbytes)
                    at.append(first + sum_[0])
        first += len(call.arguments)
    return keys, sizes, at


def runs(firsts: Ints, counts: Ints) -> Ints:
    """Numbers that follow each other from each of ``firsts``, as many as ``counts`` says.

    >>> runs(np.array([5, 2]), np.array([2, 3]))
    array([5, 6, 2, 3, 4])
    """
    before: Ints = np.repeat(firsts - np.cumsum(counts) + counts, counts)
    return before + np.arange(len(before))


def starts_of(counts: Ints) -> Ints:
    """Where lists of so many begin that follow each other, and the end of the last."""
    return np.concatenate(([0], np.cumsum(counts)))


def first_of_each(codes: Ints) -> tuple[Ints, Ints]:
    """Places of the first of each different number, in order, and for each place which of these it is.

    >>> first_of_each(np.array([7, 3, 7, 5]))
    (array([0, 1, 3]), array([0, 1, 0, 2]))
    """
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[which]
