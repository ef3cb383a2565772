"""Which worker runs which call, and what has to travel between them.

Of a chunk of another worker only the strip that is read travels: it is a key of
its own, made where its chunk is, so that the chunk itself need not move.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import Call, PickCall, UnitCall
from oocdl.planning.hosts.assignment import assigned
from oocdl.planning.hosts.flat_pass import FlatPass, Ints, first_of_each, flatten
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind


@dataclass(frozen=True)
class Strip:
    """Part of a chunk for another worker."""

    key: TaskKey
    source: TaskKey
    region: Region


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """A pass over several workers, in numbers: calls and strips are made of them for who asks.

    It travels without ``flat``, and without what was made.
    """

    graph: TaskGraph
    flat: FlatPass
    workers: Ints
    """For each call the worker that runs it."""
    first: Ints
    """For each call, and once more at the end: its first argument in ``strip_arguments``."""
    strip_arguments: Ints
    """For arguments that are strips: the place among those of their call."""
    strip_of: Ints
    """For the same arguments: the number of the strip."""
    strip_calls: Ints
    """For each strip the first call that reads it."""
    strip_places: Ints
    """For each strip the place of its source among that call's arguments."""
    strip_senders: Ints
    """For each strip the worker that cuts it."""

    def __getstate__(self) -> dict[str, Any]:
        made = ("flat", "calls", "strips", "worker_of")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def call(self, place: int) -> Call:
        """A call, reading strips where it reads them."""
        call = self.graph.calls[place]
        first, last = self.first[place : place + 2].tolist()
        if first == last or isinstance(call, PickCall):
            return call
        arguments = list(call.arguments)
        for argument, strip in zip(
            self.strip_arguments[first:last].tolist(), self.strip_of[first:last].tolist(), strict=True
        ):
            arguments[argument] = strip_key(strip, arguments[argument])
        return replace(call, arguments=tuple(arguments))

    def source_of(self, number: int) -> TaskKey:
        """The chunk of which a strip is a part."""
        call = self.graph.calls[self.strip_calls[number]]
        assert isinstance(call, UnitCall)
        return call.arguments[int(self.strip_places[number])]

    def strip(self, number: int) -> Strip:
        """A strip."""
        call, argument = self.graph.calls[self.strip_calls[number]], int(self.strip_places[number])
        assert isinstance(call, UnitCall)
        read = next(one for one in call.reads if 0 <= argument - one.first < len(one.parts))
        region = next(islice(read.parts, argument - read.first, None))
        source = call.arguments[argument]
        return Strip(strip_key(number, source), source, region)

    def strips_of(self, members: Collection[int]) -> list[Strip]:
        """The strips that some members cut."""
        mine = np.isin(self.strip_senders, list(members))
        return [self.strip(number) for number in np.flatnonzero(mine).tolist()]

    @cached_property
    def calls(self) -> tuple[tuple[int, Call], ...]:
        """(number in the task graph, call), arguments replaced by strips where those are read."""
        return tuple((place, self.call(place)) for place in range(len(self.graph.calls)))

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """All strips."""
        return tuple(map(self.strip, range(len(self.strip_calls))))

    @cached_property
    def worker_of(self) -> dict[TaskKey, int]:
        """Key of a call or a strip -> number of the worker it is made on."""
        found = {
            call.key: worker for call, worker in zip(self.graph.calls, self.workers.tolist(), strict=True)
        }
        return found | {strip.key: found[strip.source] for strip in self.strips}


def strip_key(number: int, source: TaskKey) -> TaskKey:
    """The key of a strip of a chunk."""
    return TaskKey(TaskKind.STRIP, source.layer, "", number)


def place(graph: TaskGraph, workers: int, threads: int = 1) -> Placed:
    """Give every call a worker of so many threads (``hosts/assignment``), and cut strips at the seams."""
    flat = flatten(graph)
    return placed_on(flat, assigned(flat, workers, threads))


def placed_on(flat: FlatPass, workers: Ints) -> Placed:
    """Cut strips at the seams of a pass whose calls are run by these ``workers``."""
    maker = flat.maker[flat.source]
    reader = np.repeat(np.arange(len(workers)), np.diff(flat.first))
    cut = np.flatnonzero(
        (flat.part >= 0)
        & (maker >= 0)
        & (workers[maker] != workers[reader])
        & (flat.nbytes != flat.sizes[flat.source])
    )
    part = flat.part[cut]
    first, strip_of = first_of_each(flat.source[cut] * (int(part.max(initial=0)) + 1) + part)
    calls = reader[cut]
    arguments = cut - flat.first[calls]
    return Placed(
        graph=flat.graph,
        flat=flat,
        workers=workers,
        first=np.searchsorted(calls, np.arange(len(workers) + 1)),
        strip_arguments=arguments,
        strip_of=strip_of,
        strip_calls=calls[first],
        strip_places=arguments[first],
        strip_senders=workers[maker[cut[first]]],
    )
