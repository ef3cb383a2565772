"""One process of a simulated step: its tasks, memory tier, disk and permits, on a clock that several share.

Units are started by the scheduler's own order (``planning/window_order``), acquire what they acquire
in a run (``planning/calls``), and are let in and chunks evicted by the very books that the RAM tier keeps
(``storage/cache/ledger``). Only the clock, the disk and the compute slots are the simulator's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.planning.calls import (
    CombineCall,
    PickCall,
    UnitCall,
    acquired,
    copied,
    made_of,
    parts_of,
)
from oocdl.planning.cost_model import BEGIN_SECONDS, Costs
from oocdl.planning.hosts.exchange import Bundle
from oocdl.planning.hosts.local_order import Work
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.machine import BATCH_CACHE_BYTES
from oocdl.planning.simulation.network import Clock, Cores
from oocdl.planning.simulation.tasks import Arrival, Chunk, Tasks, Unit
from oocdl.planning.simulation.timeline import Moment, Ran, Transfer
from oocdl.planning.task_key import TaskKey
from oocdl.planning.window_order import WindowOrder, window_of
from oocdl.storage.cache.ledger import Ledger

DISK_SHARE = 0.5
"""Share of its speed alone that the disk reaches beside programs that keep all cores busy."""
REQUEST_SECONDS = 1.2e-3
"""Time for each chunk, or part of one, that is read or written, beside its bytes: whoever waits for the
disk waits for a core again."""

SOURCE_BYTES_PER_SECOND, SAMPLE_SECONDS = 8e8, 5e-5
"""Rate of reading and decoding a dataset, where chunks are not larger than what is read of them; and time
of a core for each sample, whose chunk is looked at before it is read and after. Measured."""


class Step:
    """One step of the tasks of a process.

    ``held``: by key the chunks that it starts from. ``wanted``: keys of what is kept when it is over.
    ``send`` is called with each bundle as soon as all of it is made, ``finished`` with each task.
    """

    def __init__(
        self,
        process: Process,
        tasks: Tasks,
        held: Mapping[TaskKey, Chunk],
        wanted: Iterable[TaskKey],
        send: Callable[[Bundle], None] | None = None,
        finished: Callable[[Work], None] | None = None,
    ) -> None:
        self.process, self.tasks, self.send, self.finished = process, tasks, send, finished
        self.chunks: list[Any] = [None] * len(tasks.calls)
        """Task -> its ``Chunk``; None where there is none (yet, or any more)."""
        for key, chunk in held.items():
            self.chunks[tasks.number[key]] = chunk
        kept = [tasks.number[key] for key in wanted]
        window = window_of(process.workers - 1)
        self.order = WindowOrder(tasks.sources, kept, window, tasks.arriving, tasks.bundles)
        self.ended = process.now
        """Time at which its last task was over."""
        self.idle = list(range(process.workers))
        self.is_listed = False
        """Whether tasks can start."""
        self.slot_line: deque[Unit] = deque()
        self.sources: set[tuple[str, Region]] = set()
        """(value, region) of what has been read of the dataset, and is kept for the pass."""

    # --- scheduling ----------------------------------------------------------------------

    def start(self) -> None:
        """List the tasks, where that takes its time; then start what may."""
        if self.process.cores is None:
            self._listed()
        else:
            self.process.cores.spend(BEGIN_SECONDS * len(self.tasks.calls), self._listed)

    def _listed(self) -> None:
        self.is_listed = True
        self._go_on()

    def _go_on(self) -> None:
        """Give idle workers what may start."""
        if not self.is_listed:
            return
        while self.idle and (number := self.order.next()) is not None:
            call = self.tasks.calls[number]
            if isinstance(call, Strip):
                self._cut(number, call)
                continue
            if call is None or isinstance(call, PickCall):
                self._finish(number)
                continue
            assert not isinstance(call, Bundle)  # which is sent as soon as all of it is there
            self.process.books.advance(call.position)
            chunks = [self.chunks[argument] for argument in self.tasks.arguments[number]]
            needed = acquired(call, chunks)
            worker = self.idle.pop()
            self.process.books.line.append(
                Unit(
                    needed.pins, needed.array_bytes, needed.scratch_bytes,
                    call=call, number=number, arguments=chunks, worker=worker, begun=self.process.now,
                )
            )  # fmt: skip
        self.acquire()

    def acquire(self) -> None:
        """The first in line takes its memory, if it is there."""
        books = self.process.books
        while books.line:
            claim = books.line[0]
            absent = books.admit(claim)
            if absent is None:
                return
            self.process.note()
            if isinstance(claim, Arrival):
                self._arrived(claim)
            else:
                assert isinstance(claim, Unit)
                self._read(claim, absent)

    def _cut(self, number: int, strip: Strip) -> None:
        """Copy a strip from its chunk."""
        chunk = self.chunks[self.tasks.number[strip.source]]
        share = region_size(strip.region) / region_size(chunk.region)
        made = Chunk(strip.region, round(share * chunk.nbytes), chunk.uses)
        self.process.copy(self.process.now, 1, made.nbytes, lambda: self._cut_out(number, made))

    def _cut_out(self, number: int, made: Chunk) -> None:
        self.wait_for_room(number, made)
        self.acquire()

    def wait_for_room(self, number: int, chunk: Chunk) -> None:
        """Take a chunk that was cut, or sent by another process, once there is room."""
        arrival = Arrival(pins=(), left_bytes=chunk.footprint_bytes, number=number, chunk=chunk)
        self.process.books.line.append(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        self.chunks[arrival.number] = arrival.chunk
        self.process.books.put(arrival, arrival.chunk)
        self._finish(arrival.number)
        self.process.clock.at(self.process.now, self._go_on)

    def _read(self, unit: Unit, absent: Sequence[Chunk]) -> None:
        books, loads = self.process.books, 0
        for chunk in absent:
            loads += chunk.nbytes
            books.loaded(chunk)
        parts, nbytes = copied(unit.call, unit.arguments, unit.pins)
        more = requests = 0
        if not all(map(books.is_resident, unit.arguments)):
            more, requests, nbytes = self._read_parts(unit)
        there = self.process.disk(loads + more, 0, len(absent) + requests)
        self.process.copy(there, parts, nbytes, lambda: self._compute(unit), self._source_seconds(unit.call))

    def _source_seconds(self, call: UnitCall | CombineCall) -> float:
        """Seconds of a core for inputs that a call reads of the dataset, or generates."""
        seconds = 0.0
        for read in call.reads if isinstance(call, UnitCall) else ():
            if read.parts:
                continue
            nbytes, samples = region_size(read.region) * itemsize(read.dtype), 0
            axes = self.process.costs.feeds.get(read.value)
            if axes is not None and (read.value, read.region) not in self.sources:
                samples = region_size(read.region[:axes])
                if nbytes <= BATCH_CACHE_BYTES // 2:
                    self.sources.add((read.value, read.region))
            seconds += nbytes / SOURCE_BYTES_PER_SECOND + samples * SAMPLE_SECONDS
        return seconds

    def _read_parts(self, unit: Unit) -> tuple[int, int, int]:
        """Read what is not pinned part by part: bytes and requests of the disk, and bytes that are copied."""
        books, loads, requests, copied = self.process.books, 0, 0, 0
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

    def _compute(self, unit: Unit) -> None:
        if self._takes_slot(unit):
            if self.process.slots == 0:
                self.slot_line.append(unit)
                return
            self.process.slots -= 1
        unit.computing = self.process.now
        self.process.work += unit.scratch_bytes
        self.process.note()
        seconds = self.process.seconds(unit.call)
        self.process.compute_seconds += seconds
        self.process.compute(seconds, lambda: self._computed(unit))

    def _computed(self, unit: Unit) -> None:
        self.process.work -= unit.scratch_bytes
        if self._takes_slot(unit):
            self.process.slots += 1
            if self.slot_line:
                self._compute(self.slot_line.popleft())
        books, call = self.process.books, unit.call
        for place, made in zip(self.tasks.results[unit.number], made_of(call), strict=True):
            chunk = self.chunks[place] = Chunk(made.region, made.nbytes, made.uses)
            books.put(unit, chunk)
        books.release(unit)
        self.process.note()
        self.process.ran(unit)
        self.idle.append(unit.worker)
        self._finish(unit.number)
        self._go_on()

    def _takes_slot(self, unit: Unit) -> bool:
        """Whether a call waits for a slot; where cores are shared, as in a run, combining does not."""
        return self.process.cores is None or isinstance(unit.call, UnitCall)

    def _finish(self, number: int) -> None:
        self.ended = self.process.now
        for useless in self.order.finish(number):
            chunk, self.chunks[useless] = self.chunks[useless], None
            if chunk is not None:  # several results of a unit are chunks of the tasks that pick them
                self.process.drop(chunk)
        if self.finished is not None:
            self.finished(self.tasks.calls[number])
        while (due := self.order.due()) is not None:
            bundle = self.tasks.calls[due]
            assert isinstance(bundle, Bundle) and self.send is not None
            self.send(bundle)
            self._finish(due)


class Process:
    """The disk, the books and the compute slots of a process.

    ``slots``: programs that run at once; ``workers``: units that are under way. ``cores`` are shared by all
    that it does; None: programs have one each, and what is copied meanwhile takes nothing from them.
    """

    def __init__(
        self,
        clock: Clock,
        tier_bytes: int,
        slots: int,
        workers: int,
        costs: Costs,
        timeline: bool,
        cores: Cores | None = None,
    ) -> None:
        self.clock, self.cores = clock, cores
        self.books: Ledger[Chunk] = Ledger(tier_bytes, self.write, slots)
        self.slots, self.workers, self.costs, self.rates = slots, workers, costs, costs.rates
        self.timeline = timeline
        self.begun = self.free_at = self.compute_seconds = self.disk_seconds = 0.0
        self.work = self.spilled = self.peak_spilled = 0
        self.moments: list[Moment] = []
        self.units: list[Ran] = []
        self.transfers: list[Transfer] = []
        self.step: Step | None = None

    @property
    def now(self) -> float:
        """The time."""
        return self.clock.now

    def seconds(self, call: UnitCall | CombineCall) -> float:
        """Return the seconds of one core that a call takes."""
        return self.costs.seconds(call) if self.cores is None else self.costs.shared_seconds(call)

    def compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Have ``then`` called when so many seconds of a core have been spent."""
        if self.cores is None:
            self.clock.at(self.now + seconds, then)
        else:
            self.cores.spend(seconds, then)

    def copy(
        self, begins: float, parts: int, nbytes: int, then: Callable[[], None], more_seconds: float = 0.0
    ) -> None:
        """Have ``then`` called when bytes in so many parts have been copied, which begins at a time.

        ``more_seconds``: of a core that is shared, beside that.
        """
        if self.cores is None:
            self.clock.at(begins + 2 * nbytes / self.rates.copy_bytes_per_second, then)
        else:
            seconds = self.costs.gathering_seconds(parts, nbytes) + more_seconds
            self.clock.at(begins, partial(self.cores.spend, seconds, then))

    def end(self) -> None:
        """Note that the step is over."""
        assert self.step is not None and self.step.order.over, "the simulated step stands still"
        self.step = None  # else there would be circles, which live until the collector comes

    def disk(self, read: int, written: int, requests: int) -> float:
        """Return when the disk will have moved so much: one request after another."""
        if read or written:
            rates = self.rates
            seconds = read / rates.disk_read_bytes_per_second + written / rates.disk_write_bytes_per_second
            seconds = seconds / DISK_SHARE + requests * REQUEST_SECONDS
            begun = max(self.free_at, self.now)
            self.free_at = begun + seconds
            if self.timeline:
                self.transfers.append(Transfer(begun - self.begun, self.free_at - self.begun, read, written))
            self.disk_seconds += seconds
            self.books.read_bytes += read
            return self.free_at
        return self.now

    def write(self, chunk: Chunk) -> None:
        """Write a chunk to the spill; then it leaves."""
        self.clock.at(self.disk(0, chunk.nbytes, 1), lambda: self._written(chunk))

    def _written(self, chunk: Chunk) -> None:
        chunk.spilled = True
        self.spilled += chunk.nbytes
        self.peak_spilled = max(self.peak_spilled, self.spilled)
        self.books.written(chunk)
        if chunk.dropped:
            self.drop(chunk)
        assert self.step is not None
        self.step.acquire()

    def drop(self, chunk: Chunk) -> None:
        """Nothing reads a chunk any more."""
        if self.books.drop(chunk) and chunk.spilled:
            self.spilled -= chunk.nbytes

    def reset(self) -> None:
        """Begin to count anew."""
        books, self.begun = self.books, self.now
        books.read_bytes = books.written_bytes = 0
        books.peak_bytes = books.resident_bytes + books.reserved_bytes
        self.moments, self.units, self.transfers = [], [], []
        self.compute_seconds = self.disk_seconds = 0.0
        self.peak_spilled = self.spilled

    def note(self) -> None:
        """Write down how much memory is in use."""
        if self.timeline:
            books, seconds = self.books, self.now - self.begun
            self.moments.append(Moment(seconds, books.resident_bytes, books.reserved_bytes, self.work))

    def ran(self, unit: Unit) -> None:
        """Write down when a unit ran that is done now."""
        if self.timeline:
            begun, call = self.begun, unit.call
            times = unit.begun - begun, unit.computing - begun, self.now - begun
            self.units.append(Ran(call.position, call.key, unit.worker, *times))
