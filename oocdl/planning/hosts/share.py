"""Picks what each member of a crew has to know of a pass: all that travels to it before the first pass.

A share has the calls of a member, the strips that it cuts, and the bundles that it sends and receives: all
shares together are about as large as one graph, however many members there are.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, PickCall
from oocdl.planning.hosts.exchange import Bundle, Exchange, bundles_of, item_keys
from oocdl.planning.hosts.placement import Strip, strip_key, with_strips
from oocdl.planning.hosts.ragged import Ints, runs, starts_of
from oocdl.planning.task_key import TaskKey


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """One member's part of a pass; strips and bundles, of which there may be a million, are numbers."""

    member: int
    own: Mapping[int, Call]
    """The calls that it runs, by their numbers in the pass."""
    count: int
    """Number of calls of the pass."""
    group_of: Ints
    """The group of each of its calls."""
    groups: int
    """Number of groups of layers of the pass."""
    first: Ints
    """First place in ``strip_arguments`` of each of its calls, and the end of the last."""
    strip_arguments: Ints
    """Places, among the arguments of their calls, of those arguments that are strips."""
    strip_of: Ints
    """Number of the strip that each of these arguments is."""
    cut: Ints
    """Numbers of the strips that it cuts."""
    sources: Sequence[TaskKey]
    """The chunk that each of them is cut from."""
    regions: Sequence[Region]
    """The part of the chunk that each of them is."""
    bundle_numbers: Ints
    """Numbers of the bundles that it sends and receives."""
    columns: Ints
    """Columns of these bundles, as ``Exchange`` has them."""
    first_item: Ints
    """Place in ``items`` of the first item of each of these bundles, and the end of the last."""
    items: Ints
    """Items of bundles: the number of a chunk, or the number of all chunks plus that of a strip."""
    item_chunks: Sequence[TaskKey]
    """The chunk that each item is, or is a strip of."""
    chunks: int
    """Number of chunks of the pass."""
    stored: tuple[TaskKey, ...]
    """Stored pieces that it holds between passes, and that the pass starts from."""

    @cached_property
    def calls(self) -> Sequence[Call | None]:
        """Calls of the member, by their numbers in the pass; None for those of others."""
        found: list[Call | None] = [None] * self.count
        for number, call in self.own.items():
            found[number] = call
        return found

    def own_calls(self) -> Iterator[tuple[int, Call, int]]:
        """Give (number, call, group) of each of its calls, with strips as arguments where it reads those."""
        first, arguments, strips = self.first.tolist(), self.strip_arguments.tolist(), self.strip_of.tolist()
        calls = zip(self.own.items(), self.group_of.tolist(), pairwise(first), strict=True)
        for (number, call), group, bounds in calls:
            mine = slice(*bounds)
            yield number, with_strips(call, arguments[mine], strips[mine]), group

    def strips(self) -> Iterator[Strip]:
        """Give the strips that it cuts."""
        for number, source, region in zip(self.cut.tolist(), self.sources, self.regions, strict=True):
            yield Strip(strip_key(number, source), source, region)

    def bundles(self) -> Iterator[Bundle]:
        """Give the bundles that it sends and receives."""
        items = item_keys(self.items, self.item_chunks, self.chunks)
        return bundles_of(self.bundle_numbers, self.columns, self.first_item, items)


def shares_of(exchange: Exchange, members: Collection[int]) -> Iterator[Share]:
    """Give the shares of some members, in their order."""
    placed, flat = exchange.placed, exchange.placed.flat
    every = flat.graph.calls
    count = max(members, default=0) + 1
    calls_of, strips_of = _by(placed.workers, count), _by(placed.strip_senders, count)
    copies_of = _by(placed.copies.workers, count)
    sent, received = _by(exchange.columns[0], count), _by(exchange.columns[1], count)
    stored_of = _by(np.array([exchange.homes[key] for key in flat.graph.inputs], np.int64), count)
    strip_bounds = np.searchsorted(placed.strip_arguments, flat.first)
    for member in members:
        copied = _with_picks(every, placed.copies.calls[copies_of[member]])
        calls, cut = np.union1d(calls_of[member], copied), strips_of[member]
        bundles = np.union1d(sent[member], received[member])
        items_each = exchange.first[bundles + 1] - exchange.first[bundles]
        items = runs(exchange.first[bundles], items_each)
        strips_each = strip_bounds[calls + 1] - strip_bounds[calls]
        mine = runs(strip_bounds[calls], strips_each)
        reads = placed.strip_reads[cut]
        yield Share(
            member=member,
            own={number: every[number] for number in calls.tolist()},
            count=len(placed.workers),
            group_of=exchange.group_of[calls],
            groups=len(exchange.groups),
            first=starts_of(strips_each),
            strip_arguments=placed.strip_arguments[mine] - np.repeat(flat.first[calls], strips_each),
            strip_of=placed.strip_of[mine],
            cut=cut,
            sources=[flat.keys[chunk] for chunk in flat.source[reads].tolist()],
            regions=[flat.regions[part] for part in flat.part[reads].tolist()],
            bundle_numbers=bundles,
            columns=exchange.columns[:, bundles],
            first_item=starts_of(items_each),
            items=exchange.items[items],
            item_chunks=[flat.keys[chunk] for chunk in exchange.item_chunks[items].tolist()],
            chunks=len(flat.keys),
            stored=tuple(flat.keys[chunk] for chunk in stored_of[member].tolist()),
        )


def packed_shares(exchanges: Mapping[str, Exchange], members: int) -> list[bytes]:
    """Return the pickled shares of each member, by the names of passes."""
    each = zip(*(shares_of(one, range(members)) for one in exchanges.values()), strict=True)
    named = (dict(zip(exchanges, mine, strict=True)) for mine in each)
    return [pickle.dumps(mine, pickle.HIGHEST_PROTOCOL) for mine in named]


def _with_picks(calls: Sequence[Call], places: Ints) -> Ints:
    """Return places of calls, each followed by those of the calls that pick from its results."""
    found = []
    for place in places.tolist():
        found.append(place)
        while place + 1 < len(calls) and isinstance(calls[place + 1], PickCall):
            place += 1
            found.append(place)
    return np.array(found, np.int64)


def _by(values: Ints, count: int) -> list[Ints]:
    """Return, for each number below ``count``, the places at which it stands, ascending."""
    order = np.argsort(values, kind="stable")
    starts = np.searchsorted(values[order], np.arange(count + 1))
    return [order[begin:end] for begin, end in zip(starts[:-1], starts[1:], strict=True)]
