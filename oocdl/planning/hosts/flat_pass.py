"""A pass in arrays of numbers: who reads what of whom, for millions of arguments at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.region_index import Parts
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
    list_of: Ints
    """For each argument the list of ``parts`` that says what is read of it; -1: all, it is a partial sum."""
    place: Ints
    """For each argument its place in that list."""
    parts: Sequence[Parts]

    @property
    def inputs(self) -> int:
        """How many chunks are there before."""
        return len(self.graph.inputs)

    def arguments_of(self, calls: Sequence[int]) -> tuple[Ints, Ints]:
        """Numbers of all arguments of some calls, in order, and of each the place of its call there."""
        firsts = self.first[calls]
        counts = self.first[np.asarray(calls) + 1] - firsts
        reader = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(reader)) - np.repeat(np.cumsum(counts) - counts, counts)
        return firsts[reader] + within, reader


def flatten(graph: TaskGraph) -> FlatPass:
    """Number the chunks and arguments of a pass."""
    keys, maker, sizes, results = _chunks(graph)
    number = {key: place for place, key in enumerate(keys)}
    arguments = [() if isinstance(call, PickCall) else call.arguments for call in graph.calls]
    counts = np.fromiter(map(len, arguments), np.int64, len(arguments))
    parts, list_, place, nbytes = _parts_of(graph.calls, int(counts.sum()))
    return FlatPass(
        graph=graph,
        keys=keys,
        number=number,
        maker=np.array(maker, np.int64),
        sizes=np.array(sizes, np.int64),
        results=np.array(results, np.int64),
        first=starts_of(counts),
        source=_sources(list(chain.from_iterable(arguments)), keys, number),
        nbytes=nbytes,
        list_of=list_,
        place=place,
        parts=parts,
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


def _sources(flat: list[TaskKey], keys: Sequence[TaskKey], number: dict[TaskKey, int]) -> Ints:
    """The chunks that arguments are. Few keys are hashed: most arguments are the same few objects."""
    known = dict(zip(map(id, flat), flat, strict=True))
    chunk_of = dict(zip(known, map(number.__getitem__, known.values()), strict=True))
    return np.fromiter(map(chunk_of.__getitem__, map(id, flat)), np.int64, len(flat))


def _parts_of(calls: Sequence[Call], count: int) -> tuple[list[Parts], Ints, Ints, Ints]:
    """Lists of parts; and for each argument its list, its place there, and the bytes that are read of it."""
    flat = [read for call in calls if isinstance(call, UnitCall) for read in call.reads]
    known = dict(zip(map(id, flat), flat, strict=True))
    parts: list[Parts] = []
    list_of: list[int] = []
    numbers: dict[tuple[int, ...], int] = {}
    for read in known.values():
        # Few lists are compared: they are made of the same few objects.
        one = read.parts
        # The first number tells grids from lists.
        alike = (-1, *map(id, one.axes), *one.places) if one.listed is None else tuple(map(id, one.listed))
        number = numbers.setdefault(alike, len(numbers))
        if number == len(parts):
            parts.append(one)
        list_of.append(number)
    sizes = [one.sizes() for one in parts]
    starts = starts_of(np.fromiter(map(len, sizes), np.int64, len(sizes)))
    place_of = dict(zip(known, range(len(known)), strict=True))
    which = np.fromiter(map(place_of.__getitem__, map(id, flat)), np.int64, len(flat))
    item = np.fromiter((itemsize(read.dtype) for read in known.values()), np.int64, len(known))
    lists = np.array(list_of, np.int64)[which]
    each = np.diff(starts)[lists]
    place = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
    each_list = np.repeat(lists, each)
    elements = np.fromiter(chain.from_iterable(sizes), np.int64, int(starts[-1]))
    # Between them are partial sums.
    sums, at = _partial_sums(calls)
    among = np.ones(count, bool)
    among[at] = False
    list_, places, nbytes = np.full(count, -1), np.zeros(count, np.int64), np.empty(count, np.int64)
    list_[among], places[among] = each_list, place
    nbytes[among] = elements[starts[each_list] + place] * np.repeat(item[which], each)
    nbytes[at] = sums
    return parts, list_, places, nbytes


def _partial_sums(calls: Sequence[Call]) -> tuple[list[int], list[int]]:
    """Bytes of the arguments that are partial sums, and the places of these among all arguments."""
    sizes: list[int] = []
    at: list[int] = []
    first = 0
    for call in calls:
        if isinstance(call, PickCall):
            continue
        if isinstance(call, CombineCall):
            sizes += [nbytes for _, nbytes in parts_of(call)]
            at += range(first, first + len(call.arguments))
        elif any(call.partial_sums):
            made = made_of(call)
            for sum_, one in zip(call.partial_sums, made, strict=True):
                if sum_ is not None:
                    sizes.append(one.nbytes)
                    at.append(first + sum_[0])
        first += len(call.arguments)
    return sizes, at


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
