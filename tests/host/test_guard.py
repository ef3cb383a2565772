"""A process that takes more than was predicted: programs wait, the tier shrinks, nothing stands still."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest

from oocdl.errors import ResourceError
from oocdl.host.guard import MemoryGuard
from oocdl.host.heap import IS_SUPPORTED, Heap
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


def test_nothing_is_withheld_while_predictions_hold() -> None:
    process = Process(90 * MIB)
    heap = Heap(2, 50 * MIB, lambda: 0, process.guard(100 * MIB))
    with heap.program(10 * MIB):
        assert heap.withheld_bytes() == 0


def test_what_is_too_much_is_withheld_once_what_was_withheld_has_left() -> None:
    process, mapped = Process(120 * MIB), [0]
    heap = Heap(2, 50 * MIB, lambda: mapped[0], process.guard(100 * MIB))
    assert heap.withheld_bytes() == 20 * MIB
    mapped[0] = 40 * MIB  # the tier has not shrunk yet: no more is withheld for the same bytes
    assert heap.withheld_bytes() == 20 * MIB
    mapped[0] = 30 * MIB
    process.nbytes = 105 * MIB
    assert heap.withheld_bytes() == 25 * MIB
    process.nbytes = 80 * MIB  # it may come again
    assert heap.withheld_bytes() == 25 * MIB


@pytest.mark.skipif(not IS_SUPPORTED, reason="the C library tells not what of the heap is in use")
def test_what_the_process_grew_by_is_no_scratch_of_the_next_program() -> None:
    """As by compiled loops; else a program would seem to have taken what it is still to take."""
    guard = Process(95 * MIB).guard(100 * MIB)
    heap = Heap(2, 50 * MIB, lambda: 0, guard)
    grown = ctypes.create_string_buffer(20 * MIB)
    with heap.program(10 * MIB):
        assert guard.withheld_bytes == 5 * MIB
    del grown


def test_programs_run_one_at_a_time_where_the_process_has_too_much() -> None:
    process = Process(10 * MIB)
    heap = Heap(2, 50 * MIB, lambda: 0, process.guard(100 * MIB))
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
    heap = Heap(2, 50 * MIB, lambda: 0, guard)
    heap.check_alone(20 * MIB)  # pages of files may go
    with pytest.raises(ResourceError, match=r"has 70 MiB, .* 21 MiB more; the budget is 100 MiB") as told:
        heap.check_alone(21 * MIB)
    assert "memory='116MiB'" in str(told.value)


def test_the_tier_is_as_it_was_where_even_one_unit_is_refused(tmp_path: Path) -> None:
    withheld, room = [0], [True]

    def check_alone(nbytes: int) -> None:
        asked.append(nbytes)
        if not room[0]:
            raise ResourceError("no room")

    asked: list[int] = []
    spill = SpillStore(tmp_path / "spill")
    with Tier(4 * MIB, spill, withheld_bytes=lambda _: withheld[0], check_alone=check_alone) as tier:
        with tier.reserve(MIB) as unit:
            array = unit.empty((MIB // 4,), "f4")
            array[...] = 7
            chunk = unit.put(array, ((0, MIB // 4),), uses=(5,))
            del array
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


def test_the_tier_shrinks_and_one_unit_always_runs(tmp_path: Path) -> None:
    withheld = [0]
    with Tier(4 * MIB, SpillStore(tmp_path / "spill"), withheld_bytes=lambda _: withheld[0]) as tier:
        held = []
        for number in range(3):
            with tier.reserve(MIB) as unit:
                array = unit.empty((MIB // 4,), "f4")
                array[...] = number
                held.append(unit.put(array, ((0, MIB // 4),), uses=(number + 5,)))
                del array
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


def test_a_second_unit_waits_for_the_first(tmp_path: Path) -> None:
    withheld = [2 * MIB]
    done = threading.Event()
    with Tier(4 * MIB, SpillStore(tmp_path / "spill"), withheld_bytes=lambda _: withheld[0]) as tier:
        with tier.reserve(2 * MIB):

            def second() -> None:
                with tier.reserve(MIB):
                    done.set()

            thread = threading.Thread(target=second)
            thread.start()
            assert not done.wait(0.05)
        assert done.wait(10)
        thread.join()
