"""What a placed pass takes on each worker: bytes held, sent and received, and its share of the work.

Counted from the very bundles that will travel (``hosts/exchange``) and the calls that each worker has:
nothing is simulated, and no clock runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import region_size
from oocdl.planning.calls import Call, CombineCall, PickCall, UnitCall, made_of
from oocdl.planning.cost_model import call_seconds
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.task_key import TaskKey, result_keys
from tests.kit.placed import calls_of, strips_of, worker_of


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """One worker in one pass."""

    held_bytes: int
    """Weights and state that it holds between passes."""
    peak_bytes: int
    """Most at once of what it holds, makes and receives, with the largest of its calls: what is there that is
    still read, if calls ran one by one in the plan's order. More than fits in memory is spilled."""
    disk_bytes: int
    """The same of chunks alone: a disk of so much is always enough. What was spilled keeps its file while
    anybody reads it, also while it is in memory, so both together hold more than ``peak_bytes``."""
    sent_bytes: int
    received_bytes: int
    calls: int
    """Units and calls that combine partial sums."""
    compute_seconds: float
    """Predicted, of all its calls one after another on one thread."""


def host_costs(exchange: Exchange, workers: int) -> tuple[HostCost, ...]:
    """What a pass takes on each of ``workers``, by number."""
    sent, received, held, count = ([0] * workers for _ in range(4))
    for bundle in exchange.bundles:
        sent[bundle.sender] += bundle.nbytes
        received[bundle.receiver] += bundle.nbytes
    for key in exchange.graph.inputs:
        held[exchange.homes[key]] += exchange.graph.input_bytes[key]
    taken = [0.0] * workers
    maker = worker_of(exchange.placed)
    for call, seconds in zip(exchange.graph.calls, call_seconds(exchange.graph.calls), strict=True):
        worker = maker[call.key]
        taken[worker] += seconds
        count[worker] += not isinstance(call, PickCall)
    peaks, chunks = _peaks(exchange, held)
    return tuple(
        HostCost(
            held_bytes=held[worker],
            peak_bytes=peaks[worker],
            disk_bytes=chunks[worker],
            sent_bytes=sent[worker],
            received_bytes=received[worker],
            calls=count[worker],
            compute_seconds=taken[worker],
        )
        for worker in range(workers)
    )


def _peaks(exchange: Exchange, held: Sequence[int]) -> tuple[list[int], list[int]]:
    """The most bytes at once on each worker, call by call, and of chunks alone.

    ``held``: what each holds from the start.
    """
    graph, placed = exchange.graph, exchange.placed
    calls, maker = calls_of(placed), worker_of(placed)
    sizes = _sizes(exchange)
    kept = set(graph.outputs)
    source_of = {strip.key: strip.source for strip in strips_of(placed)}
    where = {**exchange.homes, **maker}
    last: dict[tuple[TaskKey, int], int] = {}
    """(chunk or strip, worker) -> place of the last call for which it is there."""
    for place, (_, call) in enumerate(calls):
        for key in _arguments(call):
            reader = maker[call.key]
            last[key, reader] = place
            last[key, where[key]] = place
            if key in source_of:
                last[source_of[key], where[key]] = place
    ending: list[list[tuple[int, int]]] = [[] for _ in calls]
    now, peak, chunks = list(held), list(held), list(held)
    arrived: set[tuple[TaskKey, int]] = set()

    def arrive(key: TaskKey, worker: int, place: int) -> None:
        now[worker] += sizes[key]
        chunks[worker] = max(chunks[worker], now[worker])
        if key not in kept or where[key] != worker:
            ending[last.get((key, worker), place)].append((worker, sizes[key]))

    for place, (_, call) in enumerate(calls):
        mine = maker[call.key]
        for key in _arguments(call):
            if where[key] != mine and (key, mine) not in arrived:
                arrived.add((key, mine))
                arrive(key, mine, place)
        working = 0
        if not isinstance(call, PickCall):
            working = call.buffer_bytes + (0 if isinstance(call, CombineCall) else call.scratch_bytes)
            for key in _results(call):
                arrive(key, mine, place)
        peak[mine] = max(peak[mine], now[mine] + working)
        for worker, nbytes in ending[place]:
            now[worker] -= nbytes
    return peak, chunks


def _sizes(exchange: Exchange) -> Mapping[TaskKey, int]:
    """Bytes of all chunks and strips."""
    sizes, dtypes = dict(exchange.graph.input_bytes), dict[TaskKey, str]()
    for _, call in calls_of(exchange.placed):
        if not isinstance(call, PickCall):
            for key, made, dtype in zip(_results(call), made_of(call), call.dtypes, strict=True):
                sizes[key], dtypes[key] = made.nbytes, dtype
    for strip in strips_of(exchange.placed):
        sizes[strip.key] = region_size(strip.region) * itemsize(dtypes[strip.source])
    return sizes


def _arguments(call: Call) -> tuple[TaskKey, ...]:
    """What a call reads; a call that picks a result moves nothing."""
    return () if isinstance(call, PickCall) else call.arguments


def _results(call: UnitCall | CombineCall) -> list[TaskKey]:
    """The keys of the chunks that a call makes."""
    return result_keys(call.key, call.values)
