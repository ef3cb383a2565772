"""Clears up after a driver that is gone: its workers are as they were, whatever has become of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import WorkerState

from oocdl.runtime import dask_private
from oocdl.runtime.cluster import dask_limits, dask_records, worker_tasks
from oocdl.runtime.cluster.cluster_progress import METRIC

AGAIN_SECONDS = 1.0
"""Seconds between two attempts to reach a member that does not answer."""


class Cleanup(SchedulerPlugin):
    """Tells the client of a crew when a member is gone; tears the crew down when the client itself is.

    Its name is that of the topic of these events, each of which is the address of a worker.
    """

    def __init__(self, run_id: str, client_id: str, members: Sequence[str]) -> None:
        self.name = f"oocdl-{run_id}"
        self._run_id, self._client_id, self._members = run_id, client_id, tuple(members)

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
        dask_private.call_soon(scheduler, self._clear, scheduler, done)
        return done

    async def _clear(self, scheduler: Scheduler, done: asyncio.Event) -> None:
        dask_records.resize_sent_by_scheduler(dask_records.usual_length(), scheduler)
        tear_down, release = worker_tasks.tear_down, dask_limits.release_nanny
        await asyncio.gather(
            _call_all(scheduler, self._members, tear_down, self._run_id),
            _call_all(scheduler, self._members, release, self._run_id, nanny=True),
        )
        done.set()


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


def set_complete(name: str, complete: bool, dask_scheduler: Scheduler) -> None:
    """Tell the ``Stay`` of this name whether a crew is complete; runs on the scheduler."""
    plugin = dask_scheduler.plugins.get(name)
    if isinstance(plugin, Stay):
        plugin.complete = complete


async def clear_up(name: str, most_seconds: float, dask_scheduler: Scheduler) -> None:
    """Have the ``Cleanup`` of this name do its work, and wait so long for it; runs on the scheduler."""
    plugin = dask_scheduler.plugins.get(name)
    if isinstance(plugin, Cleanup):
        with suppress(TimeoutError):  # it goes on
            await asyncio.wait_for(plugin.begin(dask_scheduler).wait(), most_seconds)


def forget_plugin(name: str, dask_scheduler: Scheduler) -> None:
    """Remove a plugin, if it is there; runs on the scheduler."""
    if name in dask_scheduler.plugins:
        dask_scheduler.remove_plugin(name)


async def _call_all(
    scheduler: Scheduler,
    workers: Collection[str],
    function: Callable[..., Any],
    *arguments: Any,
    nanny: bool = False,
) -> None:
    """Call a function on workers, or on their nannies, until each has answered or has left the scheduler.

    A worker that is stopped answers when it goes on, which may be later than any connection waits.
    """
    message = {
        "op": "run",
        "function": dumps(function),  # type: ignore[no-untyped-call]
        "args": dumps(arguments),  # type: ignore[no-untyped-call]
        "kwargs": dumps({}),  # type: ignore[no-untyped-call]
        "wait": True,
    }

    async def call(address: str) -> None:
        while (state := scheduler.workers.get(address)) is not None and (state.nanny or not nanny):
            if await scheduler.broadcast(msg=message, workers=[address], nanny=nanny, on_error="ignore"):
                return
            await asyncio.sleep(AGAIN_SECONDS)

    await asyncio.gather(*(call(address) for address in workers))
