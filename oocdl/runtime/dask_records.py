"""What keeps Dask's own records of a run short, however many passes it has.

Scheduler and workers keep records of tasks that are done, for four reasons. A group of tasks (here, a layer)
that loses its last task is made anew by the next pass, while the old one stays in the scheduler's spans: so
each group has a task that lasts as long as the run. A worker remembers a task that is released for as long
as it knows a task that has read it, and every weight has been made from the one before: so from time to time
the chunks that are held get new keys, of tasks that read nothing. ``dask.utils.key_split`` remembers the last
100,000 keys, in each process: it is told to forget them at the same time. And logs for developers, of the
last thousand entries each, take tens of MiB until they are full: they are short while a run lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import dask
from dask._task_spec import Task
from dask.utils import key_split
from distributed import Future, Scheduler, Worker, wait

from oocdl.planning.task_key import TaskKey, TaskKind, dask_key
from oocdl.runtime import execute
from oocdl.storage.cache.chunk import Chunk

TASKS_BETWEEN_RENEWALS = 500
"""A record takes 5 KiB on a worker and 3 KiB on the scheduler."""
TASKS_PER_RENEWED_CHUNK = 5
"""A renewal is a task for every chunk that is held: these are to be a fifth of the run's tasks at most."""
LOG_LENGTH = 20
"""Entries of Dask's logs for developers during a run."""
LOG_LENGTH_SETTING = "distributed.admin.low-level-log-length"
SENT = ("recent_message_log",)
"""A log of batches of messages: they take up to 50 KiB each on the scheduler, and Dask keeps a thousand."""
PROFILES = ("profile_history", "profile_keys_history")
"""Logs of a worker's profile: a second of it takes a quarter of a MiB, and Dask keeps a thousand."""


def is_due(tasks: int, held: int) -> bool:
    """Return whether ``held`` chunks should be renewed, so many tasks after the last time."""
    return tasks >= max(TASKS_BETWEEN_RENEWALS, TASKS_PER_RENEWED_CHUNK * held)


def hold_groups(client: Any, run_id: str, layers: Collection[str]) -> list[Future[None]]:
    """Start a task in the group of each layer; the groups last as long as the futures are kept."""
    keys = [dask_key(TaskKey(TaskKind.GROUP, layer, "", 0), run_id) for layer in layers]
    futures: list[Future[None]] = client.get({key: Task(key, _nothing) for key in keys}, keys, sync=False)
    return futures


def renew(
    client: Any, run_id: str, held: Mapping[TaskKey, Future[Chunk]], name: str
) -> dict[TaskKey, Future[Chunk]]:
    """Give chunks new keys, of tasks that read nothing. They stay where they are, and are not copied.

    ``name`` tells renewals of one run apart.
    """
    where = client.who_has(list(held.values()))
    at: dict[str, list[TaskKey]] = {}
    for key, future in held.items():
        at.setdefault(min(where[future.key]), []).append(key)
    for address, keys in at.items():
        leave = dask_key(TaskKey(TaskKind.GROUP, "", address, 0), name)
        chunks = [held[key] for key in keys]
        client.submit(_leave, run_id, keys, chunks, key=leave, workers=[address]).result()
    found: dict[TaskKey, Future[Chunk]] = {}
    for address, keys in at.items():
        names = [dask_key(key, name) for key in keys]
        tasks = {taken: Task(taken, _take, run_id, key) for taken, key in zip(names, keys, strict=True)}
        futures = client.get(tasks, names, sync=False, workers=[address])
        found |= zip(keys, futures, strict=True)
    wait(list(found.values()))  # type: ignore[no-untyped-call]
    client.run(key_split.cache_clear)
    client.run_on_scheduler(key_split.cache_clear)
    return {key: found[key] for key in held}


def shorten_logs(client: Any) -> None:
    """Have client and scheduler keep fewer of the messages that they have sent."""
    _resize_sent(client, LOG_LENGTH)


def lengthen_logs(client: Any) -> None:
    """Undo ``shorten_logs``."""
    _resize_sent(client, dask.config.get(LOG_LENGTH_SETTING))


def shorten_worker_logs(worker: Worker) -> None:
    """Have a worker keep less of its profile. Called in the worker's event loop."""
    _resize(worker, PROFILES, LOG_LENGTH)


def lengthen_worker_logs(worker: Worker) -> None:
    """Undo ``shorten_worker_logs``."""
    _resize(worker, PROFILES, dask.config.get(LOG_LENGTH_SETTING))


def _resize_sent(client: Any, length: int | None) -> None:
    client.loop.add_callback(_resize, client.scheduler_comm, SENT, length)
    client.run_on_scheduler(_resize_sent_by_scheduler, length)


def _resize_sent_by_scheduler(length: int | None, dask_scheduler: Scheduler) -> None:
    for comm in (*dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()):
        _resize(comm, SENT, length)


def _resize(holder: object, names: Collection[str], length: int | None) -> None:
    """Give logs another length; their last entries stay. In the event loop, where entries are added."""
    for name in names:
        setattr(holder, name, deque(getattr(holder, name), length))


def _nothing() -> None:
    """The task that stands for a group."""


def _leave(run_id: str, keys: Collection[TaskKey], chunks: Collection[Chunk]) -> None:
    """Leave chunks where tasks of the same worker find them."""
    execute.context_of(run_id).left.update(zip(keys, chunks, strict=True))


def _take(run_id: str, key: TaskKey) -> Chunk:
    """Take a chunk that was left on this worker."""
    return execute.context_of(run_id).left.pop(key)
