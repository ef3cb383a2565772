"""Switches off what a Dask worker does about memory by itself, while a run owns it, and on again.

A member counts its memory and keeps its budget. Dask would pause the worker at 80 % of its limit for good,
and kill it at 95 %. What other clients of the worker rely on stays: results of their tasks are spilled as
always, and they get as many threads as before.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Nanny, Worker
from distributed.core import Status
from distributed.worker_state_machine import WorkerState

from oocdl.host.limits import anonymous_bytes_of
from oocdl.runtime.cluster.dask_records import LOG_LENGTH, OF_WORKER
from oocdl.runtime.cluster.local_pass import Superseded
from oocdl.runtime.cluster.scheduler_side import resize, usual_length

MONITOR = "memory_monitor"


def _is_logged(run_id: str, record: logging.LogRecord) -> bool:
    """Return whether a worker logs something: tracebacks of a run are told by the driver, in one line.

    Those of calls that come to a run which has left the worker are not: nobody waits for their answers.
    """
    key = record.args[0] if isinstance(record.args, tuple) and record.args else None
    late = record.exc_info is not None and isinstance(record.exc_info[1], Superseded)
    return not late and not is_of_run(key, run_id)


def is_of_run(key: object, run_id: str) -> bool:
    """Return whether a key of Dask's is that of a task of a run."""
    return isinstance(key, tuple) and len(key) > 1 and str(key[1]).startswith(run_id)


class Threads(int):
    """The threads of a worker: tasks of others get as many as before, and those of a run begin beside them.

    Dask begins what is ready while ``len(state.executing) < state.nthreads``, which this answers.
    """

    state: WorkerState
    run_id: str

    def __new__(cls, state: WorkerState, run_id: str) -> Threads:
        made = super().__new__(cls, state.nthreads)
        made.state, made.run_id = state, run_id
        return made

    def __gt__(self, _: int) -> bool:
        ready = self.state.ready
        others = sum(not is_of_run(one.key, self.run_id) for one in self.state.executing)
        return others < int(self) or (len(ready) > 0 and is_of_run(ready.peek().key, self.run_id))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


@dataclass(frozen=True)
class Limits:
    """Settings that a worker had before a run lifted its limits."""

    threads: int
    is_logged: Callable[[logging.LogRecord], bool]


def lift_limits(worker: Worker, run_id: str) -> Limits:
    """Have a worker leave memory alone, begin tasks of a run at once, and not log what fails in it."""
    before = Limits(worker.state.nthreads, partial(_is_logged, run_id))
    worker.state.nthreads = Threads(worker.state, run_id)
    logging.getLogger("distributed.worker").addFilter(before.is_logged)
    if MONITOR in worker.periodic_callbacks:
        worker.periodic_callbacks[MONITOR].stop()
    if worker.status == Status.paused:
        worker.status = Status.running
    resize(worker, OF_WORKER, LOG_LENGTH)
    return before


def restore_limits(worker: Worker, before: Limits) -> None:
    """Undo ``lift_limits``, but for what is not logged: that is until all calls of the run have ended."""
    worker.state.nthreads = before.threads
    monitor = worker.periodic_callbacks.get(MONITOR)
    if monitor is not None and not monitor.is_running():
        monitor.start()
    resize(worker, OF_WORKER, usual_length())


def log_again(before: Limits) -> None:
    """Have a worker log all that fails."""
    logging.getLogger("distributed.worker").removeFilter(before.is_logged)


_over: deque[str] = deque(maxlen=64)
"""Runs that are over for the nannies of this process: a message to hold one may come late."""


@dataclass(eq=False)
class _Look:
    """The look of a nanny at the memory of a worker that has loaded an engine, as long as that lives."""

    nanny: Nanny
    pid: int
    usual: Callable[[], Any]
    """Dask's own look, which counts mapped pages of libraries, too."""
    run_id: str | None = None
    """The run that keeps the nanny from killing its worker; None: there is none."""

    def __call__(self) -> None:
        manager = self.nanny.memory_manager
        if self.nanny.pid != self.pid:
            self.nanny.periodic_callbacks[MONITOR].callback = self.usual
        elif self.run_id is not None:
            return
        else:
            try:
                taken = anonymous_bytes_of(self.pid)
            except OSError:  # it has just ended
                return
            if taken <= manager.memory_terminate_fraction * (manager.memory_limit or math.inf):
                return
        self.usual()


def _look_of(nanny: Nanny) -> _Look | None:
    """Return the look of a nanny at its worker, from now on; None if it does not look."""
    callback, pid = nanny.periodic_callbacks.get(MONITOR), nanny.pid
    if callback is None or pid is None:
        return None
    look = callback.callback
    if not isinstance(look, _Look) or look.pid != pid:
        look = callback.callback = _Look(nanny, pid, getattr(look, "usual", look))
    return look


async def count_anonymous(dask_worker: Nanny) -> None:
    """Have a nanny count the anonymous memory of its worker, as long as that worker lives.

    Dask would kill workers of less than 400 MiB or so that load an engine.
    """
    _look_of(dask_worker)


async def hold_nanny(run_id: str, dask_worker: Nanny) -> None:
    """Keep a nanny from killing its worker at 95 % of its limit, as long as that worker lives."""
    look = None if run_id in _over else _look_of(dask_worker)
    if look is not None:
        look.run_id = run_id


async def release_nanny(run_id: str, dask_worker: Nanny) -> None:
    """Undo ``hold_nanny``, also one that comes later; do nothing if another run holds the nanny by now."""
    _over.append(run_id)
    look = getattr(dask_worker.periodic_callbacks.get(MONITOR), "callback", None)
    if isinstance(look, _Look) and look.run_id == run_id:
        look.run_id = None
