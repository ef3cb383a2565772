"""A step before it runs: the same tasks, tier and disk, with predicted seconds instead of arithmetic.

Units are started by the scheduler's own order (``planning/window_order.py``), acquire what they acquire
in a run (``planning/calls.py``), and are let in and chunks evicted by the very books that the RAM tier keeps
(``storage/cache/ledger.py``). Only the clock, the disk and the compute slots are the simulator's own.
What comes out: seconds, bytes from and to the disk, and memory over time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from oocdl.graph.ir.array_layout import footprint
from oocdl.graph.ir.index import Region
from oocdl.graph.ir.op_rule import Rules
from oocdl.planning.calls import (
    Call,
    CombineCall,
    PickCall,
    UnitCall,
    acquired,
    copied_bytes,
    made_of,
    parts_of,
)
from oocdl.planning.cost_model import TASK_SECONDS, Rates, program_seconds
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.timeline import Moment, Ran, Simulated
from oocdl.planning.window_order import WindowOrder
from oocdl.storage.cache.ledger import Claim, Ledger

SLOWDOWN_FACTOR = 1.2
"""Programs take so much longer in a run than alone, where nobody else copies and moves bytes: measured
for networks that fit (1.08 to 1.26) and for such that do not (1.2 to 1.4)."""
DISK_SHARE = 0.5
"""Of its speed alone, what the disk reaches beside programs that keep all cores busy."""
REQUEST_SECONDS = 1.2e-3
"""Of a chunk, or part of one, that is read or written, beside its bytes: whoever waits for the disk
waits for a core again."""


@dataclass(eq=False, slots=True)
class _Chunk:
    """A chunk without its bytes: an ``eviction.Entry`` that calls have as an argument."""

    region: Region
    nbytes: int
    uses: tuple[int, ...]
    spilled: bool = False
    footprint_bytes: int = field(init=False)
    pins: int = 0
    readers: int = 0
    busy: bool = False
    dropped: bool = False

    def __post_init__(self) -> None:
        self.footprint_bytes = footprint(self.nbytes)

    def leave_ram(self) -> None:
        """There are no bytes to let go of."""


@dataclass(eq=False, kw_only=True)
class _Unit(Claim[_Chunk]):
    """A call under way, and what it holds."""

    call: UnitCall | CombineCall
    number: int
    """Of the task."""
    arguments: Sequence[_Chunk]
    worker: int
    begun: float
    computing: float = 0.0


class _Tasks:
    """The tasks of a graph by number, as the scheduler has them: one for each input, too."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.calls: list[Call | None] = [*(None for _ in graph.inputs), *graph.calls]
        keys = [*graph.inputs, *(call.key for call in graph.calls)]
        self.number = number = {key: place for place, key in enumerate(keys)}
        self.results: list[Sequence[int]] = [(place,) for place in range(len(keys))]
        """The tasks whose chunks are what a call makes: itself, or those that pick one of several."""
        picks: dict[int, list[int]] = {}
        self.arguments: list[tuple[int, ...]] = []
        """Tasks whose results a task takes; an input takes none."""
        for place, call in enumerate(self.calls):
            if isinstance(call, PickCall):
                picks.setdefault(number[call.source], []).append(place)
                self.arguments.append((number[call.source],))
            else:
                self.arguments.append(() if call is None else tuple([number[key] for key in call.arguments]))
        for source, places in picks.items():
            self.results[source] = sorted(places, key=self._picked)
        self.sources = [tuple(dict.fromkeys(arguments)) for arguments in self.arguments]

    def _picked(self, place: int) -> int:
        call = self.calls[place]
        assert isinstance(call, PickCall)
        return call.number


class _Step:
    """One step of one graph; ``held`` are the chunks of weights and state that it starts from."""

    def __init__(self, machine: _Machine, tasks: _Tasks, held: Sequence[_Chunk], keeps_old: bool) -> None:
        self.m, self.tasks = machine, tasks
        graph, number = tasks.graph, tasks.number
        self.chunks: list[Any] = [*held, *(None for _ in graph.calls)]
        """By task its ``_Chunk``, or None where there is none (yet, or any more)."""
        kept = {key for key in graph.inputs if keeps_old or key not in graph.replaced} | set(graph.outputs)
        self.order = WindowOrder(tasks.sources, [number[key] for key in kept])
        self.idle = list(range(machine.workers))
        self.slot_line: deque[_Unit] = deque()

    # --- scheduling ----------------------------------------------------------------------

    def start(self) -> None:
        """Give idle workers what may start."""
        while self.idle and (number := self.order.next()) is not None:
            call = self.tasks.calls[number]
            if call is None or isinstance(call, PickCall):
                self._finish(number)
                continue
            self.m.books.advance(call.position)
            chunks = [self.chunks[argument] for argument in self.tasks.arguments[number]]
            needed = acquired(call, chunks)
            worker = self.idle.pop()
            self.m.books.line.append(
                _Unit(
                    needed.pins, needed.array_bytes, needed.scratch_bytes,
                    call=call, number=number, arguments=chunks, worker=worker, begun=self.m.now,
                )
            )  # fmt: skip
        self.acquire()

    def acquire(self) -> None:
        """The first in line takes its memory, if it is there."""
        books = self.m.books
        while books.line:
            unit = books.line[0]
            assert isinstance(unit, _Unit)
            absent = books.admit(unit)
            if absent is None:
                return
            self.m.note()
            self._read(unit, absent)

    def _read(self, unit: _Unit, absent: Sequence[_Chunk]) -> None:
        books, loads = self.m.books, 0
        for chunk in absent:
            loads += chunk.nbytes
            books.loaded(chunk)
        if all(map(books.is_resident, unit.arguments)):
            more, requests, copied = 0, 0, copied_bytes(unit.call, unit.arguments, unit.pins)
        else:
            more, requests, copied = self._read_parts(unit)
        wait = 2 * copied / self.m.rates.copy_bytes_per_second
        self.m.at(self.m.disk(loads + more, 0, len(absent) + requests) + wait, lambda: self._compute(unit))

    def _read_parts(self, unit: _Unit) -> tuple[int, int, int]:
        """Read what is not pinned part by part: bytes and requests of the disk, and bytes that are copied."""
        books, loads, requests, copied = self.m.books, 0, 0, 0
        for number, nbytes in parts_of(unit.call):
            chunk = unit.arguments[number]
            if chunk in unit.pins:
                continue
            if books.is_resident(chunk):
                copied += nbytes
            elif books.promote(chunk):
                books.loaded(chunk)
                loads += chunk.nbytes
                requests += 1
                copied += nbytes
            else:
                loads += nbytes
                requests += 1
        return loads, requests, copied

    def _compute(self, unit: _Unit) -> None:
        if self.m.slots == 0:
            self.slot_line.append(unit)
            return
        self.m.slots -= 1
        unit.computing = self.m.now
        self.m.work += unit.scratch_bytes
        self.m.note()
        seconds = self.m.seconds(unit.call)
        self.m.compute_seconds += seconds
        self.m.at(self.m.now + seconds, lambda: self._computed(unit))

    def _computed(self, unit: _Unit) -> None:
        self.m.slots += 1
        self.m.work -= unit.scratch_bytes
        if self.slot_line:
            self._compute(self.slot_line.popleft())
        books, call = self.m.books, unit.call
        for place, made in zip(self.tasks.results[unit.number], made_of(call), strict=True):
            chunk = self.chunks[place] = _Chunk(made.region, made.nbytes, made.uses)
            books.put(unit, chunk)
        books.release(unit)
        self.m.note()
        self.m.ran(unit)
        self.idle.append(unit.worker)
        self._finish(unit.number)
        self.start()

    def _finish(self, number: int) -> None:
        for useless in self.order.finish(number):
            chunk, self.chunks[useless] = self.chunks[useless], None
            if chunk is not None:  # several results of a unit are chunks of the tasks that pick them
                self.m.drop(chunk)


class _Machine:
    """The clock, the disk, the books and the compute slots."""

    def __init__(
        self, tier_bytes: int, slots: int, workers: int, rates: Rates, rules: Rules, timeline: bool
    ) -> None:
        self.books: Ledger[_Chunk] = Ledger(tier_bytes, self.write)
        self.slots, self.workers = slots, workers
        self.rates, self.rules, self.timeline = rates, rules, timeline
        self.begun = self.now = self.free_at = self.compute_seconds = 0.0
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
        self.step = None  # else there would be circles, which live until the collector comes
        assert step.order.over, "the simulated step stands still"

    def disk(self, read: int, written: int, requests: int) -> float:
        """When the disk will have moved so much: one request after another."""
        if read or written:
            rates = self.rates
            seconds = read / rates.disk_read_bytes_per_second + written / rates.disk_write_bytes_per_second
            self.free_at = max(self.free_at, self.now) + seconds / DISK_SHARE + requests * REQUEST_SECONDS
            self.books.read_bytes += read
            return self.free_at
        return self.now

    def write(self, chunk: _Chunk) -> None:
        """Write a chunk to the spill; then it leaves."""
        self.at(self.disk(0, chunk.nbytes, 1), lambda: self._written(chunk))

    def _written(self, chunk: _Chunk) -> None:
        chunk.spilled = True
        self.spilled += chunk.nbytes
        self.peak_spilled = max(self.peak_spilled, self.spilled)
        self.books.written(chunk)
        if chunk.dropped:
            self.drop(chunk)
        assert self.step is not None
        self.step.acquire()

    def drop(self, chunk: _Chunk) -> None:
        """Nothing reads a chunk any more."""
        if self.books.drop(chunk) and chunk.spilled:
            self.spilled -= chunk.nbytes

    def seconds(self, call: UnitCall | CombineCall) -> float:
        """Of one unit on one thread."""
        if isinstance(call, CombineCall):
            moved = 3 * len(call.counts) * sum(made.nbytes for made in made_of(call))
            return TASK_SECONDS + moved / self.rates.copy_bytes_per_second
        key = call.unit.program.key
        if key not in self._known:
            self._known[key] = program_seconds(call.unit.program, self.rules, self.rates)
        return TASK_SECONDS + SLOWDOWN_FACTOR * self._known[key]

    def reset(self) -> None:
        """Begin to count anew."""
        books, self.begun = self.books, self.now
        books.read_bytes = books.written_bytes = 0
        books.peak_bytes = books.resident_bytes + books.reserved_bytes
        self.moments, self.units, self.compute_seconds = [], [], 0.0
        self.peak_spilled, self.peak_scratch = self.spilled, 0

    def note(self) -> None:
        """Write down how much memory is in use."""
        self.peak_scratch = max(self.peak_scratch, self.work)
        if self.timeline:
            books, seconds = self.books, self.now - self.begun
            self.moments.append(Moment(seconds, books.resident_bytes, books.reserved_bytes, self.work))

    def ran(self, unit: _Unit) -> None:
        """Write down when a unit ran that is done now."""
        if self.timeline:
            begun, call = self.begun, unit.call
            times = unit.begun - begun, unit.computing - begun, self.now - begun
            self.units.append(Ran(call.position, call.key, unit.worker, *times))


def simulate(
    graph: TaskGraph,
    tier_bytes: int,
    slots: int,
    workers: int,
    rates: Rates,
    rules: Rules,
    keeps_old: bool = True,
    timeline: bool = True,
) -> Simulated:
    """One step after another has been: weights and state are where that left them.

    ``slots``: programs that run at once; ``workers``: units that are under way. ``keeps_old``: weights and
    state of before the step are there until its end. ``timeline``: whether each unit and moment is told.
    """
    machine = _Machine(tier_bytes, slots, workers, rates, rules, timeline)
    tasks = _Tasks(graph)
    regions = {key: region for pieces in graph.pieces.values() for region, key in pieces}
    held = [
        _Chunk(regions[key], graph.input_bytes[key], graph.input_uses.get(key, ()), spilled=True)
        for key in graph.inputs
    ]
    machine.spilled = sum(chunk.nbytes for chunk in held)
    held = _after(machine, _Step(machine, tasks, held, keeps_old))
    machine.reset()
    machine.run(_Step(machine, tasks, held, keeps_old))
    books = machine.books
    del machine.books  # which write by the machine: this, too, would be a circle
    return Simulated(
        machine.now - machine.begun,
        books.read_bytes,
        books.written_bytes,
        books.peak_bytes,
        machine.peak_scratch,
        machine.peak_spilled,
        machine.compute_seconds,
        tuple(machine.moments),
        tuple(machine.units),
    )


def _after(machine: _Machine, step: _Step) -> list[_Chunk]:
    """Run a step; returns what the next one starts from. The rest is dropped."""
    machine.run(step)
    graph, number = step.tasks.graph, step.tasks.number
    after = [step.chunks[number[graph.replaced.get(key, key)]] for key in graph.inputs]
    kept = set(after)
    for chunk in step.chunks:
        if chunk is not None and chunk not in kept:
            machine.drop(chunk)
    uses = (graph.input_uses.get(key, ()) for key in graph.inputs)
    machine.books.renew(zip(after, uses, strict=True))
    return after
