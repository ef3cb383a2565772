"""The clock of a simulation, and cores that all that runs on a host shares."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

EVENT_LOOP_SHARE = 0.03
"""Of one core of a host, what a worker's event loop takes beside messages between workers: measured, 0.1 s of
steps of 1.4 to 3.6 s."""


class Clock:
    """The time of a simulation, and what is going to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have ``call`` made at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def run(self) -> None:
        """Until nothing more happens."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class Cores:
    """Cores of a host, without an event loop's share: what runs has one each, or equal shares of them all."""

    def __init__(self, clock: Clock, number: int, event_loop_share: float = EVENT_LOOP_SHARE) -> None:
        self._clock, self._number = clock, number - event_loop_share
        self._spent = self._seen = 0.0
        """Seconds that each of those that run has had of a core since the start, and when that was so."""
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._plan = 0
        """Of what the clock has been told, only the last counts."""

    def spend(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` when so many seconds of one core have been spent from now on."""
        self._go_on()
        heapq.heappush(self._running, (self._spent + seconds, next(self._numbers), then))
        self._foresee()

    def _speed(self) -> float:
        return min(1.0, self._number / len(self._running))

    def _go_on(self) -> None:
        now = self._clock.now
        if self._running:
            self._spent += (now - self._seen) * self._speed()
        self._seen = now

    def _foresee(self) -> None:
        self._plan += 1
        if self._running:
            plan, left = self._plan, self._running[0][0] - self._spent
            self._clock.at(self._clock.now + max(left, 0.0) / self._speed(), lambda: self._done(plan))

    def _done(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._go_on()
        self._spent, _, then = heapq.heappop(self._running)
        self._foresee()
        then()
