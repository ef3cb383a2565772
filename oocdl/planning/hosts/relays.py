"""Routes broadcasts and gathers through trees of workers, with ``FAN`` branches each.

A worker that told a total to a thousand others would send a thousand messages, one after another, while all
of them wait; instead, those that have it pass it on. In the same way, some workers collect what one of them
needs of many others. Nothing is added up on the way, so no bit depends on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oocdl.planning.hosts.flat_pass import first_of_each
from oocdl.planning.hosts.ragged import Ints

FAN = 4
"""Maximum number of workers that hear of an item, or tell it, directly; others are behind these."""
COLLECTED_BYTES = 64 << 10
"""Maximum bytes of an item that other workers collect on its way to the one that reads it."""


class Pairs(NamedTuple):
    """Items that go from one worker to another, each once to each receiver."""

    item: Ints
    nbytes: Ints
    group: Ints
    """The group of layers that makes the item; -1: the pass starts from it."""
    sender: Ints
    receiver: Ints
    reader: Ints
    """The first group of layers that reads it on the receiver."""
    position: Ints
    """Plan position of the first call that reads it there."""


class Legs(NamedTuple):
    """Transfers of items from worker to worker on their way, in the order of the pairs."""

    pair: Ints
    """Pair of the item; where several pairs have the item, the one that receives it here."""
    sender: Ints
    receiver: Ints
    reader: Ints
    """The first group of layers that reads it on the receiver, or behind it."""
    position: Ints
    before: Ints
    """Number of times that the item has crossed before; all that travel together count the same."""


def routes(pairs: Pairs, workers: int) -> tuple[Legs, Ints]:
    """Return the legs of all pairs, and how often each pair's item has crossed when it is there."""
    crossed = np.ones(len(pairs.item), np.int64)
    if workers <= FAN + 1:
        return _direct(pairs, np.arange(len(pairs.item))), crossed
    readers = np.bincount(pairs.item)[pairs.item]
    small = np.flatnonzero((readers == 1) & (pairs.nbytes <= COLLECTED_BYTES))
    collected, legs = _collect(pairs, small, crossed, workers)
    others = np.ones(len(pairs.item), bool)
    others[collected] = False
    direct = _direct(pairs, np.flatnonzero(others))
    _spread(pairs, np.flatnonzero(readers[others] > FAN), direct, crossed, workers)
    order = np.argsort(np.concatenate([direct.pair, *(one.pair for one in legs)]), kind="stable")
    return Legs(*(np.concatenate(columns)[order] for columns in zip(direct, *legs, strict=True))), crossed


def _direct(pairs: Pairs, some: Ints) -> Legs:
    """Return the legs of some pairs, straight from the sender to the receiver."""
    return Legs(
        some,
        pairs.sender[some],
        pairs.receiver[some],
        pairs.reader[some],
        pairs.position[some],
        np.zeros(len(some), np.int64),
    )


def _depths(most: int) -> Ints:
    """Return the number of places between each place in a tree and the root; the first ``FAN`` have none."""
    found = np.zeros(most, np.int64)
    for place in range(FAN, most):
        found[place] = found[place // FAN - 1] + 1
    return found


def _ranks(of: Ints, turned: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the order by ``of``, then ``turned``, and in that order the rank of each among those of equal
    ``of``, and where these begin."""
    order = np.lexsort((turned, of))
    begins = np.flatnonzero(np.diff(of[order], prepend=-1))
    counts = np.diff(np.append(begins, len(order)))
    first = np.repeat(begins, counts)
    return order, np.arange(len(order)) - first, first


def _turned(member: Ints, root: Ints, group: Ints, workers: int) -> Ints:
    """Return places around a root, from another worker for each group, so that relays vary with it."""
    return np.asarray((member - root - 1 - FAN * group) % workers)


def _spread(pairs: Pairs, many: Ints, legs: Legs, crossed: Ints, workers: int) -> None:
    """Have ``many`` of the legs, whose items many read, go by way of others of these readers."""
    if not len(many):
        return
    pair = legs.pair[many]
    turned = _turned(pairs.receiver[pair], pairs.sender[pair], pairs.group[pair], workers)
    order, rank, first = _ranks(pairs.item[pair], turned)
    mine = many[order]
    parent, behind = mine[first + np.maximum(rank // FAN - 1, 0)], rank >= FAN
    depth = _depths(int(rank.max()) + 1)[rank]
    legs.sender[mine[behind]] = legs.receiver[parent[behind]]
    legs.before[mine] = depth
    crossed[legs.pair[mine]] += depth
    for level in range(int(depth.max()), 0, -1):
        there = depth == level
        for column in (legs.reader, legs.position):
            np.minimum.at(column, parent[there], column[mine[there]])


def _collect(pairs: Pairs, small: Ints, crossed: Ints, workers: int) -> tuple[Ints, list[Legs]]:
    """Route ``small`` pairs from many senders through some of these; return those pairs, and their legs."""
    if not len(small):
        return small, []
    code = pairs.group[small] + 1
    for column in (pairs.receiver, pairs.reader):
        code = code * (int(column.max()) + 1) + column[small]
    # A node for each sender of what goes to one worker for one group of layers; by their places in the tree.
    nodes, node = first_of_each(code * workers + pairs.sender[small])
    heads = small[nodes]
    turned = _turned(pairs.sender[heads], pairs.receiver[heads], pairs.group[heads], workers)
    order, rank, first = _ranks(code[nodes], turned)
    member, place = pairs.sender[heads[order]], np.empty_like(order)
    place[order] = np.arange(len(order))
    most = rank.copy()
    np.maximum.at(most, first, rank)
    depths = _depths(int(rank.max()) + 1)
    depth, deepest = depths[rank], depths[most[first]]
    many = np.flatnonzero((most[first] >= FAN)[place[node]])
    collected, at = small[many], place[node][many]
    crossed[collected] += deepest[at]
    pair, found = collected, []
    while len(pair):
        up = rank[at] // FAN - 1
        next_at = first[at] + np.maximum(up, 0)
        receiver = np.where(up < 0, pairs.receiver[pair], member[next_at])
        ends = pairs.reader[pair], pairs.position[pair]
        found.append(Legs(pair, member[at], receiver, *ends, deepest[at] - depth[at]))
        pair, at = pair[up >= 0], next_at[up >= 0]
    return collected, found
