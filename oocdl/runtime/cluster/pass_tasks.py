"""The Dask tasks of a pass: what crosses between members, and what each of them works at.

A member runs its calls by itself; tasks of Dask's begin and end its part of a pass, hand bundles out and
take them in, and last as long as it works at a group of layers. They hold no arrays but bundles, and none
waits for one that comes later in plan order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask._task_spec import Task, TaskRef

from oocdl.planning.hosts.exchange import Bundle, Exchange
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import DaskKey, TaskKey, TaskKind, dask_key, task_key
from oocdl.runtime.cluster import worker_tasks

GROUPS_AHEAD = 4
"""A bundle is fetched when its reader is so many groups of layers behind: earlier it would only take room."""


@dataclass(frozen=True)
class Step:
    """A task of every pass of one kind."""

    key: TaskKey
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    after: tuple[TaskKey, ...]


def steps_of(exchange: Exchange, plan_id: str, members: int) -> list[Step]:
    """The tasks of a pass, without what differs from pass to pass."""
    found: list[Step] = []
    works: list[dict[int, TaskKey]] = [{} for _ in range(members)]
    """For each member the tasks of the groups at which it works."""
    for (_, call), group in zip(exchange.placed.calls, exchange.group_of, strict=True):
        mine = works[exchange.placed.worker_of[call.key]]
        if group not in mine:
            mine[group] = TaskKey(TaskKind.LAYERS, exchange.groups[group], str(group), 0)
    ends: list[list[TaskKey]] = [[] for _ in range(members)]
    for number, mine in enumerate(works):
        last = _begin(number)
        for group in sorted(mine):
            key = mine[group] = mine[group]._replace(number=number)
            found.append(Step(key, worker_tasks.layers, (group,), (last,)))
            last = key
        ends[number].append(last)
    for bundle in exchange.bundles:
        taken = _take(bundle)
        before = _last_before(works[bundle.sender], bundle.group, bundle.sender)
        found.append(Step(bundle.key, worker_tasks.send, (bundle.key,), (before,)))
        ahead = _last_before(works[bundle.receiver], bundle.reader - GROUPS_AHEAD, bundle.receiver)
        found.append(Step(taken, worker_tasks.take, (bundle.items,), (bundle.key, ahead)))
        ends[bundle.receiver].append(taken)
    for number, after in enumerate(ends):
        found.append(Step(end_key(number), worker_tasks.end, (plan_id,), tuple(after)))
    return found


def tasks_of(
    steps: Sequence[Step], members: int, pass_name: str, run_id: str, facts: tuple[str, PassInfo, bool]
) -> dict[DaskKey, Task]:
    """The tasks of one pass. ``facts`` (plan id, what differs, whether it starts a step) go once a member."""
    begins = [Step(_begin(number), worker_tasks.begin, facts, ()) for number in range(members)]
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
    """The key of the task that ends a member's part of a pass."""
    return TaskKey(TaskKind.END, "", "", number)


def member_of_key(addresses: Sequence[str], key: DaskKey) -> list[str]:
    """The address of the worker that runs a task; the scheduler asks for it."""
    one = task_key(key)
    by_value = one.kind in (TaskKind.BUNDLE, TaskKind.TAKE)
    return [addresses[int(one.value) if by_value else one.number]]


def priority_of_key(positions: Sequence[int], key: DaskKey) -> int:
    """How urgent a task is: bundles that are read first come first, after all that takes no time."""
    one = task_key(key)
    return -positions[one.number] if one.kind in (TaskKind.BUNDLE, TaskKind.TAKE) else 1


def _begin(number: int) -> TaskKey:
    return TaskKey(TaskKind.BEGIN, "", "", number)


def _take(bundle: Bundle) -> TaskKey:
    return TaskKey(TaskKind.TAKE, bundle.key.layer, str(bundle.receiver), bundle.key.number)


def _last_before(works: Mapping[int, TaskKey], group: int, number: int) -> TaskKey:
    """The task of the last group before ``group`` at which a member works; else the one that begins."""
    while group > 0:
        group -= 1
        if group in works:
            return works[group]
    return _begin(number)
