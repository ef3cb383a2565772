"""Counts what the tasks of a session take, the bytes that it moves, and the progress of a pass.

Tasks say how long they took (``Measured.add``), a session when a pass is over (``Measured.end``). On the
board a task sets one byte a phase, and leaves its times when it is done: no lock, and about a microsecond.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from oocdl.events import PassTimes

MEMORY = ("peak_bytes", "process_bytes")
"""Fields that are the most so far; all others add up."""


@dataclass(frozen=True)
class Moved:
    """The bytes that a step moved, and the memory that it took."""

    unit_read_bytes: int
    """Read by units, as the plan counts."""
    unit_written_bytes: int
    """Made by units, as the plan counts."""
    read_bytes: int
    """Read from the spill."""
    written_bytes: int
    """Written to the spill."""
    peak_bytes: int
    """Counted peak of the process so far: base, running programs and tier. Of several, of the largest."""
    process_bytes: int
    """The most memory of its own that the process was seen to have so far. Of several, of the largest."""


@dataclass
class Spent:
    """The cost of one layer's tasks: seconds one after another, and bytes."""

    units: int = 0
    wait_seconds: float = 0.0
    """Waiting for memory, and for a compute slot."""
    gather_seconds: float = 0.0
    """Reading and putting together inputs."""
    compute_seconds: float = 0.0
    read_bytes: int = 0
    made_bytes: int = 0

    def add(self, other: Spent) -> None:
        """Add another's numbers to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class KindTotals:
    """All passes of one kind."""

    passes: int = 0
    seconds: float = 0.0
    spill_read_bytes: int = 0
    spill_written_bytes: int = 0
    layers: dict[str, Spent] = field(default_factory=dict)

    def add(self, spill_read_bytes: int, spill_written_bytes: int, layers: Mapping[str, Spent]) -> None:
        """Add what a process has moved and spent."""
        self.spill_read_bytes += spill_read_bytes
        self.spill_written_bytes += spill_written_bytes
        for layer, spent in layers.items():
            self.layers.setdefault(layer, Spent()).add(spent)


class Measured:
    """The cost of a session's tasks. One lock, taken once a task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Spent] = {}
        self._ended: Counter[str] = Counter()
        self.read_bytes = 0
        """Read by units, as the plan counts."""
        self.made_bytes = 0
        """Made by units, as the plan counts."""
        self.kinds: dict[str, KindTotals] = {}
        """Plan id -> totals."""

    def add(self, layer: str, spent: Spent) -> None:
        """Count what one task of a layer took."""
        with self._lock:
            self.read_bytes += spent.read_bytes
            self.made_bytes += spent.made_bytes
            self._now.setdefault(layer, Spent()).add(spent)

    def end(self, plan_id: str, seconds: float, spill_read_bytes: int, spill_written_bytes: int) -> None:
        """A pass is over: its tasks are those since the last one's end."""
        with self._lock:
            now, self._now = self._now, {}
        self._ended[plan_id] += 1
        if self._ended[plan_id] <= 2:
            self.kinds[plan_id] = KindTotals()
        sums = self.kinds[plan_id]
        sums.passes += 1
        sums.seconds += seconds
        sums.add(spill_read_bytes, spill_written_bytes, now)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


def merged(several: Iterable[Measured]) -> Measured:
    """Add up what several processes measured of the same passes: a pass takes as long as the slowest."""
    found = Measured()
    for one in several:
        found.read_bytes += one.read_bytes
        found.made_bytes += one.made_bytes
        for kind, totals in one.kinds.items():
            sums = found.kinds.setdefault(kind, KindTotals())
            sums.passes = max(sums.passes, totals.passes)
            sums.seconds = max(sums.seconds, totals.seconds)
            sums.add(totals.spill_read_bytes, totals.spill_written_bytes, totals.layers)
    return found


TIMES = 6
"""Number of values for each task: see ``PassTimes.times``."""


class Phase(IntEnum):
    """The phase of a task; greater means later."""

    WAITING = 0
    READING = 1
    """It waits for memory, or reads its inputs."""
    COMPUTING = 2
    """It waits for a permit, or its program runs."""
    WRITING = 3
    DONE = 4


class Board:
    """The phases of all calls of the pass that runs in this process, and when those of the last one ran."""

    def __init__(self, most_calls: int) -> None:
        self._most_calls = most_calls
        self._threads: dict[str, int] = {}
        self.last_pass: PassTimes | None = None
        """Times of the tasks of the pass before this one."""
        self._clear("", most_calls)

    def _clear(self, plan_id: str, calls: int) -> None:
        self._plan_id, self._calls = plan_id, calls
        self.phases = bytearray(self._most_calls)
        """A ``Phase`` for each call, by its number."""
        self._times = np.zeros((self._most_calls, TIMES))
        self._of_thread = np.zeros(self._most_calls, np.uint8)

    def begin(self, plan_id: str, calls: int) -> None:
        """A pass of so many calls begins: the one before is over."""
        done = np.frombuffer(self.phases, np.uint8)[: self._calls] == Phase.DONE
        numbers = np.flatnonzero(done).astype(np.int32)
        since_1970 = time.time() - time.perf_counter()
        if numbers.size:
            self.last_pass = PassTimes(
                plan_id=self._plan_id,
                numbers=numbers,
                times=self._times[numbers] + since_1970,
                threads=self._of_thread[numbers],
            )
        self._clear(plan_id, calls)

    def done(self, number: int, times: tuple[float, ...]) -> None:
        """The calling thread is done with a call; ``times`` are seconds of ``perf_counter``."""
        # Every pass has threads of its own, by the same names.
        name = threading.current_thread().name
        self._of_thread[number] = self._threads.setdefault(name, len(self._threads) % 256)
        self._times[number] = times
        self.phases[number] = Phase.DONE

    def now(self) -> bytes:
        """The phases of the pass that runs."""
        return bytes(self.phases[: self._calls])
