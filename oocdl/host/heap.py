"""The heap under a budget: scratch of running programs is kept for the next one, or given back.

If scratch is given back to the system at once, each of its pages is faulted in anew (a U-Net's step took 1.5
times as long); if it is kept, the heap grows far beyond what is in use, as blocks of many sizes leave holes.
So the heap keeps what is freed as long as that fits the budget, and is trimmed before a program that would
not fit beside it.

A budget is kept by counting: arrays exactly, scratch of programs and growth of the process as predicted. The
guard looks at what the process *has*. Where that, and what units have reserved and not written yet, is more
than it may have, the heap is trimmed, also while programs run; if that is not enough, so much is *withheld*
from the memory tier, which then keeps fewer chunks in RAM, and programs wait for others to end. No order of
sums changes. Where even one unit that runs alone finds no room, the run ends with an error before it starts.
"""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from oocdl.errors import ResourceError
from oocdl.host.limits import anonymous_bytes

PERIOD_SECONDS = 0.005  # the process is measured no more often than this; to ask the kernel takes 8 µs
RELIEF_SECONDS = 0.02  # nor is the heap trimmed, or more withheld, more often: chunks take as long to leave
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of glibc's ``mallopt``
HEAP_KEPT_BYTES = 1 << 30  # free memory that the C library keeps before it gives any back by itself
MOST_UNCHECKED_BYTES = 256 << 20  # taken before the system is asked again: not all that grows is told
WAIT_SECONDS = 0.01  # between two looks of a program that waits for memory, and for another to end
REST_RATIO = 50
"""Rest after a look at the heap between programs, as a multiple of the time that the look took: tens of
milliseconds in a process that has freed much in small pieces."""
WATCH_SECONDS = 0.005  # seconds between two looks at the process while programs run
IDLE_LOOKS = 200  # looks without a program that runs, after which nobody watches until the next one begins
TOUCHED_MEANWHILE_BYTES, MOST_LOOKS = 1 << 18, 8
"""The process is measured anew, so often, where arrays changed by more than this meanwhile: a thread that
waits for the interpreter's lock between two looks may find megabytes written."""
GLIBC_THRESHOLD_BYTES = 128 << 10  # both of glibc's thresholds at the start of a process


@dataclass(frozen=True)
class MemoryGuard:
    """A budget, and how the process is measured that is to keep it."""

    budget_bytes: int
    kernel_bytes: int = 0  # the kernel's share of it
    file_bytes: int = 0  # for pages of mapped files, which a unit that runs alone may use up
    measure: Callable[[], int] = anonymous_bytes
    clock: Callable[[], float] = time.monotonic

    @property
    def most_bytes(self) -> int:
        """Limit of the process's own memory, beside the kernel's share and pages of files."""
        return self.budget_bytes - self.kernel_bytes - self.file_bytes


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_library = ctypes.CDLL(None)
IS_SUPPORTED = hasattr(_library, "mallinfo2") and hasattr(_library, "malloc_trim")
"""Whether the C library has what this module calls (glibc 2.33). Elsewhere the heap is left as it is."""
if IS_SUPPORTED:
    _library.mallinfo2.restype = _MallInfo


def use_one_heap() -> None:
    """Let no more heaps be made: threads that start from now on share those that are there."""
    if IS_SUPPORTED:
        _library.mallopt(M_ARENA_MAX, 1)


def keep_freed_memory(most_bytes: int = HEAP_KEPT_BYTES) -> None:
    """Make the heap keep freed memory until ``Heap`` or ``give_back_freed_memory`` trims it."""
    if IS_SUPPORTED:
        _library.mallopt(M_MMAP_THRESHOLD, most_bytes)
        _library.mallopt(M_TRIM_THRESHOLD, most_bytes)
    trim()


def trim() -> None:
    """Give free memory of the heap back to the system, once."""
    if IS_SUPPORTED:
        _library.malloc_trim(0)


def give_back_freed_memory() -> None:
    """Undo ``keep_freed_memory``, and give free memory of the heap back to the system."""
    keep_freed_memory(GLIBC_THRESHOLD_BYTES)


def _in_use_bytes() -> int:
    found = _library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Arrays(Protocol):
    """The heap's view of the RAM tier, used under the heap's lock: the tier may not take its own for it."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped for arrays, pages included that only come when first written."""

    @property
    def touched_bytes(self) -> int:
        """Bytes of arrays, and of pages kept for them, that the process has touched."""

    @property
    def promised_bytes(self) -> int:
        """Bytes of arrays and scratch once each unit has taken all that it has reserved."""

    @property
    def scratch_bytes(self) -> int: ...


class Heap:
    """Lets ``permits`` programs run at once, and keeps heap and mapped memory within ``limit_bytes``.

    The limit counts what the process takes from now on, and is the capacity of the RAM tier, which ``arrays``
    returns. Where its arrays and the scratch of programs do not fit together, as a prediction was too low,
    ``guard`` says how much the tier is to do without. Memory that was freed may take ``kept_bytes`` beyond
    the limit, as the next array or program takes it again.
    """

    def __init__(
        self,
        permits: int,
        limit_bytes: int,
        arrays: Callable[[], Arrays],
        guard: MemoryGuard,
        kept_bytes: int = 0,
    ) -> None:
        self._limit, self._kept, self._arrays, self._guard = limit_bytes, kept_bytes, arrays, guard
        self._permits = threading.Semaphore(permits)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._running = self._computing = self._spare = 0
        # Bytes of the process beside arrays and scratch, as last measured after a trim, or fewer since.
        self._own = guard.measure()
        self._used = _in_use_bytes() if IS_SUPPORTED else 0  # bytes in use in the heap that are not scratch
        self._due_seconds = 0.0  # monotonic time from which on the heap is looked at between programs again
        self._withheld = 0  # for good: what was not predicted once may come again
        self.notice: str | None = None  # warning that a run gives its user, once
        self._seen = 0  # maximum of the process's own memory over all measurements
        self._last: dict[str, float] = {}
        self._is_watched = not IS_SUPPORTED

    @contextmanager
    def program(self, scratch_bytes: int) -> Iterator[None]:
        """Hold a permit while the block runs a program that takes up to ``scratch_bytes``.

        Where the process has too much already, it waits while other programs run: these end by themselves.
        """
        with self._permits:
            with self._lock:
                if scratch_bytes and not self._running and (began := time.monotonic()) >= self._due_seconds:
                    self._taken_bytes()  # now it is known what is no scratch
                    self._due_seconds = began + (1 + REST_RATIO) * (time.monotonic() - began)
                self._running += scratch_bytes
                self._make_room(0, scratch_bytes)
                while self._is_over(self._arrays().promised_bytes) and self._computing:
                    self._ended.wait(WAIT_SECONDS)
                self._computing += 1
                if not self._is_watched:
                    self._is_watched = True
                    threading.Thread(target=self._watch, name="heap-watch", daemon=True).start()
            try:
                yield
            finally:
                with self._lock:
                    if self._is_time("see"):
                        self._has_bytes()  # what it has freed is still there
                    self._running -= scratch_bytes
                    self._computing -= 1
                    self._ended.notify_all()

    def _watch(self) -> None:
        """Trim the heap while programs run, once the process has more than it may.

        Of two programs at once each frees memory where the other finds no room: 10 to 30 MiB of a Swin-T.
        """
        idle = 0
        while idle < IDLE_LOOKS:
            time.sleep(WATCH_SECONDS)
            with self._lock:
                idle = 0 if self._computing else idle + 1
                self._is_watched = idle < IDLE_LOOKS
                over = self._computing and self._has_bytes() > self._guard.most_bytes
                if over and self._is_time("trim", RELIEF_SECONDS):
                    trim()

    def process_bytes(self) -> int:
        with self._lock:
            self._has_bytes()
            return self._seen

    def withheld_bytes(self, need_bytes: int = 0) -> int:
        """Return what the memory tier is to do without, where a unit is about to reserve ``need_bytes``."""
        with self._lock:
            # Where the tier has no more to lend, chunks leave first.
            lendable = self._limit - self._withheld
            self._is_over(min(self._arrays().promised_bytes + need_bytes, lendable))
            return self._withheld

    def check_alone(self) -> None:
        """Raise ResourceError if the process has no room for all that the only unit has reserved."""
        guard = self._guard
        with self._lock:
            to_come = max(self._arrays().promised_bytes - self._arrays().touched_bytes, 0)
            room_bytes = guard.budget_bytes - guard.kernel_bytes - to_come  # pages of files may go
            if self._has_bytes() <= room_bytes:
                return
            trim()
            has_bytes = self._has_bytes()
        if has_bytes > room_bytes:
            enough_bytes = has_bytes + to_come + guard.kernel_bytes + guard.file_bytes
            raise ResourceError(
                f"this process has {has_bytes / 2**20:.0f} MiB, with no chunk in memory but those of one "
                f"unit, which needs {to_come / 2**20:.0f} MiB more; the budget is "
                f"{guard.budget_bytes / 2**20:.0f} MiB, of which {guard.kernel_bytes / 2**20:.0f} MiB are "
                "the kernel's: a library, a callback or another thread takes more than was predicted; the "
                "run stays at its last commit; free what holds it, or go on with "
                f"memory='{-(-enough_bytes >> 20)}MiB'"
            )

    def _is_time(self, action: str, seconds: float = PERIOD_SECONDS) -> bool:
        """Whether an action was not taken for so long; if so, the next time is counted from now."""
        now = self._guard.clock()
        if now - self._last.get(action, -math.inf) < seconds:
            return False
        self._last[action] = now
        return True

    def _has_bytes(self) -> int:
        has_bytes = self._guard.measure()
        self._seen = max(self._seen, has_bytes)
        return has_bytes

    def _own_bytes(self) -> int:
        """Measure what the process has beside arrays, anew where these grew or left meanwhile."""
        for _ in range(MOST_LOOKS):
            before_bytes = self._arrays().touched_bytes
            has_bytes, touched_bytes = self._has_bytes(), self._arrays().touched_bytes
            if abs(touched_bytes - before_bytes) <= TOUCHED_MEANWHILE_BYTES:
                break
        return has_bytes - touched_bytes

    def _is_over(self, promised_bytes: int) -> bool:
        """Whether the process will have more than it may, once arrays and programs have what is promised.

        If so, enough is withheld from the tier to prevent it once its chunks have left.
        """
        most_bytes = self._guard.most_bytes
        if self._is_time("measure"):
            own_bytes = self._own_bytes()
            self._own = min(self._own, own_bytes)  # a process may shrink
            if own_bytes + promised_bytes > most_bytes and self._is_time("relieve", RELIEF_SECONDS):
                scratch_bytes, taken_bytes = self._arrays().scratch_bytes, self._taken_bytes()
                reusable_bytes = self._reusable_bytes(own_bytes, scratch_bytes, taken_bytes)
                if own_bytes + promised_bytes - reusable_bytes > most_bytes:
                    self._trim()
        over_bytes = self._own + promised_bytes - most_bytes
        if over_bytes <= 0:
            return False
        self._withheld = max(self._withheld, min(self._own + self._limit - most_bytes, self._limit))
        self.notice = self.notice or (
            f"this process was about to take {(most_bytes + over_bytes) >> 20} MiB of the "
            f"{most_bytes >> 20} MiB that it may have: programs or libraries take more than was "
            "predicted; units wait and chunks leave memory earlier from now on (equal results, slower "
            "steps); more memory= avoids it"
        )
        return True

    def _taken_bytes(self) -> int:
        """Return the bytes of the heap that programs hold; any more is compiled loops and caches."""
        if not IS_SUPPORTED:
            return 0
        in_use = _in_use_bytes()
        self._used = min(max(self._used, in_use - self._running), in_use)
        return in_use - self._used

    def before_mapping(self, nbytes: int) -> None:
        """Make room in the limit: the pool is about to map ``nbytes`` more."""
        with self._lock:
            self._make_room(nbytes, nbytes)

    def _trim(self) -> None:
        """Give the heap's free memory back, and measure what the process has beside arrays and scratch."""
        trim()
        taken_bytes = self._taken_bytes()
        self._own = self._own_bytes() - taken_bytes

    def _reusable_bytes(self, own_bytes: int, scratch_bytes: int, taken_bytes: int = 0) -> int:
        """Return how many of ``scratch_bytes`` the heap supplies from pages that the process has already.

        Free blocks may be too small, so free memory counts only up to the share of mapped files.
        """
        return max(min(own_bytes - self._own, scratch_bytes, taken_bytes + self._guard.file_bytes), 0)

    def _make_room(self, nbytes: int, more_bytes: int) -> None:
        """Trim the heap if ``nbytes`` more, and what running programs may still take, exceed the limit.

        The system is asked only where ``more_bytes`` exceed what was free last: that takes a step 0.1 to 0.3
        s.
        """
        self._spare -= more_bytes
        if not IS_SUPPORTED or more_bytes <= 0 or self._spare >= 0:
            return
        own_bytes, mapped_bytes = self._own_bytes(), self._arrays().mapped_bytes  # some not touched yet
        heap_bytes = own_bytes - self._own + self._running - self._reusable_bytes(own_bytes, self._running)
        limit_bytes = min(self._limit + self._kept, self._guard.most_bytes - self._own)
        self._spare = min(limit_bytes - mapped_bytes - heap_bytes - nbytes, MOST_UNCHECKED_BYTES)
        if self._spare < 0:
            self._trim()


@contextmanager
def lasting() -> Iterator[None]:
    """Keep the garbage collector away from the objects that exist now, until the block ends.

    To go through those of a plan takes a fifth of a second, in which no thread starts a kernel.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running until the block ends: for what makes many objects that last.

    To go through them again and again took 40 % of the time of a plan of 12,000 units. Nested blocks are one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # all are old now, which the next collection would take a third of a second for
            gc.enable()
