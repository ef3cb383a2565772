"""Keeps Dask's own records of a run short, however many passes it has.

Scheduler and workers keep records of tasks that are done, for three reasons. A group of tasks (here, a layer)
that loses its last task is made anew by the next pass, while the old one stays in the scheduler's spans: so
each group has a task that lasts as long as the run. ``dask.utils.key_split`` remembers the last 100,000 keys,
in each process: it is told to forget them from time to time. And logs for developers, of the last thousand
entries each, take tens of MiB until they are full: they are short while a run lasts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dask.utils import key_split
from distributed import Future

from oocdl.planning.task_key import TaskKey, TaskKind, dask_key
from oocdl.runtime.cluster.scheduler_side import SENT, resize
from oocdl.runtime.dask_private import Task

TASKS_BETWEEN_FORGETTING = 2_000
"""Number of tasks after which keys are forgotten: ``key_split`` takes 200 bytes for each."""
LOG_LENGTH = 20
"""Number of entries of Dask's logs for developers during a run."""
OF_WORKER = ("profile_history", "profile_keys_history", "transfer_outgoing_log", "transfer_incoming_log")
"""Logs of a worker: a second of its profile takes a quarter of a MiB, a transfer half a KiB; Dask keeps a
thousand, or as many as it is told."""


def hold_groups(client: Any, run_id: str, layers: Collection[str]) -> list[Future[None]]:
    """Start a task in the group of each layer; the groups last as long as the futures are kept."""
    keys = [dask_key(TaskKey(TaskKind.GROUP, layer, "", 0), run_id) for layer in layers]
    futures: list[Future[None]] = client.get({key: Task(key, bool) for key in keys}, keys, sync=False)
    return futures


async def forget_keys() -> None:
    """Forget the names of keys that this worker has seen."""
    key_split.cache_clear()


def shorten_client_log(client: Any, length: int | None = LOG_LENGTH) -> None:
    """Have a client keep fewer of the messages that it has sent."""
    if client.scheduler_comm is not None:
        client.loop.add_callback(resize, client.scheduler_comm, SENT, length)
