"""Run one task; hand a step's graph to Dask.

A unit acquires all memory it will need before it touches anything, gathers its
inputs by region, waits for a compute slot, runs its program and puts the results
into the tier. Memory comes before the compute slot, so units that wait for the
processor have their inputs read already, while others compute.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from oocdl.engines.checked_indices import IndexOutside, ZeroDivisor
from oocdl.engines.engine import Compiled, Engine
from oocdl.events import ProcessLook
from oocdl.graph.ir.array_layout import footprint
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Region, is_empty, region_shape, within
from oocdl.host.heap import Heap, keep_freed_memory
from oocdl.host.limits import anonymous_bytes, machine_seconds
from oocdl.planning.calls import Call, CombineCall, PickCall, Read, UnitCall, acquired, in_place, read_bytes
from oocdl.planning.hosts.share import Share
from oocdl.planning.machine import Machine
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, result_key
from oocdl.runtime.checked_values import number_error
from oocdl.runtime.combining import add_partial_sums, combined
from oocdl.runtime.dask_private import Task, TaskRef
from oocdl.runtime.inputs import Sources
from oocdl.runtime.measured import Board, Measured, Moved, Phase, Spent
from oocdl.runtime.on_device import Begin, Devices, Origins, gather_on_device, held_on_device
from oocdl.runtime.trace import COMBINE_PHASES, STRIP_PHASES, UNIT_PHASES, Recorder, Recording
from oocdl.storage.cache.chunk import Chunk, use
from oocdl.storage.cache.memory_tier import Reservation, Tier
from oocdl.storage.cache.spill_store import SpillStore


@dataclass(eq=False)
class Context:
    """Everything that a process needs to run units of one run; never part of a task."""

    task_graphs: Mapping[str, TaskGraph | Share]
    """Plan id -> tasks: full batches, the ragged last batch, evaluation."""
    sources: Mapping[str, Sources]
    engine: Engine
    tier: Tier
    heap: Heap
    """The heap on which programs run."""
    deliver: Callable[[str, str, Region, Array, PassInfo], None] | None = None
    """(plan id, value, region, array, step): called with every result in ``watched``."""
    watched: Mapping[str, frozenset[TaskKey]] = field(default_factory=dict)
    """Plan id -> whole pieces of values, and none of the partial sums that they are made of."""
    measured: Measured = field(default_factory=Measured)
    recorder: Recorder | None = None
    """Takes the times of tasks, while a trace is wanted."""

    def __post_init__(self) -> None:
        self.board = Board(max((len(graph.calls) for graph in self.task_graphs.values()), default=0))

    def begin_pass(self, plan_id: str) -> None:
        """Begin to measure a pass."""
        self.board.begin(plan_id, len(self.task_graphs[plan_id].calls))
        self._begun = perf_counter(), self.tier.stats

    def end_pass(self, plan_id: str) -> None:
        """Count what the pass took."""
        (begun, before), now = self._begun, self.tier.stats
        read_bytes = now.read_bytes - before.read_bytes
        written_bytes = now.written_bytes - before.written_bytes
        self.measured.end(plan_id, perf_counter() - begun, read_bytes, written_bytes)

    def moved(self, base_bytes: int) -> Moved:
        """Return totals so far, of a process that has ``base_bytes`` beside arrays and programs."""
        stats = self.tier.stats
        return Moved(
            self.measured.read_bytes,
            self.measured.made_bytes,
            stats.read_bytes,
            stats.written_bytes,
            base_bytes + stats.peak_bytes,
            self.heap.process_bytes(),
        )

    def look(self, threads: int, base_bytes: int) -> ProcessLook:
        """Tell how this process stands."""
        stats, board = self.tier.stats, self.board
        busy, idle = machine_seconds()
        return ProcessLook(
            name=f"{socket.gethostname()}, process {os.getpid()}",
            threads=threads,
            processor_seconds=process_time(),
            process_bytes=anonymous_bytes(),
            base_bytes=base_bytes,
            reserved_bytes=stats.reserved_bytes,
            tier_bytes=stats.resident_bytes,
            spilled_bytes=self.tier.spill.live_bytes,
            read_bytes=stats.read_bytes,
            written_bytes=stats.written_bytes,
            busy_seconds=busy,
            idle_seconds=idle,
            phases=board.now(),
            last_pass=board.last_pass,
        )


def open_tier(machine: Machine, room_bytes: int, spill: Path, kept_bytes: int = 0) -> tuple[Heap, Tier]:
    """Make the heap of a run and its RAM tier, where chunks that arrive in this process stay from now on."""
    keep_freed_memory()
    heap = Heap(machine.programs, room_bytes, lambda: tier, machine.guard(), kept_bytes)
    tier = Tier(
        room_bytes,
        SpillStore(spill),
        before_mapping=heap.before_mapping,
        withheld_bytes=heap.withheld_bytes,
        check_alone=heap.check_alone,
        kept_bytes=kept_bytes,
        programs=machine.programs,
    )
    use(tier)
    return heap, tier


_contexts: dict[str, Context] = {}


def register(run_id: str, context: Context) -> None:
    """Make a run known to this process."""
    _contexts[run_id] = context


def forget(run_id: str) -> None:
    """Undo ``register``. With the last run of an engine goes what it compiled: a process may do many."""
    context = _contexts.pop(run_id, None)
    if context is not None and all(one.engine is not context.engine for one in _contexts.values()):
        context.engine.forget()


def start_recording(run_id: str) -> None:
    """Begin to record what tasks, spill and tier of a run in this process do."""
    context = _contexts[run_id]
    context.recorder = recorder = Recorder()
    context.tier.watch(partial(recorder.transfer, "spill"), recorder.counted)


def stop_recording(run_id: str) -> Recording:
    """Return what has been recorded since ``start_recording``; nothing more is."""
    context = _contexts[run_id]
    recorder, context.recorder = context.recorder, None
    context.tier.watch(None, None)
    assert recorder is not None, "start_recording comes first"
    return recorder.recording()


def run_unit(run_id: str, plan_id: str, number: int, info: PassInfo, *chunks: Chunk) -> Any:
    """The function of a unit's Dask task; returns its chunk, or several as a tuple."""
    context = _contexts[run_id]
    call = context.task_graphs[plan_id].calls[number]
    assert isinstance(call, UnitCall)
    device = context.engine.device
    there = held_on_device(chunks) if device else {}
    needed = acquired(call, chunks, there)
    context.tier.advance(call.position)
    program = context.engine.compile(call.unit.program)
    phases = context.board.phases
    phases[number] = Phase.READING
    begun = perf_counter()
    with context.tier.reserve(needed.array_bytes, needed.pins, needed.scratch_bytes) as held:
        reserved = perf_counter()
        origins = Origins(held, chunks, partial(_source, context, held, plan_id, info))
        if device is None:
            begin = _on_host(origins, program, call)
        else:
            begin = gather_on_device(origins, device, call, there)
        results = [
            held.empty(region_shape(region), dtype, order)
            for (_, region), dtype, order in zip(
                call.unit.makes, call.dtypes, call.unit.program.output_orders, strict=True
            )
        ]
        gathered = perf_counter()
        phases[number] = Phase.COMPUTING
        with context.heap.program(call.scratch_bytes):
            computing = perf_counter()
            try:
                devices = begin(results)
            except (IndexOutside, ZeroDivisor) as error:
                factored = context.sources[plan_id].factored
                raise number_error(error, call, factored, info.indices) from error
        computed = perf_counter()
        phases[number] = Phase.WRITING
        read, made_bytes = read_bytes(call), sum(r.nbytes for r in results)
        del begin
        add_partial_sums(held, device, call, results, devices, chunks)
        _deliver(context, plan_id, call, call.unit.makes, results, devices, info)
        shapes = [context.sources[plan_id].factored.shapes[name] for name, _ in call.unit.makes]
        outers = [*map(_cut_axis, call.unit.makes, shapes)]
        made = _put(held, call.unit.makes, results, call.uses, outers, devices)
    done, waited = perf_counter(), reserved - begun + computing - gathered
    spent = Spent(1, waited, gathered - reserved, done - computing, read, made_bytes)
    context.measured.add(call.key.layer, spent)
    times = (begun, reserved, gathered, computing, computed, done)
    context.board.done(number, times)
    if (recorder := context.recorder) is not None:
        facts = _facts(call, plan_id, info) | {"read_bytes": read, "made_bytes": made_bytes}
        recorder.task("unit", call.key.layer, UNIT_PHASES, times, facts)
    return made[0] if len(made) == 1 else made


def run_combine(run_id: str, plan_id: str, number: int, info: PassInfo, *chunks: Chunk) -> Any:
    """The function of a combining task."""
    context = _contexts[run_id]
    call = context.task_graphs[plan_id].calls[number]
    assert isinstance(call, CombineCall)
    context.tier.advance(call.position)
    context.board.phases[number] = Phase.READING
    begun = perf_counter()
    with context.tier.reserve(acquired(call, chunks).array_bytes) as held:
        reserved = perf_counter()
        makes = tuple((name, call.region) for name in call.values)
        total, devices = combined(held, context.engine.device, call, chunks)
        _deliver(context, plan_id, call, makes, total, devices, info)
        summed = perf_counter()
        made = _put(held, makes, total, call.uses, [0] * len(makes), devices)
    done = perf_counter()
    context.measured.add(call.key.layer, Spent(0, reserved - begun, 0.0, done - reserved))
    context.board.done(number, (begun, reserved, reserved, reserved, summed, done))
    if (recorder := context.recorder) is not None:
        times, facts = (begun, reserved, summed, done), _facts(call, plan_id, info)
        recorder.task("combine", f"{call.key.layer}: combine", COMBINE_PHASES, times, facts)
    return made[0] if len(made) == 1 else made


def _deliver(
    context: Context,
    plan_id: str,
    call: UnitCall | CombineCall,
    makes: Sequence[tuple[str, Region]],
    results: Sequence[Array],
    devices: Devices,
    info: PassInfo,
) -> None:
    """Hand on those results of a call that somebody wants."""
    watched = context.watched.get(plan_id)
    if context.deliver is None or not watched:
        return
    for (name, region), array, there in zip(makes, results, devices, strict=True):
        if result_key(call.key, name, len(makes)) in watched:
            if there is not None:
                there.settle()
            context.deliver(plan_id, name, region, array, info)


def _facts(call: UnitCall | CombineCall, plan_id: str, info: PassInfo) -> dict[str, int | str]:
    """Return what a trace tells of a task beside its times."""
    return {
        "layer": call.key.layer,
        "shard": call.key.number,
        "task": call.key.kind,
        "values": ", ".join(call.values),
        "plan": plan_id,
        "pass": info.number,
    }


def run_strip(run_id: str, region: Region, chunk: Chunk) -> Chunk:
    """Part of a chunk, for a unit on another worker."""
    context, shape = _contexts[run_id], region_shape(region)
    begun = perf_counter()
    with context.tier.reserve(footprint(prod(shape) * chunk.dtype.itemsize)) as held:
        reserved = perf_counter()
        out = held.empty(shape, chunk.dtype, chunk.order)
        chunk.read(region, out)
        made = held.put(out, region)
    if (recorder := context.recorder) is not None:
        times, facts = (begun, reserved, perf_counter()), {"region": str(region), "bytes": out.nbytes}
        recorder.task("strip", "strip for another worker", STRIP_PHASES, times, facts)
    return made


def _lent(origins: Origins, read: Read) -> Array | None:
    """An input that is written over, where it lies in RAM: with a room beside it, it need not be copied."""
    if not (read.overwritten and read.parts.is_one):
        return None
    piece = origins.chunks[read.first]
    return origins.held.lend(piece) if piece.region == read.region else None


def _on_host(origins: Origins, program: Compiled, call: UnitCall) -> Begin:
    """Gather a unit's inputs; the function that is returned runs its program on them."""
    arrays, rooms = [], {}
    for index, read in enumerate(call.reads):
        lent = _lent(origins, read)
        if lent is not None:
            rooms[index] = origins.held.empty(lent.shape, lent.dtype, read.order)
        arrays.append(_gathered(origins, read) if lent is None else lent)

    def begin(results: Sequence[Array]) -> Devices:
        program(arrays, results, rooms)
        return [None] * len(results)

    return begin


def _source(context: Context, held: Reservation, plan_id: str, info: PassInfo, read: Read) -> Array:
    """An input that is read from no chunk."""
    out = held.empty(region_shape(read.region), read.dtype, read.order)
    begun, sources = perf_counter(), context.sources[plan_id]
    sources.read(read.value, read.region, info, out)
    if (recorder := context.recorder) is not None and read.value in sources.feeds:
        recorder.transfer("dataset", f"dataset: {read.value}", begun, out.nbytes)
    return out


def _gathered(origins: Origins, read: Read) -> Array:
    """One input of a program as one array."""
    pinned = in_place(read, origins.chunks)
    if pinned is not None:
        return pinned.array()
    if not read.parts:
        return origins.source(read)
    out = origins.held.empty(region_shape(read.region), read.dtype, read.order)
    for number, part in read.chunks:
        if not is_empty(part):
            origins.chunks[number].read(part, out[within(part, read.region)])
    return out


def _put(
    held: Reservation,
    makes: Sequence[tuple[str, Region]],
    results: list[Array],
    uses: Sequence[tuple[int, ...]],
    outers: Iterable[int],
    devices: Devices,
) -> tuple[Chunk, ...]:
    return tuple(
        held.put(array, region, used, outer, device)
        for (_, region), array, used, outer, device in zip(makes, results, uses, outers, devices, strict=True)
    )


def _cut_axis(make: tuple[str, Region], shape: Shape) -> int:
    """The axis that a value is cut along: others will read strips of it."""
    spans = zip(make[1], shape, strict=True)
    return next((axis for axis, (span, extent) in enumerate(spans) if span != (0, extent)), 0)


def pick(made: Sequence[Chunk], number: int) -> Chunk:
    """The function of a picking task."""
    return made[number]


def pass_tasks(graph: TaskGraph, run_id: Any, plan_id: str, info: PassInfo) -> dict[Any, Any]:
    """The Dask tasks of one step, in plan order; ``graph.inputs`` are keys that the caller adds."""
    return {
        call.key: call_task(call, run_id, plan_id, number, info) for number, call in enumerate(graph.calls)
    }


def call_task(
    call: Call, run_id: Any, plan_id: str, number: int, info: PassInfo, *around: Callable[..., Any]
) -> Task:
    """The task of a call, by its ``number`` in the pass; units and sums are run by ``around``, if given."""
    if isinstance(call, PickCall):
        return Task(call.key, pick, TaskRef(call.source), call.number)
    function = run_unit if isinstance(call, UnitCall) else run_combine
    references = [TaskRef(argument) for argument in call.arguments]
    return Task(call.key, *around, function, run_id, plan_id, number, info, *references)
