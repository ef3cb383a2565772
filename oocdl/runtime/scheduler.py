"""Our own ``get``: Dask's scheduler protocol, in plan order, with a bounded window.

Dask's threaded scheduler orders tasks by its own heuristics and starts as many as
it likes; a plan's order is better (a shard's neighbours are still in memory) and
its memory is bounded. Here tasks start in the order in which the graph lists them,
never more than ``window`` ahead of the oldest unfinished one, each on one of
``workers`` threads. Results are dropped as soon as nothing needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any

from dask.core import flatten
from dask.local import nested_get

from oocdl.host.main_heap import MainHeapThreads
from oocdl.planning.window_order import WINDOW_TASKS, WindowOrder, window_of
from oocdl.runtime.dask_private import DataNode, GraphNode, convert_legacy_graph

TICK_SECONDS = 1.0
"""Time between two calls of ``tick``."""


class Running:
    """One graph that is being executed, by the threads that call ``work``.

    Results of ``arriving`` keys come from elsewhere, by ``arrive``; their tasks only say where in the order
    they are awaited. Tasks of ``at_once`` take no time: whoever finishes what they wait for runs them.
    ``finished`` is called with the key of each task that is done, under the lock. No task from ``limit`` on
    starts before ``run_to`` asks for it.
    """

    def __init__(
        self,
        graph: Mapping[Hashable, Any],
        wanted: Collection[Hashable],
        window: int = WINDOW_TASKS,
        arriving: Collection[Hashable] = (),
        finished: Callable[[Any], None] | None = None,
        at_once: Collection[Hashable] = (),
        limit: int | None = None,
    ) -> None:
        tasks: dict[Hashable, GraphNode] = convert_legacy_graph(dict(graph))
        self.numbers = {key: number for number, key in enumerate(tasks)}
        self.tasks = list(tasks.values())
        self.finished = finished
        dependencies = [[self.numbers[key] for key in task.dependencies] for task in self.tasks]
        self.order = WindowOrder(
            dependencies,
            [self.numbers[key] for key in wanted],
            window,
            [self.numbers[key] for key in arriving],
            [self.numbers[key] for key in at_once],
            limit,
        )
        self.results: dict[Hashable, Any] = {}
        self.error: BaseException | None = None
        self.lock = threading.RLock()  # entered itself: a signal in the entry of a Condition leaves it locked
        self.change = threading.Condition(self.lock)
        self._at_limit: Callable[[], None] | None = None

    def run_to(self, limit: int, done: Callable[[], None]) -> None:
        """Let the tasks before number ``limit`` start; call ``done`` when all of them have finished."""
        with self.lock:
            self.order.raise_limit(limit)
            if self.order.at_limit:
                done()
            else:
                self._at_limit = done
            self.change.notify_all()

    def next_task(self) -> GraphNode | None:
        """The first task that may start now; blocks until there is one; None at the end."""
        with self.lock:
            while self.error is None and not self.order.over:
                number = self.order.next()
                if number is not None:
                    return self.tasks[number]
                self.change.wait()
        return None

    def arguments(self, task: GraphNode) -> dict[Hashable, Any]:
        with self.lock:
            return {key: self.results[key] for key in task.dependencies}

    def finish(self, task: GraphNode, result: Any) -> None:
        """Store a result, wake what waited for it, drop what nothing needs any more."""
        with self.lock:
            self.results[task.key] = result
            useless = self.order.finish(self.numbers[task.key])
            while (number := self.order.due()) is not None:
                due = self.tasks[number]
                self.results[due.key] = due({key: self.results[key] for key in due.dependencies})
                useless += self.order.finish(number)
            dropped = [self.results.pop(self.tasks[number].key) for number in useless]
            if self.finished is not None:
                self.finished(task.key)
            if self.order.at_limit and self._at_limit is not None:
                done, self._at_limit = self._at_limit, None
                done()
            self.change.notify_all()
        del dropped

    def arrive(self, key: Hashable, result: Any) -> None:
        """Take the result of an arriving key."""
        self.finish(self.tasks[self.numbers[key]], result)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            self.change.notify_all()

    def leave(self) -> None:
        """Let go of all tasks and results, once all threads are done.

        Tasks, and what ``finished`` is a method of, may refer to who refers to this: what is in such a circle
        stays in memory until the collector comes.
        """
        self.tasks, self.finished, self._at_limit = [], None, None
        self.results.clear()

    def work(self) -> None:
        """One thread: run tasks until none is left."""
        while (task := self.next_task()) is not None:
            try:
                values = self.arguments(task)
                result = task.value if isinstance(task, DataNode) else task(values)
                del values
            except BaseException as error:  # handed to the caller of get
                self.fail(error)
                return
            self.finish(task, result)
            del result


def get(
    graph: Any,
    keys: Any,
    *,
    workers: int = 2,
    pool: Executor | None = None,
    tick: Callable[[], None] | None = None,
    **_: Any,
) -> Any:
    """Compute ``keys`` of ``graph`` in the order of the graph.

    Parameters
    ----------
    graph
        A Dask graph, best listed in an order in which it can be run.
    keys
        A key, or a (nested) list of keys.
    workers
        Threads that run tasks.
    pool
        Pool of so many threads; None: they are started, and end with the call.
    tick
        Called about once a second, by the thread that called ``get``, while tasks run. A signal's exception
        may end it only where it holds no lock that tasks need.

    >>> get({"a": 1, "b": (lambda x: x + 1, "a")}, ["a", "b"])
    (1, 2)
    """
    wanted = set(flatten([keys]))  # type: ignore[no-untyped-call]
    tasks = graph if isinstance(graph, Mapping) else graph.__dask_graph__()
    run = Running(tasks, wanted, window_of(workers - 1))  # one reads while the others compute
    begun, ended, told = list[None](), list[None](), SimpleQueue[None]()

    def work() -> None:
        begun.append(None)
        try:
            run.work()
        except BaseException as error:
            run.fail(error)
        ended.append(None)
        told.put(None)

    with nullcontext(pool) if pool else MainHeapThreads(workers) as threads:
        try:
            for _thread in range(workers):
                threads.submit(work)
            while len(ended) < workers:
                with suppress(Empty):  # no wait for futures: a signal could leave their locks taken
                    told.get(timeout=TICK_SECONDS)
                    continue
                if tick is not None:
                    tick()
        except BaseException as error:
            # Ctrl-C arrives here: what runs is finished, nothing more is started.
            run.fail(error)
            raise
        finally:
            while len(ended) < len(begun):
                with suppress(Empty):
                    told.get(timeout=TICK_SECONDS)
            if run.error is not None:  # whoever keeps the error would keep all arrays
                run.leave()
    if run.error is not None:
        raise run.error
    return nested_get(keys, run.results)  # type: ignore[no-untyped-call]
