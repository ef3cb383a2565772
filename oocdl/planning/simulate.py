"""A step before it runs: the same tasks, tier and disk, with predicted seconds instead of arithmetic.

Units are started in plan order by as many workers as there will be, wait for memory, for the
disk and for a slot as they will, and chunks are evicted by the very books that the RAM tier keeps
(``storage/ledger.py``). What comes out: seconds, bytes from and to the disk, and memory over time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from oocdl.graph.ir.array_layout import footprint, itemsize
from oocdl.graph.ir.index import region_size
from oocdl.graph.ir.op_rule import Rules
from oocdl.planning.calls import made_of, parts_of
from oocdl.planning.cost_model import Rates, program_seconds
from oocdl.planning.task_graph import Call, CombineCall, Key, PickCall, TaskGraph, UnitCall
from oocdl.planning.timeline import Moment, Ran, Simulated
from oocdl.storage.cache.ledger import Ledger

TASK_SECONDS = 3e-4
"""Of Python and Dask, for each task."""
BESIDE = 1.2
"""Programs take so much longer in a run than alone, where nobody else copies and moves bytes: measured
for networks that fit (1.08 to 1.26) and for such that do not (1.2 to 1.4)."""
DISK_SHARE = 0.5
"""Of its speed alone, what the disk reaches beside programs that keep all cores busy."""
REQUEST_SECONDS = 1.2e-3
"""Of a chunk, or part of one, that is read or written, beside its bytes: whoever waits for the disk
waits for a core again."""
WINDOW = 64
"""How many tasks beyond the oldest unfinished one may start, as ``schedule.get`` has it."""


class _Slot:
    """What the books know of a chunk; see ``storage.chunk.Slot``."""

    def __init__(self, nbytes: int, uses: tuple[int, ...]) -> None:
        self.nbytes, self.room, self.uses = nbytes, footprint(nbytes), uses
        self.array = self.file = None
        self.pins = self.readers = 0
        self.busy = self.dropped = False


@dataclass(eq=False)
class _Unit:
    """A call under way."""

    call: UnitCall | CombineCall
    worker: int
    begun: float
    needed: int = 0
    pins: list[Any] = field(default_factory=list)
    reserved: int = 0
    computing: float = 0.0


class _Step:
    """One step of one graph; ``held`` are the chunks of weights and state that it starts from."""

    def __init__(self, machine: _Machine, graph: TaskGraph, held: Mapping[Key, Any], keeps_old: bool) -> None:
        self.m, self.graph = machine, graph
        self.calls: list[Call] = list(graph.calls)
        self.number = {call.key: n for n, call in enumerate(self.calls)}
        self.chunks: dict[Key, Any] = dict(held)
        self.consumers: dict[Key, int] = {}
        self.waiting: list[int] = []
        self.dependents: list[list[int]] = [[] for _ in self.calls]
        self.kept = {key for key in graph.inputs if keeps_old or key not in graph.replaced}
        self.kept |= set(graph.outputs)
        self._wire()
        self.ready = [n for n, left in enumerate(self.waiting) if left == 0]
        heapq.heapify(self.ready)
        self.done = [False] * len(self.calls)
        self.oldest = self.finished = 0
        self.idle = list(range(machine.workers))
        self.line: deque[_Unit] = deque()
        self.slot_line: deque[_Unit] = deque()

    def _wire(self) -> None:
        for number, call in enumerate(self.calls):
            arguments = (call.source,) if isinstance(call, PickCall) else call.arguments
            sources = {self.number[key] for key in arguments if key in self.number}
            self.waiting.append(len(sources))
            for source in sources:
                self.dependents[source].append(number)
            if not isinstance(call, PickCall):
                for key in dict.fromkeys(arguments):
                    self.consumers[key] = self.consumers.get(key, 0) + 1

    # --- scheduling ----------------------------------------------------------------------

    def start(self) -> None:
        """Give idle workers what may start."""
        while self.idle and self.ready:
            if self.ready[0] >= self.oldest + WINDOW and len(self.idle) < self.m.workers:
                break
            number = heapq.heappop(self.ready)
            call = self.calls[number]
            if isinstance(call, PickCall):
                self._finish(number)
                continue
            self.m.books.position = call.position
            unit = _Unit(call, self.idle.pop(), self.m.now)
            exact = _exact(call, self.chunks)
            unit.pins = list({id(slot): slot for slot in exact}.values())
            work = call.scratch_bytes if isinstance(call, UnitCall) else 0
            unit.needed = max(call.buffer_bytes - sum(slot.room for slot in unit.pins), 0) + work
            self.line.append(unit)
        self.acquire()

    def acquire(self) -> None:
        """The first in line takes its memory, if it is there."""
        books = self.m.books
        while self.line:
            unit = self.line[0]
            for slot in unit.pins:
                slot.pins += 1
            absent = books.absent(unit.pins)
            need = unit.needed + sum(slot.room for slot in absent)
            for slot in books.make_room(need):
                self.m.write(slot)
            for slot in unit.pins:
                slot.pins -= 1
                books.offer(slot)
            if need > books.free:
                return
            self.line.popleft()
            for slot in unit.pins:
                slot.pins += 1
            books.count(reserved=unit.needed)
            unit.reserved = unit.needed
            self.m.note()
            self._read(unit, absent)

    def _read(self, unit: _Unit, absent: Sequence[Any]) -> None:
        call, loads, requests = unit.call, 0, len(absent)
        for slot in absent:
            loads += slot.nbytes
            self.m.books.enter(slot)
        copied = 0
        for key, nbytes in parts_of(call):
            slot = self.chunks[key]
            if slot in unit.pins:
                continue
            if slot in self.m.books.slots:
                copied += nbytes
            elif not self.line and self.m.books.promote(slot):
                slot.busy = False
                self.m.books.offer(slot)
                loads += slot.nbytes
                requests += 1
                copied += nbytes
            else:
                loads += nbytes
                requests += 1
        wait = 2 * copied / self.m.rates.copy_bytes_per_second
        self.m.at(self.m.disk(loads, 0, requests) + wait, lambda: self._compute(unit))

    def _compute(self, unit: _Unit) -> None:
        if self.m.slots == 0:
            self.slot_line.append(unit)
            return
        self.m.slots -= 1
        unit.computing = self.m.now
        work = unit.call.scratch_bytes if isinstance(unit.call, UnitCall) else 0
        self.m.work += work
        self.m.note()
        seconds = self.m.seconds(unit.call)
        self.m.compute_seconds += seconds
        self.m.at(self.m.now + seconds, lambda: self._computed(unit, work))

    def _computed(self, unit: _Unit, work: int) -> None:
        self.m.slots += 1
        self.m.work -= work
        if self.slot_line:
            self._compute(self.slot_line.popleft())
        books, call = self.m.books, unit.call
        for key, nbytes, uses in made_of(call):
            slot = self.chunks[key] = _Slot(nbytes, uses)
            slot.array = slot  # type: ignore[assignment]
            books.enter(slot, from_reserved=slot.room <= unit.reserved, overflow=True)  # type: ignore[arg-type]
            unit.reserved = max(unit.reserved - slot.room, 0)
        for slot in unit.pins:
            slot.pins -= 1
            books.offer(slot)
        books.count(reserved=-unit.reserved)
        self.m.note()
        self.m.units.append(
            Ran(call.position, call.key[0], unit.worker, unit.begun, unit.computing, self.m.now)
        )
        self.idle.append(unit.worker)
        self._finish(self.number[call.key])
        self.start()

    def _finish(self, number: int) -> None:
        call = self.calls[number]
        self.done[number] = True
        self.finished += 1
        while self.oldest < len(self.done) and self.done[self.oldest]:
            self.oldest += 1
        for other in self.dependents[number]:
            self.waiting[other] -= 1
            if self.waiting[other] == 0:
                heapq.heappush(self.ready, other)
        if isinstance(call, PickCall):
            return
        for key in dict.fromkeys(call.arguments):
            self.consumers[key] -= 1
            if self.consumers[key] == 0 and key not in self.kept:
                self.m.drop(self.chunks.pop(key))
        for key, _, _ in made_of(call):
            if key not in self.consumers and key not in self.kept:
                self.m.drop(self.chunks.pop(key))


class _Machine:
    """The clock, the disk, the books and the compute slots."""

    def __init__(self, tier_bytes: int, slots: int, workers: int, rates: Rates, rules: Rules) -> None:
        self.books, self.slots, self.workers = Ledger(tier_bytes), slots, workers
        self.rates, self.rules = rates, rules
        self.now = self.free_at = self.compute_seconds = 0.0
        self.work = self.spilled = self.peak_spilled = self.peak_scratch = 0
        self.moments: list[Moment] = []
        self.units: list[Ran] = []
        self.step: _Step | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._known: dict[str, float] = {}

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have ``call`` made at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def run(self, step: _Step) -> None:
        """Until nothing more happens."""
        self.step = step
        step.start()
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
        assert step.finished == len(step.calls), "the simulated step stands still"

    def disk(self, read: int, written: int, requests: int) -> float:
        """When the disk will have moved so much: one request after another."""
        if read or written:
            rates = self.rates
            seconds = read / rates.disk_read_bytes_per_second + written / rates.disk_write_bytes_per_second
            self.free_at = max(self.free_at, self.now) + seconds / DISK_SHARE + requests * REQUEST_SECONDS
            self.books.read_bytes += read
            return self.free_at
        return self.now

    def write(self, slot: Any) -> None:
        """Write a chunk to the spill; then it leaves."""
        self.at(self.disk(0, slot.nbytes, 1), lambda: self._written(slot))

    def _written(self, slot: Any) -> None:
        books = self.books
        books.leaving -= slot.room
        books.written_bytes += slot.nbytes
        slot.busy, slot.file = False, slot
        self.spilled += slot.nbytes
        self.peak_spilled = max(self.peak_spilled, self.spilled)
        assert self.step is not None
        if slot.dropped:
            self.drop(slot)
        elif not slot.pins and slot in books.slots and self.step.line:
            books.evict(slot)
        else:
            books.offer(slot)
        self.step.acquire()

    def drop(self, slot: Any) -> None:
        """Nothing reads a chunk any more."""
        slot.dropped = True
        if not slot.busy:
            if slot.file is not None:
                self.spilled -= slot.nbytes
            self.books.leave(slot)

    def seconds(self, call: UnitCall | CombineCall) -> float:
        """Of one unit on one thread."""
        if isinstance(call, CombineCall):
            moved = 3 * len(call.counts) * sum(nbytes for _, nbytes, _ in made_of(call))
            return TASK_SECONDS + moved / self.rates.copy_bytes_per_second
        key = call.unit.program.key
        if key not in self._known:
            self._known[key] = program_seconds(call.unit.program, self.rules, self.rates)
        return TASK_SECONDS + BESIDE * self._known[key]

    def reset(self) -> None:
        """Begin to count anew."""
        books = self.books
        books.position, books.read_bytes, books.written_bytes = -1, 0, 0
        books.peak = books.resident + books.reserved
        self.moments, self.units, self.compute_seconds = [], [], 0.0
        self.peak_spilled, self.peak_scratch = self.spilled, 0

    def note(self) -> None:
        """Write down how much memory is in use."""
        self.peak_scratch = max(self.peak_scratch, self.work)
        self.moments.append(Moment(self.now, self.books.resident, self.books.reserved, self.work))


def simulate(
    graph: TaskGraph,
    tier_bytes: int,
    slots: int,
    workers: int,
    rates: Rates,
    rules: Rules,
    keeps_old: bool = True,
) -> Simulated:
    """One step after another has been: weights and state are where that left them.

    ``slots``: programs that run at once; ``workers``: units that are under way. ``keeps_old``: weights and
    state of before the step are there until its end.
    """
    machine = _Machine(tier_bytes, slots, workers, rates, rules)
    held: dict[Key, Any] = {}
    for key in graph.inputs:
        slot = held[key] = _Slot(graph.input_bytes[key], graph.input_uses.get(key, ()))
        slot.file = slot  # type: ignore[assignment]
        machine.spilled += slot.nbytes
    first = _Step(machine, graph, held, keeps_old)
    machine.run(first)
    after = _next(machine, first)
    begun = machine.now
    machine.reset()
    machine.run(_Step(machine, graph, after, keeps_old))
    books = machine.books
    return Simulated(
        machine.now - begun,
        books.read_bytes,
        books.written_bytes,
        books.peak,
        machine.peak_scratch,
        machine.peak_spilled,
        machine.compute_seconds,
        tuple(replace(moment, seconds=moment.seconds - begun) for moment in machine.moments),
        tuple(
            replace(ran, begun=ran.begun - begun, computing=ran.computing - begun, done=ran.done - begun)
            for ran in machine.units
        ),
    )


def _next(machine: _Machine, step: _Step) -> dict[Key, Any]:
    """What the next step starts from; the rest is dropped."""
    graph, made = step.graph, step.chunks
    after = {key: made[graph.replaced.get(key, key)] for key in graph.inputs}
    for key, slot in after.items():
        slot.uses = graph.input_uses.get(key, ())
        machine.books.offer(slot)
    kept = {id(slot) for slot in after.values()}
    for slot in made.values():
        if id(slot) not in kept:
            machine.drop(slot)
    return after


def _exact(call: UnitCall | CombineCall, chunks: Mapping[Key, Any]) -> list[Any]:
    """Chunks that are used in place."""
    if isinstance(call, CombineCall):
        return []
    found = []
    for read in call.reads:
        if len(read.chunks) == 1 and not read.own:
            number, part = read.chunks[0]
            slot = chunks[call.arguments[number]]
            if part == read.region and slot.nbytes == region_size(part) * itemsize(read.dtype):
                found.append(slot)
    return found
