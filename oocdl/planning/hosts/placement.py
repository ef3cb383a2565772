"""Places the calls of a pass on workers, and cuts the strips that travel between them.

Only the strip that is read of another worker's chunk travels: it has a key of its own, and is made where the
chunk is, so that the chunk itself need not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, PickCall
from oocdl.planning.hosts.assignment import assigned
from oocdl.planning.hosts.copies import Copies, copies
from oocdl.planning.hosts.flat_pass import FlatPass, first_of_each, flatten
from oocdl.planning.hosts.ragged import Ints
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind


@dataclass(frozen=True)
class Strip:
    """Part of a chunk that a call on another worker reads."""

    key: TaskKey
    source: TaskKey
    region: Region


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
