"""A pass over several workers as objects: its calls and strips, who makes them, and what that costs each.

Costs are counted from the very bundles that will travel (``hosts/exchange``) and the calls that each worker
has: nothing is simulated, and no clock runs.
"""

from __future__ import annotations

import hashlib
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from oocdl.planning.calls import Call, CombineCall, PickCall, UnitCall
from oocdl.planning.cost_model import call_seconds
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.hosts.placement import Placed, Strip, strip_key, with_strips
from oocdl.planning.pass_plan import LayerPlan
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey
from oocdl.report.plan_view import Plan


def calls_of(placed: Placed) -> list[tuple[int, Call]]:
    """Calls with their numbers in the task graph, arguments replaced by strips where those are read."""
    flat, arguments, strips = placed.flat, placed.strip_arguments, placed.strip_of.tolist()
    bounds = np.searchsorted(arguments, flat.first).tolist()
    found = []
    for number, call in enumerate(placed.graph.calls):
        mine = slice(*bounds[number : number + 2])
        own = (arguments[mine] - flat.first[number]).tolist()
        found.append((number, with_strips(call, own, strips[mine])))
    return found


def strips_of(placed: Placed) -> tuple[Strip, ...]:
    """All strips."""
    flat, reads = placed.flat, placed.strip_reads
    columns = flat.source[reads].tolist(), flat.part[reads].tolist()
    found = ((flat.keys[source], flat.regions[part]) for source, part in zip(*columns, strict=True))
    return tuple(Strip(strip_key(n, source), source, region) for n, (source, region) in enumerate(found))


def worker_of(placed: Placed) -> dict[TaskKey, int]:
    """Key of a call or a strip -> number of the worker it is made on."""
    workers = placed.workers.tolist()
    found = {call.key: worker for call, worker in zip(placed.graph.calls, workers, strict=True)}
    return found | {strip.key: found[strip.source] for strip in strips_of(placed)}


class HostCost(NamedTuple):
    """One worker in one pass."""

    held_bytes: int
    """Weights and state that it holds between passes."""
    sent_bytes: int
    received_bytes: int
    compute_seconds: float
    """Predicted, of all its calls one after another on one thread."""


def host_costs(exchange: Exchange, workers: int) -> tuple[HostCost, ...]:
    """What a pass takes on each of ``workers``, by number."""
    sent, received, held = ([0] * workers for _ in range(3))
    for bundle in exchange.bundles:
        sent[bundle.sender] += bundle.nbytes
        received[bundle.receiver] += bundle.nbytes
    for key in exchange.graph.inputs:
        held[exchange.homes[key]] += exchange.graph.input_bytes[key]
    taken = [0.0] * workers
    maker = worker_of(exchange.placed)
    for call, seconds in zip(exchange.graph.calls, call_seconds(exchange.graph.calls), strict=True):
        taken[maker[call.key]] += seconds
    return tuple(map(HostCost, held, sent, received, taken))


def ideal_seconds(graph: TaskGraph, slots: int) -> float:
    """Predicted seconds of a pass on ``slots`` threads of all processes, if memory and moving cost nothing.

    A ready call starts as soon as a slot is free, in the plan's order: a bound for any placement.
    """
    seconds = call_seconds(graph.calls)
    number = {call.key: place for place, call in enumerate(graph.calls)}
    missing, readers = [0] * len(seconds), [list[int]() for _ in seconds]
    for place, call in enumerate(graph.calls):
        sources = call.arguments if isinstance(call, UnitCall | CombineCall) else (call.source,)
        for source in {number[key] for key in sources if key in number}:
            readers[source].append(place)
            missing[place] += 1
    ready = [place for place, count in enumerate(missing) if not count]
    heapify(ready)
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < slots:
            place = heappop(ready)
            heappush(running, (now + seconds[place], place))
        now, done = heappop(running)
        for reader in readers[done]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    return now


def _layer(planned: LayerPlan) -> object:
    layer = planned.layer
    cells = [cell.node.name for cell in layer.cells]
    values = layer.name, layer.index, cells, layer.reads, layer.stores, layer.partials, sorted(layer.touched)
    nbytes = planned.buffer_bytes, planned.scratch_bytes, planned.read_bytes, planned.written_bytes
    return values, sorted(planned.grid.items()), nbytes, planned.flops, len(planned.units)


def _call(call: Any) -> object:
    if not isinstance(call, UnitCall):
        return repr(call)
    unit = call.unit
    made = unit.layer, unit.shard, unit.reads, unit.program.key, unit.makes, unit.counts
    tasks = call.key, call.position, call.arguments, call.reads, call.partial_sums, call.uses
    return made, tasks, call.combines, call.dtypes, call.buffer_bytes, call.scratch_bytes


def _graph(graph: TaskGraph) -> object:
    mappings = graph.pieces, graph.input_uses, graph.input_bytes, graph.replaced
    return graph.inputs, graph.outputs, [sorted(found.items()) for found in mappings]


def plan_digest(plan: Plan) -> dict[str, str]:
    """Kind of pass -> a digest, in hexadecimal, of its plan; ``seconds`` -> those that are predicted."""
    found = {"seconds": repr(plan.seconds)}
    for name, kind in plan.kinds.items():
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((kind.plan.cuts, sorted(kind.pieces.items()), _graph(kind.graph))).encode())
        for planned in kind.plan.layers:
            digest.update(repr(_layer(planned)).encode())
        for call in kind.graph.calls:
            digest.update(repr(_call(call)).encode())
        found[name] = digest.hexdigest()
    return found


def placement_digest(made: Exchange) -> str:
    """A digest, in hexadecimal, of who does what in a pass, and of all that travels."""
    digest, placed = hashlib.blake2b(digest_size=8), made.placed
    maker = worker_of(placed)
    for number, call in calls_of(placed):
        arguments = () if isinstance(call, PickCall) else call.arguments
        digest.update(repr((number, call.key, arguments, maker[call.key])).encode())
    for strip in strips_of(placed):
        digest.update(repr((strip, maker[strip.key])).encode())
    for bundle in made.bundles:
        digest.update(repr(bundle).encode())
    digest.update(repr((made.groups, tuple(made.group_of.tolist()), sorted(made.homes.items()))).encode())
    return digest.hexdigest()
