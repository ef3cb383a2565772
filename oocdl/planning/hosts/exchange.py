"""Lists the bundles that travel between the workers of a cluster in a pass.

A worker runs all its calls by itself. The strips, whole chunks and pieces of weights that others read travel
in bundles. The items of a bundle are made of data that has crossed between workers equally often before (its
*level*): no bundle waits for another of its level, so workers which wait for each other's bundles never wait
in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from oocdl.planning.calls import PickCall
from oocdl.planning.hosts.flat_pass import FlatPass, first_of_each
from oocdl.planning.hosts.placement import Placed, place, strip_key
from oocdl.planning.hosts.ragged import Ints, runs, starts_of
from oocdl.planning.hosts.relays import Legs, Pairs, routes
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind

LARGEST_BUNDLE_BYTES = 8 << 20
"""A bundle is sent when it has grown to this: larger ones would take memory that nobody has reserved."""
MOST_GROUPS = 1024
"""Maximum number of groups of layers of a pass on all workers together: bundles do not span two of them."""
GROUPS_AHEAD = 4
"""Number of groups of layers by which a bundle is requested ahead of its reader: earlier takes room."""
MOST_ASKED = 64
"""Maximum number of bundles that a member requests at once; in ``LocalOrder.arriving`` order, 1 is enough."""
SMALL_BYTES = 64 << 10
"""Maximum bytes of a bundle that comes as soon as it is made, whatever else was requested."""
DIRECT_BYTES = MOST_ASKED * SMALL_BYTES
"""Maximum bytes of all bundles that come to a member as soon as they are made; others come one at a time."""
SMALL_ITEM_BYTES = 16 << 10
"""Maximum bytes of an item that goes in bundles of small items only."""


@dataclass(frozen=True)
class Bundle:
    """Chunks that go from one worker to another at once."""

    key: TaskKey
    sender: int
    receiver: int
    items: tuple[TaskKey, ...]
    nbytes: int
    group: int
    """The group of layers that makes the items; -1: the pass starts from them."""
    reader: int
    """The first group of layers that reads one of them on the receiver."""
    position: int
    """Plan position of the first call that reads one of them there."""
    level: int
    """Number of times that the data of its items has crossed between workers before."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Exchange:
    """A pass over several workers, and the bundles that they send each other, as columns of numbers."""

    placed: Placed
    groups: tuple[str, ...]
    """Names of the layers, in plan order; where there are many, those of the first in each group."""
    group_of: Ints
    """The group of each call."""
    homes: Mapping[TaskKey, int]
    """Stored piece -> the worker that holds it between passes."""
    columns: Ints
    """Sender, receiver, bytes, group, reader, position and level of each bundle, as ``Bundle`` has them."""
    first: Ints
    """Place in ``items`` of the first item of each bundle, and the end of the last."""
    items: Ints
    """Items of bundles: the number of a chunk, or the number of all chunks plus that of a strip."""

    @property
    def graph(self) -> TaskGraph:
        """The tasks of the pass."""
        return self.placed.graph

    @property
    def crossing_bytes(self) -> int:
        """Bytes of the largest bundle."""
        return int(self.columns[2].max(initial=0))

    @cached_property
    def item_chunks(self) -> Ints:
        """Chunk that each item is, or is a strip of."""
        flat, reads = self.placed.flat, self.placed.strip_reads
        return np.concatenate((np.arange(len(flat.keys)), flat.source[reads]))[self.items]

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """All bundles."""
        keys = self.placed.flat.keys
        items = item_keys(self.items, [keys[chunk] for chunk in self.item_chunks.tolist()], len(keys))
        return tuple(bundles_of(np.arange(self.columns.shape[1]), self.columns, self.first, items))


def item_keys(items: Ints, chunks: Sequence[TaskKey], count: int) -> list[TaskKey]:
    """Return the keys of items, each of which is one of ``chunks`` or a strip of it.

    ``count``: the number of all chunks of the pass.
    """
    each = zip(items.tolist(), chunks, strict=True)
    return [chunk if item < count else strip_key(item - count, chunk) for item, chunk in each]


def bundles_of(numbers: Ints, columns: Ints, first: Ints, items: Sequence[TaskKey]) -> Iterator[Bundle]:
    """Give bundles by number; ``columns`` and ``first`` are as ``Exchange`` has them, ``items`` are keys."""
    each = zip(numbers.tolist(), columns.T.tolist(), pairwise(first.tolist()), strict=True)
    for number, (sender, receiver, *others), (begin, end) in each:
        key = TaskKey(TaskKind.BUNDLE, items[begin].layer, "", number)
        yield Bundle(key, sender, receiver, tuple(items[begin:end]), *others)


def homes_of(passes: Collection[Placed]) -> dict[TaskKey, int]:
    """Return the worker that holds each stored piece between passes: the one that makes it anew.

    A piece that no pass makes anew is held by its first reader. The first of ``passes`` decides.
    """
    homes: dict[TaskKey, int] = {}
    for placed in passes:
        for stored, made in placed.graph.replaced.items():
            homes.setdefault(stored, int(placed.workers[placed.flat.maker[placed.flat.number[made]]]))
    for placed in passes:
        wanted = dict.fromkeys(key for key in placed.graph.inputs if key not in homes)
        for number, call in enumerate(placed.graph.calls if wanted else ()):
            for argument in () if isinstance(call, PickCall) else call.arguments:
                if argument in wanted:
                    homes.setdefault(argument, int(placed.workers[number]))
    for placed in passes:
        for key in placed.graph.inputs:
            homes.setdefault(key, 0)
    return homes


def exchanges_of(graphs: Mapping[str, TaskGraph], workers: int, threads: int) -> dict[str, Exchange]:
    """Place the calls of several kinds of passes on workers of so many threads, and list what travels.

    They start from the same pieces; the first kind decides which worker holds each of these.
    """
    placed = {name: place(graph, workers, threads) for name, graph in graphs.items()}
    homes = homes_of(placed.values())
    return {name: exchange(one, homes, workers) for name, one in placed.items()}


def exchange(placed: Placed, homes: Mapping[TaskKey, int], workers: int) -> Exchange:
    """List the bundles of a placed pass."""
    groups, group_of = _groups(placed.flat, max(MOST_GROUPS // workers, 1))
    columns, first, items = _bundles(*_crossings(placed, homes, group_of))
    return Exchange(
        placed=placed,
        groups=groups,
        group_of=group_of,
        homes=homes,
        columns=columns,
        first=first,
        items=items,
    )


def _groups(flat: FlatPass, most: int) -> tuple[tuple[str, ...], Ints]:
    """Return the names of groups of layers, at most ``most`` of them, and the group of each call."""
    # Pieces that are cut anew come at the end of a pass, whatever layer made them.
    kinds: dict[tuple[bool, str], int] = {}
    number = [kinds.setdefault((kind is TaskKind.RECUT, layer), len(kinds)) for kind, layer in flat.tasks]
    begins = np.diff(np.array(number, np.int64)[flat.task_of], prepend=-1) != 0
    layers = [flat.tasks[task][1] for task in flat.task_of[begins].tolist()]
    size = -(-len(layers) // most)
    return tuple(layers[::size]), (np.cumsum(begins) - 1) // size


def _crossings(placed: Placed, homes: Mapping[TaskKey, int], group_of: Ints) -> tuple[Pairs, Legs, Ints]:
    """Return items that cross between workers, as they are first read, the legs of their ways, and levels."""
    flat, workers, replaced = placed.flat, placed.workers, placed.graph.replaced
    chunks = len(flat.keys)
    where = np.empty(chunks, np.int64)
    where[: flat.inputs] = [homes[key] for key in flat.graph.inputs]
    where[flat.inputs :] = workers[flat.maker[flat.inputs :]]
    fresh, first_of = alike(placed)
    crossing, to = _crossing(placed, where, fresh)
    group = np.where(flat.maker >= 0, group_of[flat.maker], -1)
    item, nbytes = _items(placed, crossing)
    # What is made anew goes home at the end.
    made = np.array([flat.number[key] for key in replaced.values()], np.int64)
    home = np.array([homes[stored] for stored in replaced], np.int64)
    away = where[made] != home
    made, home = made[away], home[away]
    calls = flat.readers(crossing)

    def ended(columns: Ints, last: Ints | int) -> Ints:
        return np.concatenate((columns, np.broadcast_to(last, made.shape)))

    items, receiver = ended(item, made), ended(to, home)
    once, pair_of = first_of_each(items * (int(receiver.max(initial=0)) + 1) + receiver)
    source = ended(flat.source[crossing], made)[once]
    pairs = Pairs(
        items[once],
        ended(nbytes, flat.sizes[made])[once],
        group[source],
        where[source],
        receiver[once],
        ended(group_of[calls], int(group_of[-1]))[once],
        ended(flat.positions[calls], int(flat.positions.max(initial=0)) + 1)[once],
    )
    legs, crossed = routes(pairs, int(workers.max(initial=0)) + 1)
    often = np.zeros(len(flat.source), np.int64)
    np.maximum.at(often, crossing, crossed[pair_of[: len(crossing)]])
    level = _levels(flat, often[first_of])
    return pairs, legs, level[source][legs.pair] + legs.before


def alike(placed: Placed) -> tuple[Ints, Ints]:
    """Drop arguments that units of the same worker have had by the same read; return those that are left, and
    for all arguments which of these they are."""
    starts, counts = placed.flat.read_runs
    begins = starts_of(counts)[:-1]
    to = placed.workers[placed.flat.readers(begins)]
    first, which = first_of_each(starts * (int(to.max(initial=0)) + 1) + to)
    return runs(begins[first], counts[first]), runs(begins[first][which], counts)


def _crossing(placed: Placed, where: Ints, own: Ints) -> tuple[Ints, Ints]:
    """Return the arguments of ``own`` that are not where they are read, in order, and who reads them.

    Arguments of copied calls count once more, for the workers that run the copies.
    """
    copied, flat = placed.copies, placed.flat
    more, which = flat.arguments_of(copied.calls)
    here = placed.workers[flat.readers(own)]
    away = where[flat.source[own]] != here
    argument = np.concatenate((own[away], more))
    to = np.concatenate((here[away], copied.workers[which]))
    source = flat.source[argument]
    crosses = np.flatnonzero((where[source] != to) & ~copied.holds(flat.maker[source], to))
    order = crosses[np.argsort(flat.readers(argument[crosses]), kind="stable")]
    return argument[order], to[order]


def _items(placed: Placed, crossing: Ints) -> tuple[Ints, Ints]:
    """Return the item of each of some arguments, a chunk or a strip of one, and its bytes."""
    flat = placed.flat
    item = flat.source[crossing]
    nbytes = flat.sizes[item]
    strips = placed.strip_arguments
    place = np.minimum(np.searchsorted(strips, crossing), max(len(strips) - 1, 0))
    cut = np.flatnonzero(strips[place] == crossing) if len(strips) else place[:0]
    item[cut] = len(flat.keys) + placed.strip_of[place[cut]]
    nbytes[cut] = flat.nbytes[crossing[cut]]
    return item, nbytes


def _levels(flat: FlatPass, often: Ints) -> Ints:
    """Return, for each chunk, how often the data that it is made of has crossed.

    ``often`` says how often each argument crosses to its reader.

    All calls of a layer are done at once, except those that read results of their own layer: partial sums.
    """
    level = np.zeros(len(flat.keys), np.int64)
    first, results = flat.first.tolist(), flat.results.tolist()
    bounds = np.flatnonzero(np.diff(flat.task_of, prepend=-1)).tolist()
    for begin, end in zip(bounds, [*bounds[1:], len(flat.calls)], strict=True):
        arguments = slice(first[begin], first[end])
        source = flat.source[arguments]
        mine = np.repeat(np.arange(end - begin), np.diff(flat.first[begin : end + 1]))
        inside = source >= results[begin]
        found = np.zeros(end - begin, np.int64)
        np.maximum.at(found, mine[~inside], (level[source] + often[arguments])[~inside])
        made = np.diff(flat.results[begin : end + 1])
        level[results[begin] : results[end]] = np.repeat(found, made)
        for argument in np.flatnonzero(inside).tolist():  # in order of the calls
            call = int(mine[argument])
            at = max(int(found[call]), int(level[source[argument]] + often[arguments][argument]))
            found[call] = at
            level[results[begin + call] : results[begin + call + 1]] = at
    return level


def _bundles(pairs: Pairs, legs: Legs, level: Ints) -> tuple[Ints, Ints, Ints]:
    """Return columns, first items and items of bundles; see ``LARGEST_BUNDLE_BYTES``."""
    items, nbytes, group = (column[legs.pair] for column in (pairs.item, pairs.nbytes, pairs.group))
    if not len(items):
        return np.zeros((7, 0), np.int64), np.zeros(1, np.int64), items
    # What a normalization waits for does not wait for the gradients of weights beside it.
    small = nbytes <= SMALL_ITEM_BYTES
    code = level
    for column in (group + 1, legs.sender, legs.receiver, legs.reader, small):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, rank = first_of_each(code)
    order = np.argsort(rank, kind="stable")
    begins = np.flatnonzero(np.diff(rank[order], prepend=-1))
    nbytes = nbytes[order]
    ends = np.append(begins[1:], len(order))
    first = begins.tolist()
    for large in np.flatnonzero(np.add.reduceat(nbytes, begins) >= LARGEST_BUNDLE_BYTES).tolist():
        size = 0
        begin, end = int(begins[large]), int(ends[large])
        for item, item_bytes in enumerate(nbytes[begin : end - 1].tolist(), begin + 1):
            size += item_bytes
            if size >= LARGEST_BUNDLE_BYTES:
                first.append(item)
                size = 0
    starts = np.array(sorted(first), np.int64)
    heads = order[starts]
    columns = np.stack(
        [
            legs.sender[heads],
            legs.receiver[heads],
            np.add.reduceat(nbytes, starts),
            group[heads],
            legs.reader[heads],
            np.minimum.reduceat(legs.position[order], starts),
            level[heads],
        ]
    )
    return columns, np.append(starts, len(order)), items[order]
