"""Places the calls of a pass on workers, and cuts the strips that travel between them.

Only the strip that is read of another worker's chunk travels: it has a key of its own, and is made where the
chunk is, so that the chunk itself need not move. Small sums that few workers make and read are combined by
each of these, and no total travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, CombineCall, PickCall
from oocdl.planning.hosts.assignment import assigned
from oocdl.planning.hosts.flat_pass import FlatPass, first_of_each, flatten
from oocdl.planning.hosts.ragged import Ints
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind

MOST_COPYING_WORKERS = 4
"""Maximum number of workers that make or read a sum that is copied: each hears of all others."""
MOST_COPIED_BYTES = 64 << 10
"""Maximum bytes that a copied sum adds up; one worker combines a larger sum, and sends the total."""


@dataclass(frozen=True)
class Strip:
    """Part of a chunk that a call on another worker reads."""

    key: TaskKey
    source: TaskKey
    region: Region


class Copies(NamedTuple):
    """Calls that combine sums on further workers than the one that they are assigned to."""

    calls: Ints
    """Places of calls; those that pick one of their results are copied with them."""
    workers: Ints

    def holds(self, calls: Ints, workers: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return, for each call (-1: none) and worker, whether the call is copied there."""
        size = int(max(self.workers.max(initial=0), workers.max(initial=0))) + 1
        return np.isin(calls * size + workers, self.calls * size + self.workers)


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """A pass over several workers, in numbers."""

    graph: TaskGraph
    flat: FlatPass
    workers: Ints
    """Worker that runs each call."""
    copies: Copies
    """Calls that further workers run as well."""
    strip_arguments: Ints
    """Numbers, among all arguments of the pass, of those that are strips, ascending."""
    strip_of: Ints
    """Number of the strip that each of these arguments is."""
    strip_reads: Ints
    """Number, among all arguments of the pass, of the first that reads each strip."""
    strip_senders: Ints
    """Worker that cuts each strip."""


def strip_key(number: int, source: TaskKey) -> TaskKey:
    """Return the key of a strip of a chunk."""
    return TaskKey(TaskKind.STRIP, source.layer, "", number)


def with_strips(call: Call, arguments: Sequence[int], strips: Sequence[int]) -> Call:
    """Return a call that reads ``strips``, by number, in place of some of its arguments."""
    if not arguments or isinstance(call, PickCall):
        return call
    keys = list(call.arguments)
    for argument, strip in zip(arguments, strips, strict=True):
        keys[argument] = strip_key(strip, keys[argument])
    return replace(call, arguments=tuple(keys))


def place(graph: TaskGraph, workers: int, threads: int = 1) -> Placed:
    """Give every call a worker of so many threads (``hosts/assignment``), and cut strips at the seams.

    Where the plan is for fewer workers than there are, the last get no work.
    """
    flat = flatten(graph)
    return placed_on(flat, assigned(flat, min(workers, graph.hosts or workers), threads))


def placed_on(flat: FlatPass, workers: Ints) -> Placed:
    """Cut strips at the seams of a pass whose calls are run by these ``workers``."""
    copied = copies(flat, workers)
    cut = np.flatnonzero(flat.cut)
    maker, calls = flat.maker[flat.source[cut]], flat.readers(cut)
    away = (maker >= 0) & (workers[maker] != workers[calls])
    cut, maker, calls = cut[away], maker[away], calls[away]
    alone = ~copied.holds(maker, workers[calls])
    cut, maker = cut[alone], maker[alone]
    part = flat.part[cut]
    first, strip_of = first_of_each(flat.source[cut] * (int(part.max(initial=0)) + 1) + part)
    return Placed(
        graph=flat.graph,
        flat=flat,
        workers=workers,
        copies=copied,
        strip_arguments=cut,
        strip_of=strip_of,
        strip_reads=cut[first],
        strip_senders=workers[maker[first]],
    )


def copies(flat: FlatPass, workers: Ints) -> Copies:
    """Find small sums that several workers combine, each for itself, if calls run on these ``workers``.

    A normalization over a whole volume waits for the sums of all its pieces. If one worker combines them and
    sends the total, others wait for two messages, one after the other; if each gets the sums, for one. All of
    them add up the same numbers in the same order, so the totals are equal to the last bit.
    """
    size, count = int(workers.max(initial=0)) + 1, len(workers)
    combines = np.fromiter((isinstance(call, CombineCall) for call in flat.graph.calls), bool, count)
    places = np.flatnonzero(combines)
    added, adder = flat.arguments_of(places)
    adder, piece = places[adder], flat.maker[flat.source[added]]
    read = np.flatnonzero(((flat.maker >= 0) & combines[flat.maker])[flat.source])
    total = flat.maker[flat.source[read]]
    makes, reads = workers[piece], np.unique(total * size + workers[flat.readers(read)])
    ends = np.unique(np.concatenate((adder * size + makes, reads)))
    fits = combines & (np.bincount(ends // size, minlength=count) <= MOST_COPYING_WORKERS)
    fits &= np.bincount(adder, flat.nbytes[added], count) <= MOST_COPIED_BYTES
    fits &= np.bincount(adder, makes != workers[adder], count) > 0
    # What a pass hands out is handed out once.
    handed_out = flat.maker[[flat.number[key] for key in flat.graph.outputs]]
    fits[handed_out[handed_out >= 0]] = False
    fits[adder[(piece < 0) | fits[piece]]] = False  # a copy reads what is where it was made
    call, worker = np.divmod(reads, size)
    there = fits[call] & (worker != workers[call])
    return Copies(call[there], worker[there])
