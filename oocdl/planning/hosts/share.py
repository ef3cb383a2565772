"""Picks what each member of a crew has to know of a pass: all that travels to it before the first pass.

A share has the calls of a member, the strips that it cuts, and the bundles that it sends and receives: all
shares together are about as large as one graph, however many members there are.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, PickCall
from oocdl.planning.hosts.exchange import Bundle, Exchange
from oocdl.planning.hosts.placement import Strip, strip_key, with_strips
from oocdl.planning.hosts.ragged import Ints, runs, starts_of
from oocdl.planning.task_key import TaskKey, TaskKind

T_co = TypeVar("T_co", covariant=True)


class Numbered(Protocol[T_co]):
    """Objects of a pass that are found by their numbers in it."""

    def __getitem__(self, number: int, /) -> T_co: ...


class Facts(Protocol):
    """The facts of a pass, or those that a member knows of it."""

    @property
    def keys(self) -> Numbered[TaskKey]:
        """Keys of chunks."""

    @property
    def regions(self) -> Numbered[Region]:
        """Regions that are read."""

    @property
    def calls(self) -> Numbered[Call]:
        """The calls."""


@dataclass(frozen=True, eq=False)
class SomeFacts:
    """Some facts of a pass, by their numbers in it."""

    keys: Mapping[int, TaskKey]
    regions: Mapping[int, Region]
    calls: Mapping[int, Call]


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """One member's part of a pass, in numbers; ``facts`` tell what they stand for."""

    member: int
    facts: Facts
    numbers: Ints
    """Numbers of the calls that it runs."""
    count: int
    """Number of calls of the pass."""
    group_of: Ints
    """The group of each of its calls."""
    groups: int
    """Number of groups of layers of the pass."""
    first: Ints
    """First place in ``strip_arguments`` of each of its calls, and the end of the last."""
    strip_arguments: Ints
    strip_of: Ints
    """Number of the strip that each of ``strip_arguments`` is; both are as in ``Placed``."""
    cut: Ints
    """Numbers of the strips that it cuts."""
    sources: Ints
    """The chunk that each of them is cut from."""
    regions: Ints
    bundle_numbers: Ints
    """Numbers of the bundles that it sends and receives."""
    columns: Ints
    """Columns of these bundles, as ``Exchange`` has them."""
    first_item: Ints
    """Place in ``items`` of the first item of each of these bundles, and the end of the last."""
    items: Ints
    """Items of bundles: the number of a chunk, or the number of all chunks plus that of a strip."""
    chunk_of: Ints
    """Chunk that each item is, or is a strip of."""
    chunks: int
    """Number of chunks of the pass."""
    stored_chunks: Ints
    """Stored pieces that it holds between passes, and that the pass starts from."""

    @cached_property
    def calls(self) -> Sequence[Call | None]:
        """Calls of the member, by their numbers in the pass; None for those of others."""
        found: list[Call | None] = [None] * self.count
        for number in self.numbers.tolist():
            found[number] = self.facts.calls[number]
        return found

    @property
    def stored(self) -> tuple[TaskKey, ...]:
        """Keys of the stored pieces."""
        return tuple(self.facts.keys[chunk] for chunk in self.stored_chunks.tolist())

    def own_calls(self) -> Iterator[tuple[int, Call, int]]:
        """Give (number, call, group) of each of its calls, with strips as arguments where it reads those."""
        places = zip(self.numbers.tolist(), self.group_of.tolist(), strict=True)
        first, arguments, strips = self.first.tolist(), self.strip_arguments.tolist(), self.strip_of.tolist()
        for place, (number, group) in enumerate(places):
            call, mine = self.calls[number], slice(*first[place : place + 2])
            assert call is not None
            yield number, with_strips(call, arguments[mine], strips[mine]), group

    def strips(self) -> Iterator[Strip]:
        """Give the strips that it cuts."""
        columns = self.cut.tolist(), self.sources.tolist(), self.regions.tolist()
        for number, chunk, region in zip(*columns, strict=True):
            source = self.facts.keys[chunk]
            yield Strip(strip_key(number, source), source, self.facts.regions[region])

    def bundles(self) -> Iterator[Bundle]:
        """Give the bundles that it sends and receives."""
        first, items, chunks = self.first_item.tolist(), self.items.tolist(), self.chunk_of.tolist()
        for place, (number, column) in enumerate(
            zip(self.bundle_numbers.tolist(), self.columns.T.tolist(), strict=True)
        ):
            found = tuple(self._item(items[one], chunks[one]) for one in range(*first[place : place + 2]))
            sender, receiver, *others = column
            yield Bundle(
                TaskKey(TaskKind.BUNDLE, found[0].layer, "", number), sender, receiver, found, *others
            )

    def _item(self, item: int, chunk: int) -> TaskKey:
        key = self.facts.keys[chunk]
        return key if item == chunk else strip_key(item - self.chunks, key)


def shares_of(exchange: Exchange, members: Collection[int]) -> Iterator[Share]:
    """Give the shares of some members, in their order."""
    placed, flat = exchange.placed, exchange.placed.flat
    count = max(members, default=0) + 1
    calls_of, strips_of = _by(placed.workers, count), _by(placed.strip_senders, count)
    copies_of = _by(placed.copies.workers, count)
    sent, received = _by(exchange.columns[0], count), _by(exchange.columns[1], count)
    chunks = len(flat.keys)
    chunk_of = np.concatenate((np.arange(chunks), flat.source[placed.strip_reads]))
    homes = np.array([exchange.homes[key] for key in exchange.graph.inputs], np.int64)
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
            facts=flat,
            numbers=calls,
            count=len(placed.workers),
            group_of=group_of[calls],
            groups=len(exchange.groups),
            first=starts_of(strips_each),
            strip_arguments=placed.strip_arguments[mine],
            strip_of=placed.strip_of[mine],
            cut=cut,
            sources=flat.source[reads],
            regions=flat.part[reads],
            bundle_numbers=bundles,
            columns=exchange.columns[:, bundles],
            first_item=starts_of(items_each),
            items=items,
            chunk_of=chunk_of[items],
            chunks=chunks,
            stored_chunks=np.flatnonzero(homes == member),
        )


def packed_shares(exchanges: Mapping[str, Exchange], members: int) -> list[bytes]:
    """Return the pickled shares of each member, by the names of passes, each with the facts it needs."""
    each = zip(*(shares_of(one, range(members)) for one in exchanges.values()), strict=True)
    known = ({name: _alone(share) for name, share in zip(exchanges, mine, strict=True)} for mine in each)
    return [pickle.dumps(mine, pickle.HIGHEST_PROTOCOL) for mine in known]


def _alone(share: Share) -> Share:
    """Return a share with no other facts than those that it needs."""
    chunks = np.unique(np.concatenate((share.sources, share.chunk_of, share.stored_chunks)))

    def some(facts: Numbered[T_co], numbers: Ints) -> dict[int, T_co]:
        return {number: facts[number] for number in numbers.tolist()}

    keys, regions = some(share.facts.keys, chunks), some(share.facts.regions, np.unique(share.regions))
    return replace(share, facts=SomeFacts(keys, regions, some(share.facts.calls, share.numbers)))


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
