"""Our own ``get``: Dask's scheduler protocol, in plan order, with a bounded window.

Dask's threaded scheduler orders tasks by its own heuristics and starts as many as
it likes; a plan's order is better (a shard's neighbours are still in memory) and
its memory is bounded. Here tasks start in the order in which the graph lists them,
never more than ``window`` ahead of the oldest unfinished one, each on one of
``workers`` threads. Results are dropped as soon as nothing needs them.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dask._task_spec import DataNode, GraphNode, convert_legacy_graph


class _Run:
    """One graph being executed."""

    def __init__(self, graph: Mapping[Hashable, Any], wanted: set[Hashable], window: int) -> None:
        tasks: dict[Hashable, GraphNode] = convert_legacy_graph(dict(graph))
        self.tasks, self.window = tasks, window
        self.order = {key: number for number, key in enumerate(tasks)}
        self.keys = list(tasks)
        self.waiting = {key: len(task.dependencies) for key, task in tasks.items()}
        self.dependents: dict[Hashable, list[Hashable]] = {key: [] for key in tasks}
        self.needed = {key: 0 for key in tasks}
        for key, task in tasks.items():
            for dependency in task.dependencies:
                self.dependents[dependency].append(key)
                self.needed[dependency] += 1
        self.wanted = wanted
        self.results: dict[Hashable, Any] = {}
        self.ready = [self.order[key] for key, count in self.waiting.items() if count == 0]
        heapq.heapify(self.ready)
        self.done = [False] * len(self.keys)
        self.oldest = 0
        self.running = 0
        self.finished = 0
        self.error: BaseException | None = None
        self.change = threading.Condition()

    def next_task(self) -> GraphNode | None:
        """The first task that may start now; blocks until there is one; None at the end."""
        with self.change:
            while True:
                if self.error is not None or self.finished == len(self.keys):
                    return None
                # Where the graph's order cannot be run, the first that is ready goes on.
                if self.ready and (self.running == 0 or self.ready[0] < self.oldest + self.window):
                    self.running += 1
                    return self.tasks[self.keys[heapq.heappop(self.ready)]]
                self.change.wait()

    def arguments(self, task: GraphNode) -> dict[Hashable, Any]:
        with self.change:
            return {key: self.results[key] for key in task.dependencies}

    def finish(self, task: GraphNode, result: Any) -> None:
        """Store a result, wake what waited for it, drop what nothing needs any more."""
        dropped = []
        with self.change:
            self.running -= 1
            number = self.order[task.key]
            self.done[number] = True
            while self.oldest < len(self.done) and self.done[self.oldest]:
                self.oldest += 1
            self.finished += 1
            if self.needed[task.key] or task.key in self.wanted:
                self.results[task.key] = result
            for key in self.dependents[task.key]:
                self.waiting[key] -= 1
                if self.waiting[key] == 0:
                    heapq.heappush(self.ready, self.order[key])
            for key in task.dependencies:
                self.needed[key] -= 1
                if self.needed[key] == 0 and key not in self.wanted:
                    dropped.append(self.results.pop(key))
            self.change.notify_all()
        del dropped

    def fail(self, error: BaseException) -> None:
        with self.change:
            self.error = self.error or error
            self.change.notify_all()

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


def get(graph: Any, keys: Any, *, workers: int = 2, window: int = 64, **_: Any) -> Any:
    """Compute ``keys`` of ``graph`` in the order of the graph.

    Parameters
    ----------
    graph
        A Dask graph, best listed in an order in which it can be run.
    keys
        A key, or a (nested) list of keys.
    workers
        Threads that run tasks.
    window
        How many tasks beyond the oldest unfinished one may start.

    >>> get({"a": 1, "b": (lambda x: x + 1, "a")}, ["a", "b"])
    (1, 2)
    """
    wanted = set(_flatten(keys))
    tasks = graph if isinstance(graph, Mapping) else graph.__dask_graph__()
    run = _Run(tasks, wanted, window)
    with ThreadPoolExecutor(workers, thread_name_prefix="oocdl") as pool:
        futures = [pool.submit(run.work) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        except BaseException as error:
            # Ctrl-C arrives here: what runs is finished, nothing more is started.
            run.fail(error)
            raise
    if run.error is not None:
        raise run.error
    return _collect(keys, run.results)


def _flatten(keys: Any) -> list[Hashable]:
    if isinstance(keys, list):
        return [key for inner in keys for key in _flatten(inner)]
    return [keys]


def _collect(keys: Any, results: Mapping[Hashable, Any]) -> Any:
    if isinstance(keys, list):
        return tuple(_collect(inner, results) for inner in keys)
    return results[keys]


__all__: Sequence[str] = ["get"]
