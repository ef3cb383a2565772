"""Which worker runs which call, and what has to travel between them.

Of a chunk of another worker only the strip that is read travels: it is a key of
its own, made where its chunk is, so that the chunk itself need not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.planning.calls import Call, PickCall, UnitCall
from oocdl.planning.hosts.assignment import assign
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind


@dataclass(frozen=True)
class Strip:
    """Part of a chunk for another worker."""

    key: TaskKey
    source: TaskKey
    region: Region


@dataclass(frozen=True, eq=False)
class Placed:
    """A step over several workers."""

    calls: tuple[tuple[int, Call], ...]
    """(number in the step graph, call), arguments replaced by strips where those are read."""
    strips: tuple[Strip, ...]
    worker_of: Mapping[TaskKey, int]
    """Key -> number of the worker it is made on."""
    position_of: Mapping[TaskKey, int]
    """Key -> place in the plan's order, for priorities."""


def place(graph: TaskGraph, workers: int) -> Placed:
    """Give every call a worker (``hosts/assignment``), and cut strips at the seams."""
    region_of = {key: region for pieces in graph.pieces.values() for region, key in pieces}
    worker_of = assign(graph, workers)
    position_of: dict[TaskKey, int] = {}
    calls: list[tuple[int, Call]] = []
    strips: dict[tuple[TaskKey, Region], Strip] = {}
    for number, call in enumerate(graph.calls):
        if isinstance(call, PickCall):
            position_of[call.key] = position_of[call.source]
        else:
            position_of[call.key] = call.position
        if isinstance(call, UnitCall):
            call = _with_strips(call, worker_of[call.key], worker_of, region_of, strips)
        calls.append((number, call))
    for strip in strips.values():
        worker_of[strip.key], position_of[strip.key] = worker_of[strip.source], position_of[strip.source]
    return Placed(tuple(calls), tuple(strips.values()), worker_of, position_of)


def largest_crossing(graph: TaskGraph, placed: Placed) -> int:
    """Bytes of the largest chunk that may come to a worker from elsewhere."""
    made: dict[TaskKey, list[tuple[Region, str]]] = {}
    # Weights and state come from the client, or from the worker that has updated them.
    crossing = max(graph.input_bytes.values(), default=0)
    strips = {strip.key: strip for strip in placed.strips}
    for _, call in placed.calls:
        if isinstance(call, PickCall):
            made[call.key] = [made[call.source][call.number]]
            continue
        if isinstance(call, UnitCall):
            regions = [region for _, region in call.unit.makes]
        else:
            regions = [call.region] * len(call.values)
        made[call.key] = list(zip(regions, call.dtypes, strict=True))
        mine = placed.worker_of[call.key]
        for source in call.arguments:
            if placed.worker_of.get(source, mine) == mine:
                continue
            if source in strips:
                ((_, dtype),) = made[strips[source].source]
                made[source] = [(strips[source].region, dtype)]
            sizes = [region_size(region) * itemsize(dtype) for region, dtype in made[source]]
            crossing = max(crossing, *sizes)
    return crossing


def _with_strips(
    call: UnitCall,
    mine: int,
    worker_of: Mapping[TaskKey, int],
    region_of: Mapping[TaskKey, Region],
    strips: dict[tuple[TaskKey, Region], Strip],
) -> UnitCall:
    """The call, reading strips instead of chunks of other workers of which it needs a part."""
    elsewhere = {n for n, source in enumerate(call.arguments) if worker_of.get(source, mine) != mine}
    if not elsewhere:
        return call
    arguments = list(call.arguments)
    for read in call.reads:
        if elsewhere.isdisjoint(range(read.first, read.first + len(read.parts))):
            continue
        for number, part in read.chunks:
            source = call.arguments[number]
            if number not in elsewhere or part == region_of[source]:
                continue
            if (source, part) not in strips:
                key = TaskKey(TaskKind.STRIP, source.layer, "", len(strips))
                strips[source, part] = Strip(key, source, part)
            arguments[number] = strips[source, part].key
    return replace(call, arguments=tuple(arguments))
