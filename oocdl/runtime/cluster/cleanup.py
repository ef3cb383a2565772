"""Clears up after a driver that is gone: its workers are as they were, whatever has become of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import WorkerState

from oocdl.runtime.cluster import dask_limits, dask_records, worker_tasks


class Cleanup(SchedulerPlugin):
    """Tears a crew down when its client leaves the scheduler without having done so."""

    def __init__(self, run_id: str, client_id: str, members: Sequence[str]) -> None:
        self.name = f"oocdl-{run_id}"
        self._run_id, self._client_id, self._members = run_id, client_id, tuple(members)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client has left, or its connection is broken."""
        if client == self._client_id:
            scheduler.remove_plugin(self.name)
            scheduler._ongoing_background_tasks.call_soon(self._clear, scheduler)

    async def _clear(self, scheduler: Scheduler) -> None:
        there = [address for address in self._members if address in scheduler.workers]
        await _call(scheduler, there, worker_tasks.tear_down, self._run_id)
        await _call(scheduler, there, dask_limits.release_nanny, self._run_id, nanny=True)
        dask_records.resize_sent_by_scheduler(dask_records.usual_length(), scheduler)


class Stay(SchedulerPlugin):
    """Has a cluster that adapts take no worker away while a client trains.

    Members have no task of Dask's between two passes, nor while others are awaited.
    """

    def __init__(self, client_id: str) -> None:
        self.name = f"oocdl-stay-{client_id}"
        self._client_id = client_id

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Who may be taken away: nobody."""
        return []

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client has left, or its connection is broken."""
        if client == self._client_id:
            scheduler.remove_plugin(self.name)


def forget_plugin(name: str, dask_scheduler: Scheduler) -> None:
    """Remove a plugin, if it is there; runs on the scheduler."""
    if name in dask_scheduler.plugins:
        dask_scheduler.remove_plugin(name)


async def _call(
    scheduler: Scheduler,
    workers: Sequence[str],
    function: Callable[..., Any],
    *arguments: Any,
    nanny: bool = False,
) -> None:
    message = {
        "op": "run",
        "function": dumps(function),  # type: ignore[no-untyped-call]
        "args": dumps(arguments),  # type: ignore[no-untyped-call]
        "kwargs": dumps({}),  # type: ignore[no-untyped-call]
        "wait": True,
    }
    await scheduler.broadcast(msg=message, workers=workers, nanny=nanny, on_error="ignore")
