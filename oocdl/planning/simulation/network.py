"""The parts of a simulation: a clock, cores of a host, and a network between hosts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from oocdl.planning.hosts.exchange import SMALL_BYTES

EVENT_LOOP_SHARE = 0.03
"""Share of one core of a host that a worker's event loop takes beside messages between workers: measured,
0.1 s of steps of 1.4 to 3.6 s."""


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
        """Run until nothing more happens."""
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
        """Number of the last request to the clock, the only one that counts."""

    def spend(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of equal kind, and what is between them."""

    hosts: int
    bytes_per_second: float
    """Rate of each host's network interface, in each direction at once."""
    latency_seconds: float = 2e-5
    """Latency from one host to another, for a message without bytes."""
    scheduler_seconds: float = 1e-3
    """Time of the scheduler for each task: measured, with two workers."""
    submit_seconds: float = 8e-5
    """Time of the scheduler for each task before the first one starts: measured."""
    message_seconds: float = 5.5e-4
    """Time of a host's event loop, and of a core, for each message that it sends or gets, one after
    another: measured, 0.31 s of a step with 496 of them in one worker, on cores that compute."""
    wake_seconds: float = 8e-4
    """Delay of each message until the event loop of a host whose cores all compute has one of them:
    measured, small bundles took 1.7 ms from being made to being there."""
    loop_bytes_per_second: float = 3.6e9
    """Rate at which that event loop copies a message, beside that: measured, messages of 1 to 8 MiB
    between workers that do nothing else."""
    task_seconds: float = 1e-3
    """Time of a core for each of the host's tasks of the cluster: measured, 0.03 s of steps of 28 and 33
    of them."""
    pass_seconds: float = 1e-2
    """Time of the driver for a pass beside its tasks, half of it before they begin and half when they are
    over: measured, members heard of a pass after 10 to 12 ms, and the driver of its end after 7."""
    notice_seconds: float = 2e-3
    """Delay of a message between a worker and the scheduler: Dask collects them for so long."""
    shares_cores: bool = True
    """Whether what a host copies, and puts together for units, takes its cores from what computes."""

    def seconds(self, done_seconds: float, tasks: Sequence[int]) -> float:
        """Return the seconds of a pass whose work is done so long after it has begun.

        ``tasks``: number of each host's tasks. Between two of them it computes nothing, and one scheduler
        handles those of all hosts in turn; a host alone has none.
        """
        if self.hosts == 1:
            return done_seconds
        hop_seconds = self.scheduler_seconds + 2 * self.notice_seconds
        handled_seconds = sum(tasks) * self.scheduler_seconds
        begun_seconds = self.pass_seconds + sum(tasks) * self.submit_seconds + self.notice_seconds
        return begun_seconds + max(done_seconds + max(tasks) * hop_seconds, handled_seconds)


class Network:
    """Messages queue at the interface of the host that sends them, and at that of the one that takes them.

    Connections share an interface: small messages overtake large ones, which take so much longer. The
    switches between have room for all that interfaces can send.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.loop_seconds = [0.0] * cluster.hosts
        self.sent_bytes = [0] * cluster.hosts
        self.received_bytes = [0] * cluster.hosts
        self.clear()

    def clear(self) -> None:
        """Empty all queues; counts stay."""
        hosts = range(self.cluster.hosts)
        self._out_free, self._in_free = ([[0.0, 0.0] for _ in hosts] for _ in range(2))
        """Host -> when its interface has passed all small messages, and when all."""
        self._loop_free = [0.0 for _ in hosts]

    def loop_takes(self, nbytes: int) -> float:
        """Seconds that an event loop takes for a message."""
        return self.cluster.message_seconds + nbytes / self.cluster.loop_bytes_per_second

    def handle(self, when: float, host: int, nbytes: int) -> float:
        """Return when the event loop of a host has handled a message of which it hears at ``when``."""
        takes = self.loop_takes(nbytes)
        self._loop_free[host] = max(self._loop_free[host], when) + takes
        self.loop_seconds[host] += takes
        return self._loop_free[host]

    def transfer(self, now: float, sender: int, receiver: int, nbytes: int) -> float:
        """Return when a message that leaves now has arrived."""
        takes, latency = nbytes / self.cluster.bytes_per_second, self.cluster.latency_seconds
        is_large = nbytes > SMALL_BYTES
        leaves = _pass(self._out_free[sender], now, takes, is_large) - takes
        arrived = _pass(self._in_free[receiver], leaves + latency, takes, is_large)
        self.sent_bytes[sender] += nbytes
        self.received_bytes[receiver] += nbytes
        return arrived


def _pass(free: list[float], when: float, takes: float, is_large: bool) -> float:
    """Return when an interface has passed a message that is there at ``when``; updates ``free``."""
    small, every = free
    done = max(every if is_large else small, when) + takes
    free[0] = small if is_large else done
    free[1] = max(done, every + takes) if every > when else done
    return done
