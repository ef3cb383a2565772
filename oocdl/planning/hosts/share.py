"""What each member of a crew has to know of a pass: all that travels to it before the first pass.

Its own calls, the strips that it cuts, the bundles that it sends and receives: all shares together are
about one graph, however many members there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, PickCall
from oocdl.planning.hosts.exchange import Bundle, Exchange
from oocdl.planning.hosts.flat_pass import Ints, runs, starts_of
from oocdl.planning.hosts.placement import Strip, strip_key, with_strips
from oocdl.planning.task_key import TaskKey, TaskKind


@dataclass(frozen=True, eq=False)
class SomeCalls:
    """Those calls of a pass that one member runs, by their numbers in the pass."""

    by_number: Mapping[int, Call]
    count: int
    """How many the pass has."""

    def __getitem__(self, number: int) -> Call:
        return self.by_number[number]

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """One member's part of a pass, in numbers where that is shorter."""

    member: int
    calls: SomeCalls
    group_of: Ints
    """The group of each of its calls."""
    groups: int
    """How many groups of layers the pass has."""
    first: Ints
    """For each of its calls, and once more at the end: its first argument in ``strip_arguments``."""
    strip_arguments: Ints
    strip_of: Ints
    """As ``Placed`` has them."""
    cut: Ints
    """Numbers of the strips that it cuts."""
    sources: Sequence[TaskKey]
    """What each of them is cut from."""
    regions: Sequence[Region]
    bundle_numbers: Ints
    """Of what it sends and receives."""
    columns: Ints
    """Of these bundles, as ``Exchange`` has them."""
    first_item: Ints
    """For each of these bundles, and once more at the end: its first item in ``items``."""
    items: Ints
    """A chunk, or the number of all chunks and that of a strip."""
    keys: Mapping[int, TaskKey]
    """Of the chunks among them."""
    layer_of: Ints
    """For each item the place of its layer in ``layers``."""
    layers: Sequence[str]
    chunks: int
    """How many the pass has."""
    stored: tuple[TaskKey, ...]
    """Stored pieces that are with it between passes, and that the pass starts from."""

    def own_calls(self) -> Iterator[tuple[int, Call, int]]:
        """(number, call, group) of each of its calls, reading strips where they do."""
        places = zip(self.calls.by_number.items(), self.group_of.tolist(), strict=True)
        first, arguments, strips = self.first.tolist(), self.strip_arguments.tolist(), self.strip_of.tolist()
        for place, ((number, call), group) in enumerate(places):
            mine = slice(*first[place : place + 2])
            yield number, with_strips(call, arguments[mine], strips[mine]), group

    def strips(self) -> Iterator[Strip]:
        """The strips that it cuts."""
        for number, source, region in zip(self.cut.tolist(), self.sources, self.regions, strict=True):
            yield Strip(strip_key(number, source), source, region)

    def bundles(self) -> Iterator[Bundle]:
        """What it sends and receives."""
        first, items, layers = self.first_item.tolist(), self.items.tolist(), self.layer_of.tolist()
        for place, (number, column) in enumerate(
            zip(self.bundle_numbers.tolist(), self.columns.T.tolist(), strict=True)
        ):
            found = tuple(self._item(items[one], layers[one]) for one in range(*first[place : place + 2]))
            sender, receiver, nbytes, group, reader, position = column
            key = TaskKey(TaskKind.BUNDLE, found[0].layer, "", number)
            yield Bundle(key, sender, receiver, found, nbytes, group, reader, position)

    def _item(self, item: int, layer: int) -> TaskKey:
        if item < self.chunks:
            return self.keys[item]
        return TaskKey(TaskKind.STRIP, self.layers[layer], "", item - self.chunks)


def shares_of(exchange: Exchange, members: Collection[int]) -> Iterator[Share]:
    """The shares of some members, in their order."""
    placed, flat = exchange.placed, exchange.placed.flat
    count = max(members, default=0) + 1
    calls_of, strips_of = _by(placed.workers, count), _by(placed.strip_senders, count)
    copies_of = _by(placed.copies.workers, count)
    sent, received = _by(exchange.columns[0], count), _by(exchange.columns[1], count)
    layers: dict[str, int] = {}
    chunks = len(flat.keys)
    layer_of = np.fromiter((layers.setdefault(key.layer, len(layers)) for key in flat.keys), np.int64, chunks)
    layer_of = np.concatenate((layer_of, layer_of[flat.source[placed.strip_reads]]))
    stored: list[list[TaskKey]] = [[] for _ in range(count)]
    for key in exchange.graph.inputs:
        if exchange.homes[key] < count:
            stored[exchange.homes[key]].append(key)
    group_of = np.array(exchange.group_of, np.int64)
    for member in members:
        copied = _with_picks(flat.graph.calls, placed.copies.calls[copies_of[member]])
        calls, cut = np.union1d(calls_of[member], copied), strips_of[member]
        bundles = np.union1d(sent[member], received[member])
        items_each = exchange.first[bundles + 1] - exchange.first[bundles]
        items = exchange.items[runs(exchange.first[bundles], items_each)]
        strips_each = placed.first[calls + 1] - placed.first[calls]
        mine = runs(placed.first[calls], strips_each)
        reads = placed.strip_reads[cut]
        yield Share(
            member=member,
            calls=SomeCalls(
                {number: flat.graph.calls[number] for number in calls.tolist()}, len(placed.workers)
            ),
            group_of=group_of[calls],
            groups=len(exchange.groups),
            first=starts_of(strips_each),
            strip_arguments=placed.strip_arguments[mine],
            strip_of=placed.strip_of[mine],
            cut=cut,
            sources=[flat.keys[chunk] for chunk in flat.source[reads].tolist()],
            regions=[flat.regions[part] for part in flat.part[reads].tolist()],
            bundle_numbers=bundles,
            columns=exchange.columns[:, bundles],
            first_item=starts_of(items_each),
            items=items,
            keys={chunk: flat.keys[chunk] for chunk in np.unique(items[items < chunks]).tolist()},
            layer_of=layer_of[items],
            layers=list(layers),
            chunks=chunks,
            stored=tuple(stored[member]),
        )


def _with_picks(calls: Sequence[Call], places: Ints) -> Ints:
    """Places of calls, and of those that pick from what they make, which follow them."""
    found = []
    for place in places.tolist():
        found.append(place)
        while place + 1 < len(calls) and isinstance(calls[place + 1], PickCall):
            place += 1
            found.append(place)
    return np.array(found, np.int64)


def _by(values: Ints, count: int) -> list[Ints]:
    """For each number below ``count`` the places at which it stands, ascending."""
    order = np.argsort(values, kind="stable")
    starts = np.searchsorted(values[order], np.arange(count + 1))
    return [order[begin:end] for begin, end in zip(starts[:-1], starts[1:], strict=True)]
