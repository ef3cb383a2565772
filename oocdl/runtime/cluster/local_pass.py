"""Runs one pass on one member of a crew: all its calls, in plan order, by our own scheduler.

Bundles for other members are handed out as soon as they are made; those of others come in while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from oocdl.errors import StoreError
from oocdl.planning.hosts.exchange import Bundle
from oocdl.planning.hosts.local_order import LocalOrder
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import TaskKey
from oocdl.planning.window_order import window_of
from oocdl.runtime import execute
from oocdl.runtime.cluster.cluster_progress import Work
from oocdl.runtime.dask_private import DataNode, GraphNode, Task, TaskRef
from oocdl.runtime.scheduler import Running
from oocdl.storage.cache.chunk import Chunk


class Superseded(StoreError):
    """A task asks for something of a pass, or of a crew, that was given up."""


class LocalPass:
    """A pass that runs on this member. ``take`` gives a stored piece; results of keys ``wanted`` are kept.

    ``facts`` are the id of the run, the name of the pass, which no other of the run has, the plan id of its
    kind and what its units are told. ``work`` counts its units.
    """

    def __init__(
        self,
        order: LocalOrder,
        take: Callable[[TaskKey], Chunk],
        wanted: Sequence[TaskKey],
        facts: tuple[str, str, str, PassInfo],
        threads: int,
        work: Work,
    ) -> None:
        self._threads, self._work = threads, work
        self._order, (self._run_id, self.name, self.plan_id, self._info) = order, facts
        sent = [step.work for step in order.steps if isinstance(step.work, Bundle)]
        self._sends: dict[int, Future[tuple[Chunk, ...]]] = {one.key.number: Future() for one in sent}
        self.groups: list[Future[None]] = [Future() for _ in order.calls_of_group]
        self.done: Future[dict[TaskKey, Chunk]] = Future()
        self._left = list(order.calls_of_group)
        for group, left in zip(self.groups, self._left, strict=True):
            if not left:
                group.set_result(None)
        tasks, arriving = self._tasks(take)
        bundles = [one.key for one in sent]
        self._ends = _ends(order)
        self._segment: Future[None] = Future()
        self._running = Running(tasks, wanted, window_of(threads), arriving, self._count, bundles, limit=0)
        self._wanted = tuple(wanted)

    def start(self, pool: Executor) -> None:
        """Run the pass on threads of a pool: one more than compute, to read what comes next meanwhile.

        They wait before each segment until that is asked for.
        """
        workers = [pool.submit(self._running.work) for _ in range(self._threads + 1)]
        left = [len(workers)]

        def over(worker: Future[None]) -> None:
            error = worker.exception()
            if error is not None:
                self._running.fail(error)
            with self._running.lock:
                left[0] -= 1
                last = not left[0]
            if last:
                self._finish()

        for worker in workers:
            worker.add_done_callback(over)

    def run_through(self, group: int) -> Future[None]:
        """Run all that is left up to the end of a group of layers; return a future of when that is done."""
        with self._running.lock:
            segment: Future[None] = Future()
            self._segment = segment
            if self._running.error is not None:
                segment.set_exception(self._running.error)
            else:
                self._running.run_to(self._ends[group], partial(_done, segment))
        return segment

    @property
    def is_between(self) -> bool:
        """Whether all that was asked for is done, and the next segment is not asked for yet."""
        return self._running.order.at_limit

    def arrive(self, keys: Sequence[TaskKey], chunks: Sequence[Chunk]) -> None:
        """Take chunks that have come from another member."""
        for key, chunk in zip(keys, chunks, strict=True):
            self._running.arrive(key, chunk)

    def fail(self, error: BaseException) -> None:
        """Start nothing more; whoever waits for anything of this pass gets the error."""
        self._running.fail(error)

    def bundle(self, number: int) -> Future[tuple[Chunk, ...]]:
        """Return a future of the chunks of a bundle, by its number.

        Raises Superseded if they were handed out: a task of Dask's that runs again cannot have them again.
        """
        try:
            return self._sends[number]
        except KeyError:
            raise Superseded(f"bundle {number} of the pass was handed out before") from None

    def uses(self, key: TaskKey) -> tuple[int, ...]:
        """Return the plan positions at which this member reads a chunk that arrives."""
        return self._order.uses[key]

    def handed_out(self, number: int) -> None:
        """Let go of the chunks of a bundle, which the cluster holds from now on."""
        self._sends.pop(number, None)

    def _finish(self) -> None:
        """Tell everybody who waits, as the last thread is done."""
        error = self._running.error
        if error is None:
            made = {key: self._running.results[key] for key in self._wanted}
            self._running.leave()
            self.done.set_result(made)
            return
        with self._running.lock:
            waiting: list[Future[Any]] = [*self._sends.values(), *self.groups, self._segment, self.done]
            for future in waiting:
                if not future.done():
                    future.set_exception(error)

    def _count(self, key: Any) -> None:
        """Count a call as done, which may be the last one of its group."""
        group = self._order.group_of.get(key)
        if group is not None:
            self._left[group] -= 1
            if not self._left[group]:
                self.groups[group].set_result(None)

    def _hand_out(self, number: int, *chunks: Chunk) -> None:
        """Hand out the chunks of a bundle, as its task."""
        self._sends[number].set_result(chunks)

    def _tasks(self, take: Callable[[TaskKey], Chunk]) -> tuple[dict[Any, GraphNode], list[TaskKey]]:
        """Return all tasks in order, and the keys of those that arrive."""
        run, run_id = self._work.run, self._run_id
        tasks: dict[Any, GraphNode] = {key: Task(key, take, key) for key in self._order.stored}
        arriving: list[TaskKey] = []
        for key, work, number in self._order.steps:
            if work is None:
                arriving.append(key)
                tasks[key] = DataNode(key, None)
            elif isinstance(work, Strip):
                source = TaskRef(work.source)
                tasks[key] = Task(key, run, execute.run_strip, run_id, work.region, source)
            elif isinstance(work, Bundle):
                items = [TaskRef(item) for item in work.items]
                tasks[key] = Task(key, self._hand_out, key.number, *items)
            else:
                tasks[key] = execute.call_task(work, run_id, self.plan_id, number, self._info, run)
        return tasks, arriving


def _done(future: Future[None]) -> None:
    if not future.done():  # as it has failed
        future.set_result(None)


def _ends(order: LocalOrder) -> list[int]:
    """Return, for each group of layers, the number of tasks before the first call of a later group."""
    found: list[int] = []
    for number, step in enumerate(order.steps, len(order.stored)):
        if step.key in order.group_of:
            found += [number] * (order.group_of[step.key] - len(found))
    return found + [len(order.stored) + len(order.steps)] * (len(order.calls_of_group) - len(found))
