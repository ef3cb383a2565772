"""The RAM tier: the acquire protocol, eviction, races, pickling, dropping."""

import errno
import gc
import os
import pickle
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from oocdl.errors import BudgetError, ResourceError, StoreError
from oocdl.graph.ir.index import whole
from oocdl.storage.cache import chunk as chunks
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.cache.memory_tier import Reservation, Tier
from oocdl.storage.cache.spill_store import SpillStore


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.002)


def race(*works: Callable[[], object], seconds: float = 20.0) -> None:
    """Do all of it at once, in threads that end in time."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "deadlock"


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    with Tier(8000, SpillStore(tmp_path)) as made:
        yield made
    chunks.use(None)


def put(tier: Tier, value: float, size: int = 250, uses: tuple[int, ...] = ()) -> Chunk:
    """A chunk of ``size`` float64, all of ``value``."""
    with tier.reserve(8 * size) as unit:
        return unit.put(np.full(size, value), ((0, size),), uses)


def files(tier: Tier) -> list[Path]:
    """Files of spilled chunks, without those kept to be written over."""
    free = {file.data for kept in tier.spill._free.values() for file in kept}
    return sorted(set(tier.spill.folder.glob("s*/c.*")) - free)


@pytest.mark.parametrize("kept_bytes", [0, 8 << 20])
def test_pages_are_kept_beyond_the_capacity_where_there_is_room(tmp_path: Path, kept_bytes: int) -> None:
    with Tier(8 << 20, SpillStore(tmp_path), kept_bytes=kept_bytes) as tier:
        with tier.reserve(8 << 20) as unit:
            unit.empty((1 << 20,), np.float64)
        with tier.reserve(0, scratch_bytes=8 << 20):
            assert tier.mapped_bytes == (8 << 20 if kept_bytes else 0)
    chunks.use(None)


def test_put_and_array_are_zero_copy_and_read_only(tier: Tier) -> None:
    array = np.arange(100.0)
    with tier.reserve(1000) as unit:
        chunk = unit.put(array, ((5, 105),), (1, 2))
        assert tier.stats.resident_bytes == 800
        assert tier.stats.reserved_bytes == 200
    assert tier.stats.reserved_bytes == 0
    with pytest.raises(ValueError, match="pins"):
        chunk.array()
    with tier.reserve(0, [chunk, chunk]):
        assert np.shares_memory(chunk.array(), array)
        assert not chunk.array().flags.writeable
    assert (chunk.shape, chunk.dtype, chunk.nbytes) == ((100,), np.dtype("f8"), 800)
    assert (chunk.region, chunk.slot.uses) == (((5, 105),), (1, 2))


def test_small_chunks_count_as_what_the_tier_has_not_as_the_process_itself(tier: Tier) -> None:
    """They lie in the heap; 600 of 30 KiB would seem to be 18 MiB that nobody had predicted."""
    held = [put(tier, 1.0), put(tier, 2.0)]
    assert tier.touched_bytes == tier.promised_bytes == 4000
    with tier.reserve(3000, scratch_bytes=500):
        assert (tier.touched_bytes, tier.promised_bytes) == (4000, 7500)
    held.clear()
    until(lambda: tier.touched_bytes == 0)
    assert tier.promised_bytes == 0


def test_what_can_never_fit_is_refused(tier: Tier) -> None:
    chunk = put(tier, 1.0)
    with pytest.raises(BudgetError, match="8001"):
        tier.reserve(8001)
    with pytest.raises(BudgetError, match="8001"):
        tier.reserve(6001, [chunk])
    with tier.reserve(8) as unit, pytest.raises(BudgetError, match="left"):
        unit.put(np.zeros(2), ((0, 2),))
    assert tier.stats.reserved_bytes == 0


def test_put_refuses_what_is_not_contiguous_or_not_the_region(tier: Tier) -> None:
    with tier.reserve(800) as unit:
        with pytest.raises(ValueError, match="without gaps"):
            unit.put(np.zeros((4, 4)).T[1:], ((0, 3), (0, 4)))
        with pytest.raises(ValueError, match="region"):
            unit.put(np.zeros(4), ((0, 5),))


def test_a_clean_chunk_is_not_written_again(tier: Tier) -> None:
    chunk = put(tier, 3.0)
    for _ in range(3):
        with tier.reserve(8000):
            assert chunk.slot.array is None
        with tier.reserve(0, [chunk]):
            assert (chunk.array() == 3.0).all()
    stats = tier.stats
    assert (stats.written_bytes, stats.read_bytes) == (2000, 6000)
    assert stats.peak_bytes <= 8000


def test_a_chunk_in_memory_is_lent_unless_others_wait(tier: Tier) -> None:
    lent, other = put(tier, 1.0), put(tier, 2.0)
    with tier.reserve(0) as unit, ThreadPoolExecutor(1) as pool:
        found = unit.lend(lent)
        assert found is not None and found[0] == 1.0 and not found.flags.writeable
        pool.submit(lambda: tier.reserve(6000).release()).result(5)  # what is lent stays
        assert other.slot.array is None and unit.lend(other) is None
        assert lent.slot.array is not None
        waits = pool.submit(lambda: tier.reserve(8000).release())
        until(lambda: len(tier.ledger.line) == 1)
        assert unit.lend(lent) is None
        del found
        unit.release()
        waits.result(5)
    assert lent.slot.array is None


def test_first_come_first_served(tier: Tier) -> None:
    order: list[int] = []

    def unit(index: int, nbytes: int) -> None:
        with tier.reserve(nbytes):
            order.append(index)

    hold = tier.reserve(4000)
    with ThreadPoolExecutor(4) as pool:
        for index, nbytes in enumerate((6000, 1000, 8000, 10)):  # 1000 and 10 would fit at once
            pool.submit(unit, index, nbytes)
            until(lambda count=index + 1: len(tier.ledger.line) == count)
        assert order == []
        hold.release()
    assert order[0] == 0
    assert order.index(2) > order.index(1)
    assert sorted(order) == [0, 1, 2, 3]


def test_read_checks_its_arguments(tier: Tier) -> None:
    chunk = put(tier, 4.0)
    for region, out in (
        (((0, 251),), np.zeros(251)),
        (((0, 2),), np.zeros(3)),
        (((0, 2),), np.zeros(2, np.float32)),
    ):
        with pytest.raises(ValueError, match="region"):
            chunk.read(region, out)


def test_adopt_never_waits_nor_goes_over_the_capacity(tier: Tier) -> None:
    chunks = [tier.adopt(np.full(500, float(index)), ((0, 500),)) for index in range(6)]
    assert tier.stats.peak_bytes <= tier.capacity_bytes
    assert [chunk.copy()[0] for chunk in chunks] == [0, 1, 2, 3, 4, 5]


def test_dropping_frees_ram_and_deletes_the_spill(tier: Tier) -> None:
    chunks = [put(tier, float(index)) for index in range(6)]
    until(lambda: len(files(tier)) == 2)
    del chunks[::2]
    until(lambda: tier.stats.resident_bytes + 2000 * len(files(tier)) <= 6000)
    chunks.clear()
    until(lambda: tier.stats.resident_bytes == 0 and not files(tier))


def test_dropped_bytes_are_free_for_the_next_unit_without_eviction(tier: Tier) -> None:
    for _ in range(50):
        keep, drop = put(tier, 1.0, 500), put(tier, 2.0, 500)
        del drop
        tier.reserve(4000).release()
        assert keep.slot.array is not None
        del keep
    assert tier.stats.written_bytes == 0


def test_the_collector_may_run_inside_the_lock(tier: Tier) -> None:
    class Loop:
        pass

    loop = Loop()
    loop.me, loop.chunk = loop, put(tier, 1.0)  # type: ignore[attr-defined]
    with tier.changed:
        del loop
        gc.collect()
    until(lambda: tier.stats.resident_bytes == 0)


LAST = (0, 2, 3, 4, 1)
REGION = ((0, 2), (3, 11), (5, 9), (0, 8), (0, 16))
VOLUME = np.random.default_rng(0).random((2, 8, 4, 8, 16)).astype(np.float32)


@pytest.fixture
def last(tier: Tier) -> Iterator[Chunk]:
    """A chunk with its channels last, of whole pages a row of depth."""
    big = Tier(1 << 20, tier.spill)
    chunks.use(big)
    with big.reserve(VOLUME.nbytes) as unit:
        made = unit.empty(VOLUME.shape, VOLUME.dtype, LAST)
        made[...] = VOLUME
        chunk = unit.put(made, REGION, (1, 4), 2)
        del made
    yield chunk
    big.close()


def test_a_signal_leaves_no_lock_taken(tmp_path: Path) -> None:
    """The entry of a Condition would be left with the lock taken, half of the time."""
    tier, seconds, rounds = Tier(8000, SpillStore(tmp_path)), random.Random(0), 200

    def stop(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(rounds):
            with suppress(InterruptedError):
                signal.setitimer(signal.ITIMER_REAL, seconds.uniform(1e-4, 1e-3))
                while True:
                    tier.renew([])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    race(lambda: tier.renew([]))
    tier.close()


def spill(chunk: Chunk) -> None:
    """Have a chunk leave RAM."""
    home: Any = chunk.home
    home.reserve(home.capacity_bytes).release()
    assert chunk.slot.array is None


def check_volume(chunk: Chunk) -> None:
    """It is ``VOLUME``, with its channels last, in place and copied."""
    assert (chunk.order, chunk.region, chunk.shape) == (LAST, REGION, VOLUME.shape)
    copy = chunk.copy()
    assert np.array_equal(copy, VOLUME) and copy.transpose(LAST).flags.c_contiguous
    home: Any = chunk.home
    with home.reserve(0, [chunk]):
        assert np.array_equal(chunk.array(), VOLUME)
        assert chunk.array().transpose(LAST).flags.c_contiguous


@pytest.mark.parametrize("spilled", [False, True])
def test_strips_of_a_chunk_are_named_by_axes_whatever_their_order(last: Chunk, spilled: bool) -> None:
    if spilled:
        spill(last)
        file = last.slot.file
        # Rows of depth are outermost in the file: a strip of them is one piece.
        assert file is not None and (file.shape, file.outer) == ((2, 4, 8, 16, 8), 1)
    region = ((1, 2), (4, 9), (6, 8), (0, 8), (7, 10))
    planes = np.empty((1, 5, 2, 8, 3), np.float32)
    wide = np.empty((2, 2, 8, 16, 8), np.float32)
    alike = wide.transpose(np.argsort(LAST))[1:2, 1:6, :, :, 7:10]
    home: Any = last.home
    with home.reserve(home.capacity_bytes if spilled else 0):  # else there is room, and it comes back
        for out in (planes, alike):
            last.read(region, out)
            assert np.array_equal(out, VOLUME[1:2, 1:6, 1:3, :, 7:10])
        assert (last.slot.array is None) == spilled
    check_volume(last)


@pytest.mark.parametrize("spilled", [False, True])
def test_a_pickled_chunk_keeps_its_order(last: Chunk, tmp_path: Path, spilled: bool) -> None:
    if spilled:
        spill(last)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(last, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000, "the array goes beside it, without a copy"
    with Tier(1 << 20, SpillStore(tmp_path / "other")) as other:
        chunks.use(other)
        copy = pickle.loads(data, buffers=buffers)
        assert copy.home is other and copy.slot.uses == (1, 4)
        check_volume(copy)
        spill(copy)
        check_volume(copy)
        chunks.use(None)
        plain = pickle.loads(pickle.dumps(copy))
        assert np.array_equal(plain.array(), VOLUME) and np.array_equal(plain.copy(), VOLUME)


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (2, 0, 3, 1), (0, 3, 1, 2), (0, 3, 2, 1)])
def test_a_chunk_with_an_axis_of_one_element(tier: Tier, order: tuple[int, ...]) -> None:
    """Strides hardly tell where it is: order and memory have to agree all the same."""
    wanted = np.arange(40.0).reshape(2, 4, 1, 5)
    with tier.reserve(wanted.nbytes) as unit:
        made = unit.empty(wanted.shape, np.float64, order)
        made[...] = wanted
        chunk = unit.put(made, ((0, 2), (0, 4), (7, 8), (0, 5)))
        del made
    assert np.array_equal(chunk.copy(), wanted)
    chunks.use(tier)
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(chunk))
        assert copy.slot.shape == chunk.slot.shape == tuple(wanted.shape[axis] for axis in chunk.order)
        assert copy.order == chunk.order and np.array_equal(copy.copy(), wanted)
        spill(chunk)


def test_a_failed_write_reaches_all_who_wait(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def unit() -> None:
        with pytest.raises(ResourceError, match=f"{tier.spill.folder}.*4000 bytes.*free some"):
            tier.reserve(6000)
        refused.append(1)

    chunk, refused = put(tier, 1.0, 500), list[int]()
    monkeypatch.setattr(os, "pwrite", no_space)
    race(unit, unit, unit, seconds=5)
    monkeypatch.undo()
    assert len(refused) == 3
    assert (chunk.copy() == 1.0).all()
    assert not files(tier)


def test_a_failed_load_is_raised_and_releases(tier: Tier) -> None:
    chunk = put(tier, 1.0)
    tier.reserve(8000).release()
    files(tier)[0].unlink()
    with pytest.raises(StoreError, match=r"cannot read .*c\.0"):
        tier.reserve(100, [chunk])
    assert (tier.stats.resident_bytes, tier.stats.reserved_bytes) == (0, 0)


def test_closing_wakes_the_waiters(tmp_path: Path) -> None:
    tier = Tier(100, SpillStore(tmp_path))
    hold = tier.reserve(100)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(tier.reserve, 10)
        until(lambda: len(tier.ledger.line) == 1)
        tier.close()
        with pytest.raises(StoreError, match="closed"):
            waiter.result(5)
    hold.release()
    assert list(tmp_path.glob("spill-*")) == []


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.generate],  # shrinking a deadlock would wait for it again and again
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 8), capacity=st.integers(2000, 12000))
def test_the_protocol_always_finishes(tmp_path: Path, seed: int, workers: int, capacity: int) -> None:
    """Random units with random pins: no deadlock, no overflow, the right bytes."""
    with Tier(capacity, SpillStore(tmp_path)) as tier:
        shared: list[Chunk] = []
        failures: list[BaseException] = []
        position = iter(range(10**9))

        def worker(index: int) -> None:
            rng = random.Random(seed + index)
            try:
                for _ in range(25):
                    _random_unit(tier, rng, shared, next(position))
            except BaseException as error:
                failures.append(error)
                raise

        race(*(partial(worker, n) for n in range(workers)))
        assert not failures
        assert tier.stats.peak_bytes <= capacity
        assert tier.stats.reserved_bytes == 0
        shared.clear()
        until(lambda: tier.stats.resident_bytes == 0 and not files(tier))


def _random_unit(tier: Tier, rng: random.Random, shared: list[Chunk], position: int) -> None:
    left = tier.capacity_bytes
    pins = []
    for chunk in rng.sample(shared, min(len(shared), rng.randint(0, 3))):
        if chunk.nbytes <= left:
            pins.append(chunk)
            left -= chunk.nbytes
    tier.advance(position)
    asked = rng.randint(0, left)
    with tier.reserve(asked, pins) as unit:
        now = tier.stats  # once: other threads load and put between two looks
        assert now.resident_bytes + now.reserved_bytes <= tier.capacity_bytes
        for chunk in pins:
            assert (chunk.array() == chunk.region[0][0]).all()
        for chunk in rng.sample(shared, min(len(shared), 2)):
            at, stop = chunk.region[0]
            out = np.empty((stop - at, 2), np.int32)[:, 0]
            chunk.read(chunk.region, out)
            assert (out == at).all()
        _put_random(unit, asked, rng, shared, position)
    while len(shared) > 12:
        shared.pop(rng.randrange(8))  # not the length: other threads shorten it meanwhile


def _put_random(unit: Reservation, left: int, rng: random.Random, shared: list[Chunk], position: int) -> None:
    while left >= 4 and rng.random() < 0.7:
        size = rng.randint(1, left // 4)
        left -= 4 * size
        at = rng.randint(0, 1000)
        uses = tuple(sorted(position + rng.randint(0, 50) for _ in range(rng.randint(0, 3))))
        shared.append(unit.put(np.full(size, at, np.int32), ((at, at + size),), uses))


def test_reads_race_with_eviction(tmp_path: Path) -> None:
    """Readers always see the chunk's bytes while it is written, dropped from RAM and loaded."""
    begun = time.monotonic()
    array = np.arange(40 * 50, dtype=np.float32).reshape(40, 50)
    with Tier(3 * array.nbytes, SpillStore(tmp_path)) as tier:
        chunk = tier.adopt(array.copy(), whole(array.shape))
        wrong, enough = list[str](), 10 * array.nbytes

        def goes_on() -> bool:
            taken = time.monotonic() - begun
            return taken < 1.5 or (tier.stats.read_bytes <= enough and taken < 30)  # on a busy machine

        def reader(seed: int) -> None:
            rng = random.Random(seed)
            while goes_on():
                top, left = rng.randrange(40), rng.randrange(50)
                out = np.empty((40 - top, 50 - left), np.float32)
                chunk.read(((top, 40), (left, 50)), out)
                if not np.array_equal(out, array[top:, left:]):
                    wrong.append(f"{top},{left}")

        def churn() -> None:
            while goes_on():
                tier.reserve(3 * array.nbytes).release()
                with tier.reserve(0, [chunk]):
                    if not np.array_equal(chunk.array(), array):
                        wrong.append("pinned")

        race(*(partial(reader, n) for n in range(3)), churn, churn)
        assert wrong == []
        assert tier.stats.peak_bytes <= 3 * array.nbytes
        assert tier.stats.read_bytes > enough
        assert chunk is not None


# --- bytes on a device ----------------------------------------------------------------------


class Late:
    """A device array whose bytes, all of one value, come to the host when they are wanted."""

    def __init__(self, array: np.ndarray, value: float) -> None:
        self.array, self.value, self.times = array, value, 0

    def hold(self) -> object:
        return self

    def settle(self) -> None:
        if not self.times:
            self.array[...] = self.value
        self.times += 1


def put_late(tier: Tier, value: float) -> tuple[Chunk, Late]:
    with tier.reserve(2000) as unit:
        array = unit.empty((250,), np.float64)
        array[...] = -1
        late = Late(array, value)
        return unit.put(array, ((0, 250),), device=late), late


def read(chunk: Chunk) -> float:
    out = np.empty(250)
    chunk.read(chunk.region, out)
    assert (out == out[0]).all()
    return float(out[0])


def test_bytes_come_from_the_device_whoever_wants_them(tier: Tier) -> None:
    chunks.use(tier)

    def pinned(chunk: Chunk) -> float:
        with tier.reserve(0, [chunk]):
            return float(chunk.array()[0])

    def lent(chunk: Chunk) -> float:
        return float(tier.reserve(0).lend(chunk)[0])  # type: ignore[index]

    for value, ask in enumerate((read, lent, pinned, lambda chunk: read(pickle.loads(pickle.dumps(chunk))))):
        chunk, late = put_late(tier, value)
        assert not late.times
        assert ask(chunk) == value
        assert read(chunk) == value
        del chunk


def test_bytes_come_from_the_device_before_they_are_spilled(tier: Tier) -> None:
    made = [put_late(tier, value) for value in range(6)]  # the tier has room for four
    until(lambda: len(files(tier)) >= 2)
    assert sum(late.times for _, late in made) < 6
    assert [read(chunk) for chunk, _ in made] == [0, 1, 2, 3, 4, 5]


def test_a_dropped_chunk_leaves_the_device_at_once(tier: Tier) -> None:
    """Though the ledger still has it in an outdated entry of its order."""
    chunk, late = put_late(tier, 1)
    gone = weakref.ref(late)
    del late
    assert gone() is not None
    del chunk
    assert gone() is None
    kept, late = put_late(tier, 2)
    gone = weakref.ref(late)
    del late
    tier.close()
    del kept
    assert gone() is None
