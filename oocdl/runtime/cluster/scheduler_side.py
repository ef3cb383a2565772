"""Runs on the scheduler, which need not have oocdl: this module travels there as code (``carried``).

So it uses nothing of oocdl but what stands here. What it returns is made of plain types.
"""

from __future__ import annotations

import asyncio
import math
import pickle
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import dask
from dask.utils import key_split
from distributed import Scheduler, SchedulerPlugin
from distributed.metrics import time as scheduler_time
from distributed.scheduler import TaskPrefix, WorkerState

METRIC = "oocdl"
"""The name under which heartbeats tell what a member does."""
AGAIN_SECONDS = 1.0
"""Seconds between two attempts to reach a member that does not answer."""
WANTED = "oocdl-wanted"
"""Name of a resource that no worker has, and of tasks that need it: they wait for workers, and never run."""
WANTED_SECONDS = 3600.0
"""Seconds that Dask takes one of them to last: it then wants a thread for each."""
LOG_LENGTH_SETTING = "distributed.admin.low-level-log-length"
SENT = ("recent_message_log",)
"""A log of batches of messages: they take up to 50 KiB each on the scheduler, and Dask keeps a thousand."""

Farewell = tuple[bytes, bytes, bool]
"""Pickled function and arguments with which a member is told to leave; whether its nanny is told instead."""


class Cleanup(SchedulerPlugin):
    """Tells the client of a crew when a member is gone; tears the crew down when the client itself is.

    Its name is that of the topic of these events, each of which is the address of a worker.
    """

    def __init__(
        self, run_id: str, client_id: str, members: Sequence[str], farewells: Sequence[Farewell]
    ) -> None:
        self.name = f"oocdl-{run_id}"
        self._client_id, self._members, self._farewells = client_id, tuple(members), tuple(farewells)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Tell the client that a worker has left the scheduler, if it is a member."""
        if worker in self._members:
            scheduler.log_event(self.name, worker)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Tear the crew down if its client has left, or its connection is broken."""
        if client == self._client_id:
            self.begin(scheduler)

    def begin(self, scheduler: Scheduler) -> asyncio.Event:
        """Begin to tear the crew down; the event returned is set when members have answered or are gone."""
        scheduler.remove_plugin(self.name)
        done = asyncio.Event()
        scheduler.loop.add_callback(self._clear, scheduler, done)
        return done

    async def _clear(self, scheduler: Scheduler, done: asyncio.Event) -> None:
        resize_sent(usual_length(), scheduler)
        told = (_tell(scheduler, one, how) for one in self._members for how in self._farewells)
        await asyncio.gather(*told)
        done.set()


async def _tell(scheduler: Scheduler, address: str, farewell: Farewell) -> None:
    """Tell a worker, or its nanny, to leave, until it has answered or has left the scheduler.

    A worker that is stopped answers when it goes on, which may be later than any connection waits.
    """
    function, arguments, nanny = farewell
    call = {
        "op": "run", "function": function, "args": arguments, "kwargs": pickle.dumps({}), "wait": True,
    }  # fmt: skip
    while (state := scheduler.workers.get(address)) is not None and (state.nanny or not nanny):
        if await scheduler.broadcast(msg=call, workers=[address], nanny=nanny, on_error="ignore"):
            return
        await asyncio.sleep(AGAIN_SECONDS)


class Stay(SchedulerPlugin):
    """Keeps an adaptive cluster from retiring workers while a client trains.

    Members have no task of Dask's between two passes, nor while others are awaited. Once a crew is
    ``complete``, workers without part in any may be taken away.
    """

    complete = False

    def __init__(self, client_id: str) -> None:
        self.name = f"oocdl-stay-{client_id}"
        self._client_id = client_id

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Return the workers that may be taken away."""
        return [one for one in workers if self.complete and METRIC not in one.metrics]

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Remove this plugin if its client has left, or its connection is broken."""
        if client == self._client_id:
            scheduler.remove_plugin(self.name)


def lacks_oocdl(dask_scheduler: Scheduler) -> bool:
    """Return whether the scheduler cannot import oocdl."""
    return find_spec("oocdl") is None


def set_complete(name: str, complete: bool, dask_scheduler: Scheduler) -> None:
    """Tell the ``Stay`` of this name whether a crew is complete."""
    if name in dask_scheduler.plugins:
        dask_scheduler.plugins[name].complete = complete  # type: ignore[attr-defined]


async def clear_up(name: str, most_seconds: float, dask_scheduler: Scheduler) -> None:
    """Have the ``Cleanup`` of this name do its work, and wait so long for it."""
    if name in dask_scheduler.plugins:
        begun: asyncio.Event = dask_scheduler.plugins[name].begin(dask_scheduler)  # type: ignore[attr-defined]
        with suppress(TimeoutError):  # it goes on
            await asyncio.wait_for(begun.wait(), most_seconds)


def forget_plugin(name: str, dask_scheduler: Scheduler) -> None:
    """Remove a plugin, if it is there."""
    if name in dask_scheduler.plugins:
        dask_scheduler.remove_plugin(name)


def workers_seen(dask_scheduler: Scheduler) -> dict[str, tuple[float, Any]]:
    """Return, by address, the seconds since a worker's last heartbeat, and its report; None: no member."""
    now, workers = scheduler_time(), dask_scheduler.workers.items()
    return {address: (now - state.last_seen, state.metrics.get(METRIC)) for address, state in workers}


async def forget_worker(address: str, dask_scheduler: Scheduler) -> None:
    """Forget a worker; if that is alive after all, it is told and starts anew."""
    await dask_scheduler.remove_worker(address, stimulus_id=f"oocdl-silent-{scheduler_time()}")


def threads_of_a_worker(dask_scheduler: Scheduler) -> int:
    """Have wanted tasks count as long; return the threads that a worker has on average, rounded up."""
    prefix = dask_scheduler.task_prefixes.setdefault(WANTED, TaskPrefix(WANTED))
    prefix.duration_average = WANTED_SECONDS
    workers = dask_scheduler.workers.values()
    return math.ceil(sum(worker.nthreads for worker in workers) / max(len(workers), 1)) or 1


def forget_keys(dask_scheduler: Scheduler) -> None:
    """Forget the names of keys that the scheduler has seen."""
    key_split.cache_clear()


def usual_length() -> int | None:
    """Return how long Dask's logs are where nobody has made them shorter."""
    length: int | None = dask.config.get(LOG_LENGTH_SETTING)
    return length


def resize_sent(length: int | None, dask_scheduler: Scheduler) -> None:
    """Have a scheduler keep so many of the messages that it has sent."""
    for comm in (*dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()):
        resize(comm, SENT, length)


def resize(holder: object, names: Collection[str], length: int | None) -> None:
    """Give logs another length, with their last entries; runs in the event loop, where entries are added."""
    for name in names:
        setattr(holder, name, deque(getattr(holder, name), length))


def call_packed(packed: bytes) -> Any:
    """Call a function on a worker, as a task of a scheduler that may lack oocdl.

    ``packed``: function and arguments, pickled. The scheduler hands them on without a look.
    """
    function, arguments = pickle.loads(packed)
    return function(*arguments)


async def await_packed(packed: bytes, *_: object) -> Any:
    """The same of a coroutine function, which runs in the worker's event loop."""
    return await call_packed(packed)
