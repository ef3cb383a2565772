"""Every underscored name of Dask that oocdl uses; no other module uses one, and a test holds that.

A new version of Dask may change these without a word: look here first when one breaks a run. What Dask has in
public and does not document (a worker's memory monitor, its logs, its number of threads) stands in
``cluster.dask_limits`` and ``cluster.dask_records``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dask._expr import LLGExpr
from dask._task_spec import DataNode, GraphNode, List, Task, TaskRef, convert_legacy_graph

__all__ = ["DataNode", "GraphNode", "LLGExpr", "List", "Task", "TaskRef", "convert_legacy_graph"]


def run_on_workers(
    client: Any, function: Callable[..., Any], *arguments: Any, workers: Sequence[str], nanny: bool = False
) -> Coroutine[Any, Any, dict[str, Any]]:
    """Call a function on workers, or on their nannies; an error of one of them is its answer.

    ``Client.run`` does the same, but waits in the thread that calls it.
    """
    answers: Coroutine[Any, Any, dict[str, Any]] = client._run(
        function, *arguments, workers=list(workers), nanny=nanny, on_error="return"
    )
    return answers


def run_on_scheduler(client: Any, function: Callable[..., Any], *arguments: Any) -> Coroutine[Any, Any, Any]:
    """Call a function on the scheduler; ``Client.run_on_scheduler`` waits in the thread that calls it."""
    answer: Coroutine[Any, Any, Any] = client._run_on_scheduler(function, *arguments)
    return answer


def register_scheduler_plugin(client: Any, plugin: Any) -> Coroutine[Any, Any, Any]:
    """Give the scheduler a plugin, unless it has one of that name."""
    answer: Coroutine[Any, Any, Any] = client._register_scheduler_plugin(plugin, plugin.name, idempotent=True)
    return answer


def gather(client: Any, futures: Sequence[Any]) -> Coroutine[Any, Any, list[Any]]:
    """Fetch results, without waiting in the thread that calls."""
    results: Coroutine[Any, Any, list[Any]] = client._gather(list(futures))
    return results


def error_of(future: Any) -> Exception | None:
    """Return what a task that has failed has raised; None if that did not arrive.

    ``Future.exception`` asks the scheduler, which may be gone.
    """
    error: Exception | None = None if future._state is None else future._state.exception
    return error


def is_started(client: Any) -> bool:
    """Whether nobody has closed a client on purpose: its event loop runs."""
    return bool(client._loop_runner.is_started())


def call_soon(server: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Begin a coroutine that a worker or scheduler waits for when it closes."""
    server._ongoing_background_tasks.call_soon(function, *arguments)
