"""The order in which the tasks of a pass start, and when their results may go. No threads, no clock.

The scheduler asks under its lock, the simulator on its clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

WINDOW_TASKS, THREAD_TASKS = 64, 32
"""Tasks beyond the oldest unfinished one that may start: the least number, and that for each thread."""


def window_of(threads: int) -> int:
    """Return the window for so many threads: what a unit makes are tasks as well, seven for many a gradient.

    >>> window_of(2), window_of(16)
    (64, 512)
    """
    return max(WINDOW_TASKS, THREAD_TASKS * threads)


class WindowOrder:
    """Starts tasks by number, none further than a window beyond the oldest that is unfinished.

    ``dependencies[number]`` are the distinct tasks whose results a task needs. Results of ``wanted`` are
    needed by the caller, too. Those of ``arriving`` come from elsewhere: they never start, and the caller
    tells when they are there (``finish``); until all are, the window begins at the oldest that runs or may.
    Those of ``at_once`` take no time and no thread: as soon as they may run they are ``due``. Tasks from
    ``limit`` on do not start until the caller has raised it.

    >>> order = WindowOrder([[], [0], [], [1]], wanted=[3], window_tasks=2)
    >>> order.next(), order.next()
    (0, None)
    >>> order.finish(0), order.next(), order.next(), order.next()
    ([], 1, 2, None)
    >>> order.finish(1)  # nothing else needs the result of 0
    [0]
    """

    def __init__(
        self,
        dependencies: Sequence[Collection[int]],
        wanted: Collection[int],
        window_tasks: int = WINDOW_TASKS,
        arriving: Collection[int] = (),
        at_once: Collection[int] = (),
        limit: int | None = None,
    ) -> None:
        self.dependencies, self.window_tasks = dependencies, window_tasks
        self.finished = 0
        self._running: set[int] = set()
        self._missing = [len(needed) for needed in dependencies]
        self._dependents: list[list[int]] = [[] for _ in dependencies]
        self._readers = [0] * len(dependencies)
        for number, needed in enumerate(dependencies):
            for dependency in needed:
                self._dependents[dependency].append(number)
                self._readers[dependency] += 1
        for number in set(wanted):
            self._readers[number] += 1  # the caller, who never finishes
        self._arriving, self._at_once = set(arriving), frozenset(at_once)
        self._due: list[int] = []
        self._ready = [n for n, less in enumerate(self._missing) if not less and n not in self._arriving]
        heapify(self._ready)
        self._done = [False] * len(dependencies)
        self._oldest = 0
        self._starting = [
            number not in self._arriving and number not in self._at_once for number in range(len(self._done))
        ]
        self._left = 0
        """Number of tasks below the limit that start, and have not finished."""
        self.limit = 0
        self.raise_limit(len(self._done) if limit is None else limit)

    @property
    def running(self) -> int:
        """Number of tasks that have started and not finished."""
        return len(self._running)

    @property
    def at_limit(self) -> bool:
        """Whether every task below the limit that starts has finished."""
        return not self._left

    def raise_limit(self, limit: int) -> None:
        """Let further tasks start, up to ``limit``."""
        self._left += sum(self._starting[self.limit : limit])
        self.limit = max(limit, self.limit)

    @property
    def over(self) -> bool:
        """Whether every task has finished."""
        return self.finished == len(self._done)

    def next(self) -> int | None:
        """The task that starts now; None if no further task may start yet.

        Raises ValueError if none ever will, as tasks depend on each other in a circle.
        """
        ready = self._ready
        # Tasks that wait for what arrives hold up nobody: the window begins at the oldest that runs, or may.
        held = not ready or ready[0] >= self.limit
        if not held and (not self._running or ready[0] < self._first() + self.window_tasks):
            number = heappop(ready)
            self._running.add(number)
            return number
        if not (self.running or self._arriving or self.over or self.limit < len(self._done)):
            raise ValueError(f"tasks depend on each other in a circle; number {self._oldest} waits for it")
        return None

    def _first(self) -> int:
        """The oldest task that runs or may start; without anything that arrives, the oldest of all."""
        return min([self._ready[0], *self._running]) if self._arriving else self._oldest

    def due(self) -> int | None:
        """A task of ``at_once`` that runs now; None if there is none."""
        return self._due.pop() if self._due else None

    def finish(self, number: int) -> list[int]:
        """Note that a task has finished; returns the tasks whose results nothing needs any more."""
        if number in self._arriving:
            self._arriving.remove(number)
        else:
            self._running.remove(number)
        self.finished += 1
        self._left -= self._starting[number]
        done = self._done
        done[number] = True
        while self._oldest < len(done) and done[self._oldest]:
            self._oldest += 1
        for dependent in self._dependents[number]:
            self._missing[dependent] -= 1
            if not self._missing[dependent] and dependent in self._at_once:
                self._due.append(dependent)
                self._running.add(dependent)
            elif not self._missing[dependent]:
                heappush(self._ready, dependent)
        readers = self._readers
        useless = [] if readers[number] else [number]
        for dependency in self.dependencies[number]:
            readers[dependency] -= 1
            if not readers[dependency]:
                useless.append(dependency)
        return useless
