"""Keeps a cluster at its number of jobs: what is lost is submitted again.

dask-jobqueue does not do that. ``scale`` starts nothing anew, and ``adapt`` notices a lost job only after
``distributed.deploy.lost-worker-timeout``, when it cancels the job of a worker that its nanny may be
starting again. Here a job counts as lost when its worker is gone and its nanny does not answer any more, or
when it is over before its worker has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from distributed import Scheduler
from distributed.comm.addressing import get_address_host_port
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.spec import ProcessInterface
from distributed.diagnostics.plugin import SchedulerPlugin

from oocdl.cluster.ended_jobs import Ended

ANSWER_SECONDS = 5.0
SHORT_LIFE_SECONDS = 60.0
"""A job that was lost sooner is likely to be lost again: the next one waits, each time twice as long."""
LONGEST_PAUSE_SECONDS = 300.0
LOST_WORKER_SECONDS = 600
"""Seconds that a nanny that answers has to bring its worker back before the job is given up."""


class Watch(SchedulerPlugin):
    """Notes which workers have come, and undoes what was done for a cluster when its scheduler closes.

    The scheduler closes after the jobs: then keys are deleted, and Dask's configuration is as it was.
    """

    name = "oocdl-jobs"

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.nannies: dict[str, str] = {}
        """Worker name -> address of its nanny."""
        self.came: dict[str, float] = {}
        """Worker name -> monotonic time at which it first came."""

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a worker, by its address."""
        state = scheduler.workers[worker]
        self.nannies[str(state.name)] = state.nanny or worker
        self.came.setdefault(str(state.name), time.monotonic())

    def forget(self, name: str) -> float:
        """Forget the job of a worker that is gone; returns how many seconds its worker was known."""
        self.nannies.pop(name, None)
        now = time.monotonic()
        return now - self.came.pop(name, now)

    def older(self, seconds: float) -> set[str]:
        """Return the names of workers that first came more than so many seconds ago."""
        now = time.monotonic()
        return {name for name, came in self.came.items() if now - came > seconds}

    async def close(self) -> None:
        """Undo what was done for the cluster."""
        self._undo.close()


class KeepJobs(Adaptive):
    """Dask's ``Adaptive`` with one goal, ``minimum`` jobs, whatever there is to do."""

    cluster: Any

    def __init__(
        self,
        *args: Any,
        watch: Watch,
        ended: Ended,
        tell: Callable[[str], None],
        deadline_seconds: float,
        **kwargs: Any,
    ) -> None:
        self._watch, self._ended, self._tell = watch, ended, tell
        self._deadline_seconds = deadline_seconds
        self._short_lives = 0
        self._paused_until = 0.0
        super().__init__(*args, **kwargs)

    async def target(self) -> int:
        """Return the number of jobs that there should be."""
        return self.minimum

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Give up jobs that are lost, and tell how many there should be."""
        gone = dict.fromkeys(await self._gone(), "is gone")
        gone |= {
            name: f"is over, and its worker never came{why}" for name, why in (await self._over()).items()
        }
        late = self._watch.older(self._deadline_seconds) & set(self.cluster.requested)
        gone |= dict.fromkeys(late, "comes to its walltime")
        for name, how in gone.items():
            job = self.cluster.workers[name]
            if job.job_id is None:
                forget_refused(job)
            self._tell(f"job {job.job_id or 'of ' + name} {how}; it is submitted again")
            self._pause(self._watch.forget(name))
        if gone:
            await self.cluster.scale_down(list(gone))
        if time.monotonic() < self._paused_until:
            return {"status": "same"}
        advice: dict[str, Any] = await super().recommendations(target)
        return advice

    async def _gone(self) -> list[str]:
        """Return the names of workers whose jobs have ended, or could not be submitted."""
        present = {str(worker.name) for worker in self.cluster.scheduler.workers.values()}
        missing = [name for name in self.cluster.requested if name not in present]
        refused = [name for name in missing if self.cluster.workers[name].job_id is None]
        lost = [name for name in missing if name in self._watch.nannies and name not in refused]
        answers = await asyncio.gather(*(_answers(self._watch.nannies[name]) for name in lost))
        return [*refused, *(name for name, answered in zip(lost, answers, strict=True) if not answered)]

    async def _over(self) -> dict[str, str]:
        """Return the names of workers that never came and whose jobs are over -> what is known of why."""
        jobs = {name: self.cluster.workers[name].job_id for name in self.cluster.requested}
        waiting = {name: number for name, number in jobs.items() if number and name not in self._watch.came}
        over = await self._ended.among(waiting)
        return {name: why for name, why in over.items() if name not in self._watch.came}

    def _pause(self, lived_seconds: float) -> None:
        self._short_lives = self._short_lives + 1 if lived_seconds < SHORT_LIFE_SECONDS else 0
        if self._short_lives > 1:
            self._paused_until = time.monotonic() + min(2.0**self._short_lives, LONGEST_PAUSE_SECONDS)


def forget_refused(job: ProcessInterface) -> None:
    """Let a cluster close although the batch system has refused one of its jobs."""
    job.status = Status.failed


async def _answers(address: str) -> bool:
    """Return whether somebody listens at an address of Dask."""
    host, port = get_address_host_port(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ANSWER_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
