"""The progress of the tasks of a pass, for those who look on while it runs.

A task sets one byte a phase, and leaves its times when it is done: no lock, and about a microsecond a task.
"""

from __future__ import annotations

import threading
import time
from enum import IntEnum

import numpy as np

from oocdl.events import PassTimes

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
