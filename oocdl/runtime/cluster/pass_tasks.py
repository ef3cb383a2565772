"""Makes the Dask tasks of a pass: they begin and end it on each member, and show what each works at.

A member runs its calls by itself, and asks others for what it reads of theirs (``transfers``). Tasks hold no
arrays and do nothing but wait, each for the one before it on its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.hosts.shown_groups import shown_groups
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import DaskKey, TaskKey, TaskKind, dask_key, task_key
from oocdl.runtime.cluster import worker_tasks
from oocdl.runtime.dask_private import Task, TaskRef


@dataclass(frozen=True)
class Step:
    """A task of every pass of one kind."""

    key: TaskKey
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    after: tuple[TaskKey, ...]


def steps_of(exchange: Exchange, plan_id: str, members: int, threads: int) -> list[Step]:
    """Return the tasks of a pass on members of so many threads, without what differs from pass to pass."""
    found: list[Step] = []
    for number, shown in enumerate(shown_groups(exchange, members, threads)):
        last = _begin(number)
        for together in shown:
            key = TaskKey(TaskKind.LAYERS, exchange.groups[together[0]], str(together[0]), number)
            found.append(Step(key, worker_tasks.layers, (together,), (last,)))
            last = key
        found.append(Step(end_key(number), worker_tasks.end, (plan_id,), (last,)))
    return found


def tasks_of(
    steps: Sequence[Step], members: int, pass_name: str, run_id: str, facts: tuple[str, PassInfo, bool]
) -> dict[DaskKey, Task]:
    """Return the tasks of one pass; ``facts`` (plan id, pass, whether it starts a step) go once a member."""
    begins = [Step(_begin(number), worker_tasks.begin, (pass_name, *facts), ()) for number in range(members)]
    names = {step.key: dask_key(step.key, pass_name) for step in (*begins, *steps)}
    return {
        names[step.key]: Task(
            names[step.key],
            step.function,
            run_id,
            *step.arguments,
            *(TaskRef(names[key]) for key in step.after),
        )
        for step in (*begins, *steps)
    }


def end_key(number: int) -> TaskKey:
    """Return the key of the task that ends a member's part of a pass."""
    return TaskKey(TaskKind.END, "", "", number)


def worker_of_key(addresses: Sequence[str], key: DaskKey) -> list[str]:
    """Return the address of the worker that runs a task; the scheduler asks for it."""
    return [addresses[task_key(key).number]]


def _begin(number: int) -> TaskKey:
    return TaskKey(TaskKind.BEGIN, "", "", number)
