"""A process that takes more than was predicted: programs wait, the tier shrinks, nothing stands still."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from oocdl.errors import ResourceError
from oocdl.host.heap import IS_SUPPORTED, Heap, MemoryGuard, give_back_freed_memory, keep_freed_memory
from oocdl.host.limits import anonymous_bytes
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.cache.memory_tier import Tier
from oocdl.storage.cache.spill_store import SpillStore

MIB = 1 << 20


class Process:
    """A process as large as a test says, and a clock that a test moves."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.seconds = nbytes, 0.0

    def guard(self, most_bytes: int) -> MemoryGuard:
        return MemoryGuard(most_bytes, measure=lambda: self.nbytes, clock=self.clock)

    def clock(self) -> float:
        self.seconds += 1.0
        return self.seconds


@dataclass
class Arrays:
    """What a tier has and has promised."""

    mapped_bytes: int = 0
    touched_bytes: int = 0
    promised_bytes: int = 0
    scratch_bytes: int = 0


@contextmanager
def guarded(
    own_bytes: int, most_bytes: int, folder: Path
) -> Iterator[tuple[Heap, Tier, Callable[[], int], list[int]]]:
    """A tier of 16 MiB, and the heap of a process that has ``own_bytes`` beside its arrays.

    Yields both, what measures the process, and the peak of what was measured.
    """
    peak = [0]

    def measure() -> int:
        has_bytes = own_bytes + tier.touched_bytes
        peak[0] = max(peak[0], has_bytes)
        return has_bytes

    store = SpillStore(folder / "spill")
    with Tier(16 * MIB, store, withheld_bytes=lambda need: heap.withheld_bytes(need)) as tier:
        guard = MemoryGuard(most_bytes, measure=measure, clock=Process(0).clock)
        heap = Heap(2, 16 * MIB, lambda: tier, guard)
        yield heap, tier, measure, peak


def hold(tier: Tier, value: float, use: int) -> Chunk:
    """A chunk of a MiB, all of ``value``."""
    with tier.reserve(MIB) as unit:
        array = unit.empty((MIB // 4,), np.float32)
        array[...] = value
        return unit.put(array, ((0, MIB // 4),), uses=(use,))


def test_the_tier_does_without_what_the_process_itself_has_too_much() -> None:
    process, arrays = Process(60 * MIB), Arrays(promised_bytes=40 * MIB)
    heap = Heap(2, 50 * MIB, lambda: arrays, process.guard(100 * MIB))
    assert heap.withheld_bytes() == 0
    assert heap.withheld_bytes(5 * MIB) == 10 * MIB  # 60 of its own leave the tier 40
    assert heap.withheld_bytes(5 * MIB) == 10 * MIB  # for the same bytes no more is withheld
    process.nbytes = 65 * MIB
    assert heap.withheld_bytes() == 15 * MIB
    arrays.touched_bytes = 40 * MIB  # they are no growth of the process
    process.nbytes += 40 * MIB
    assert heap.withheld_bytes() == 15 * MIB
    process.nbytes = 50 * MIB  # it may come again
    assert heap.withheld_bytes() == 15 * MIB
    process.nbytes = 1 << 40
    assert heap.withheld_bytes() == 50 * MIB, "no more than there is"


def test_nothing_is_withheld_from_a_process_that_has_shrunk() -> None:
    """What it had as the run began is no reason: a plan's leftovers may go after that."""
    process, arrays = Process(60 * MIB), Arrays()
    heap = Heap(2, 50 * MIB, lambda: arrays, process.guard(100 * MIB))
    process.nbytes, arrays.promised_bytes = 55 * MIB, 45 * MIB
    assert heap.withheld_bytes() == 0 and heap.notice is None


def test_arrays_that_grow_while_the_process_is_measured_hide_nothing_of_its_own() -> None:
    """A thread that writes 8 MiB between both looks; then what it wrote seemed to be all that grew."""
    arrays = Arrays(promised_bytes=40 * MIB)

    def measure() -> int:
        has_bytes = 65 * MIB + arrays.touched_bytes
        arrays.touched_bytes = 8 * MIB
        return has_bytes

    heap = Heap(2, 50 * MIB, lambda: arrays, MemoryGuard(100 * MIB, measure=measure, clock=Process(0).clock))
    assert heap.withheld_bytes() == 15 * MIB


@pytest.mark.skipif(not IS_SUPPORTED, reason="the C library tells not what of the heap is in use")
def test_what_the_process_grew_by_is_no_scratch_of_the_next_program() -> None:
    """As by compiled loops; else a program would seem to have taken what it is still to take."""
    guard = Process(95 * MIB).guard(100 * MIB)
    heap = Heap(2, 10 * MIB, lambda: Arrays(promised_bytes=10 * MIB), guard)
    grown = ctypes.create_string_buffer(20 * MIB)
    with heap.program(10 * MIB):
        assert heap.withheld_bytes() == 5 * MIB
    del grown


@pytest.mark.skipif(not IS_SUPPORTED, reason="the C library cannot trim the heap")
def test_what_a_program_has_freed_leaves_while_it_runs() -> None:
    """Of two programs at once each leaves holes to the other: together they had up to 30 MiB too much."""
    keep_freed_memory()
    try:
        most_bytes = anonymous_bytes() + 20 * MIB
        heap = Heap(2, 100 * MIB, Arrays, MemoryGuard(most_bytes))
        with heap.program(0):
            freed, end = ctypes.create_string_buffer(60 * MIB), ctypes.create_string_buffer(MIB)
            ctypes.memset(freed, 1, len(freed))
            assert anonymous_bytes() > most_bytes
            del freed
            until = time.monotonic() + 10
            while anonymous_bytes() > most_bytes and time.monotonic() < until:
                time.sleep(0.001)
            assert anonymous_bytes() <= most_bytes
            del end
    finally:
        give_back_freed_memory()


@pytest.mark.skipif(not IS_SUPPORTED, reason="the C library cannot trim the heap")
@pytest.mark.parametrize(
    ("limit_bytes", "kept_bytes", "file_bytes", "stays"),
    [
        (8 * MIB, 0, 0, False),
        (8 * MIB, 64 * MIB, 0, True),
        (40 * MIB, 0, 0, False),  # holes of the heap may be too small for the program
        (40 * MIB, 0, 20 * MIB, True),  # what does not fit into them takes the share of mapped files
    ],
)
def test_freed_memory_stays_where_there_is_room_for_it(
    limit_bytes: int, kept_bytes: int, file_bytes: int, stays: bool
) -> None:
    """The next program takes it again, without page faults."""
    keep_freed_memory()
    try:
        guard = MemoryGuard((1 << 40) + file_bytes, file_bytes=file_bytes)
        heap, before = Heap(1, limit_bytes, Arrays, guard, kept_bytes), anonymous_bytes()
        freed, end = ctypes.create_string_buffer(20 * MIB), ctypes.create_string_buffer(MIB)
        ctypes.memset(freed, 1, len(freed))
        del freed
        with heap.program(30 * MIB):
            left = anonymous_bytes() - before
        del end
    finally:
        give_back_freed_memory()
    assert left > 18 * MIB if stays else left < 4 * MIB


@pytest.mark.skipif(not IS_SUPPORTED, reason="the C library tells not what of the heap is in use")
def test_scratch_that_a_program_has_taken_is_not_counted_twice() -> None:
    process = Process(50 * MIB)
    heap = Heap(2, 60 * MIB, lambda: Arrays(promised_bytes=48 * MIB), process.guard(100 * MIB))
    with heap.program(20 * MIB):
        scratch = ctypes.create_string_buffer(20 * MIB)
        process.nbytes += 20 * MIB
        assert heap.withheld_bytes() == 0
        assert heap.withheld_bytes(12 * MIB) == pytest.approx(10 * MIB, abs=MIB)
        del scratch


def test_what_a_unit_has_reserved_and_not_written_yet_leaves_no_room_for_the_next(tmp_path: Path) -> None:
    """Were it not counted, both would be let in, and the process had 29 MiB once both have written."""
    own_bytes, most_bytes = 14 * MIB, 26 * MIB

    def fill(nbytes: int) -> None:
        with tier.reserve(nbytes) as unit:
            second.set()
            unit.empty((nbytes,), np.uint8)[...] = 1
            measure()

    second = threading.Event()
    with guarded(own_bytes, most_bytes, tmp_path) as (heap, tier, measure, peak):
        with tier.reserve(10 * MIB) as first:
            late = first.empty((10 * MIB,), np.uint8)
            assert (tier.mapped_bytes, tier.touched_bytes) == (10 * MIB, 0)
            thread = threading.Thread(target=fill, args=(5 * MIB,))
            thread.start()
            assert not second.wait(0.1)
            late[...] = 1
            measure()
            del late
        thread.join(10)
        assert second.is_set()
    assert 10 * MIB + own_bytes <= peak[0] <= most_bytes
    assert heap.withheld_bytes() == 4 * MIB


def test_many_units_stay_within_what_the_process_may_have_and_end(tmp_path: Path) -> None:
    """Where 3 MiB more than predicted are taken by something else."""
    own_bytes, most_bytes = 13 * MIB, 26 * MIB

    def work(number: int) -> int:
        nbytes, scratch = (1 + number % 5) * MIB, number % 3 * MIB
        with tier.reserve(2 * nbytes, scratch_bytes=scratch) as unit:
            read, made = (unit.empty((nbytes,), np.uint8) for _ in range(2))
            read[...] = number
            with heap.program(scratch):
                made[...] = read
            chunk = unit.put(made, ((0, nbytes),), uses=(number + 7,))
            del read, made
        measure()
        kept.append(chunk)
        return int(kept[number // 3].copy()[0])

    kept: list[Chunk] = []
    with guarded(own_bytes, most_bytes, tmp_path) as (heap, tier, measure, peak):
        with ThreadPoolExecutor(3) as pool:
            assert {*pool.map(work, range(40), timeout=60)} <= {*range(40)}
        kept.clear()
    assert 20 * MIB <= peak[0] <= most_bytes
    assert heap.withheld_bytes() == 3 * MIB


def test_the_tier_shrinks_and_one_unit_always_runs(tmp_path: Path) -> None:
    withheld = [0]
    with Tier(4 * MIB, SpillStore(tmp_path / "spill"), withheld_bytes=lambda _: withheld[0]) as tier:
        held = [hold(tier, number, number + 5) for number in range(3)]
        assert tier.stats.resident_bytes == 3 * MIB
        withheld[0] = 4 * MIB  # all of it
        with tier.reserve(MIB, [held[0]]):
            pass
        with tier.reserve(3 * MIB):
            pass
        assert tier.stats.resident_bytes <= MIB
        assert tier.mapped_bytes <= 2 * MIB
        assert [float(chunk.copy().mean()) for chunk in held] == [0.0, 1.0, 2.0]
        assert np.isfinite(held[2].copy()).all()


def test_programs_run_one_at_a_time_where_the_process_has_too_much() -> None:
    process = Process(10 * MIB)
    heap = Heap(2, 50 * MIB, Arrays, process.guard(100 * MIB))
    begun, order = threading.Event(), list[str]()

    def second() -> None:
        begun.set()
        with heap.program(MIB):
            order.append("second")

    thread = threading.Thread(target=second)
    with heap.program(MIB):
        process.nbytes = 200 * MIB
        thread.start()
        assert begun.wait(10)
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_process_without_room_for_one_unit_is_an_error_with_both_numbers() -> None:
    process = Process(70 * MIB)
    guard = MemoryGuard(100 * MIB, kernel_bytes=10 * MIB, file_bytes=15 * MIB, measure=lambda: process.nbytes)
    arrays = Arrays(touched_bytes=5 * MIB, promised_bytes=25 * MIB)
    heap = Heap(2, 50 * MIB, lambda: arrays, guard)
    heap.check_alone()  # pages of files may go
    arrays.promised_bytes += MIB
    with pytest.raises(ResourceError, match=r"has 70 MiB, .* 21 MiB more; the budget is 100 MiB") as told:
        heap.check_alone()
    assert "memory='116MiB'" in str(told.value)


def test_the_tier_is_as_it_was_where_even_one_unit_is_refused(tmp_path: Path) -> None:
    withheld, room = [0], [True]

    def check_alone() -> None:
        asked.append(tier.promised_bytes - tier.touched_bytes)
        if not room[0]:
            raise ResourceError("no room")

    asked: list[int] = []
    spill = SpillStore(tmp_path / "spill")
    with Tier(4 * MIB, spill, withheld_bytes=lambda _: withheld[0], check_alone=check_alone) as tier:
        chunk = hold(tier, 7, 5)
        assert asked == []
        withheld[0], room[0] = 4 * MIB, False
        with tier.reserve(0):  # puts the chunk out
            pass
        for _ in range(2):
            with pytest.raises(ResourceError, match="no room"):
                tier.reserve(MIB, [chunk], scratch_bytes=MIB)
        assert asked[-1] == 3 * MIB
        assert tier.stats.resident_bytes == tier.stats.reserved_bytes == 0
        withheld[0] = 0
        with tier.reserve(0, [chunk]):
            assert chunk.array()[0] == 7


def test_the_most_that_was_seen_is_remembered() -> None:
    process = Process(60 * MIB)
    heap = Heap(2, 50 * MIB, Arrays, process.guard(100 * MIB))
    with heap.program(0):
        process.nbytes = 80 * MIB
    process.nbytes = 70 * MIB
    assert heap.process_bytes() == 80 * MIB
