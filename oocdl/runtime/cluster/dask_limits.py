"""Switches off what a Dask worker does about memory by itself, while a run owns it, and on again.

A member counts its memory and keeps its budget. Dask would pause the worker at 80 % of its limit for good,
and kill it at 95 %. What other clients of the worker rely on stays: results of their tasks are spilled as
always, and they get as many threads as before.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Nanny, Worker
from distributed.core import Status

from oocdl.host.limits import anonymous_bytes_of
from oocdl.runtime.cluster import dask_records
from oocdl.runtime.cluster.local_pass import Superseded

ACTIVE = ("waiting", "ready", "executing")
"""States of tasks for which a worker has room."""
MONITOR = "memory_monitor"
LOOK_SECONDS = 1.0
"""Seconds between two looks at whether the worker of a held nanny is still the same process."""


class _Ours(logging.Filter):
    """Drops a worker's tracebacks of tasks of a run: the driver tells the user, in one line.

    So it does those of calls that come to a run which has left the worker: nobody waits for their answers.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self._run_id = run_id

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.args[0] if isinstance(record.args, tuple) and record.args else None
        late = record.exc_info is not None and isinstance(record.exc_info[1], Superseded)
        return not late and not is_of_run(key, self._run_id)


def is_of_run(key: object, run_id: str) -> bool:
    """Return whether a key of Dask's is that of a task of a run."""
    return isinstance(key, tuple) and len(key) > 1 and str(key[1]).startswith(run_id)


@dataclass(frozen=True)
class Limits:
    """Settings that a worker had before a run lifted its limits."""

    threads: int
    hush: logging.Filter


def lift_limits(worker: Worker, run_id: str) -> Limits:
    """Have a worker leave memory alone, and not log what fails in a run."""
    before = Limits(worker.state.nthreads, _Ours(run_id))
    logging.getLogger("distributed.worker").addFilter(before.hush)
    _stop(worker)
    if worker.status == Status.paused:
        worker.status = Status.running
    dask_records.shorten_worker_logs(worker)
    return before


def restore_limits(worker: Worker, before: Limits) -> None:
    """Undo ``lift_limits``, but for what is not logged: that is until all calls of the run have ended."""
    worker.state.nthreads = before.threads
    _start(worker)
    dask_records.lengthen_worker_logs(worker)


def log_again(before: Limits) -> None:
    """Have a worker log all that fails."""
    logging.getLogger("distributed.worker").removeFilter(before.hush)


_held: WeakKeyDictionary[Nanny, tuple[str, asyncio.Task[None]]] = WeakKeyDictionary()
"""Nannies of this process -> the run that holds each, and the task that releases it with its worker's end."""
_over: deque[str] = deque(maxlen=64)
"""Runs that are over for the nannies of this process: a message to hold one may come late."""


async def count_anonymous(dask_worker: Nanny) -> None:
    """Have a nanny count the anonymous memory of its worker, as long as that worker lives.

    Dask counts the mapped pages of libraries, too, and kills workers of less than 400 MiB or so that load an
    engine.
    """
    callback, pid = dask_worker.periodic_callbacks.get(MONITOR), dask_worker.pid
    if callback is None or pid is None or isinstance(callback.callback, _Anonymous):
        return
    callback.callback = _Anonymous(dask_worker, callback, pid, callback.callback)


@dataclass(frozen=True)
class _Anonymous:
    """The look of a nanny at the memory of a worker that has loaded an engine."""

    nanny: Nanny
    callback: Any
    pid: int
    usual: Callable[[], object]

    def __call__(self) -> None:
        manager = self.nanny.memory_manager
        if self.nanny.pid != self.pid:
            self.callback.callback = self.usual
        else:
            try:
                taken = anonymous_bytes_of(self.pid)
            except OSError:  # it has just ended
                return
            if taken <= manager.memory_terminate_fraction * (manager.memory_limit or math.inf):
                return
        self.usual()


async def hold_nanny(run_id: str, dask_worker: Nanny) -> None:
    """Keep a nanny from killing its worker at 95 % of its limit, as long as that worker lives."""
    if run_id in _over:
        return
    if dask_worker in _held:
        _held.pop(dask_worker)[1].cancel()
    _stop(dask_worker)
    _held[dask_worker] = run_id, asyncio.create_task(_release_when_gone(run_id, dask_worker))


async def release_nanny(run_id: str, dask_worker: Nanny) -> None:
    """Undo ``hold_nanny``, also one that comes later; do nothing if another run holds the nanny by now."""
    _over.append(run_id)
    if dask_worker in _held and _held[dask_worker][0] == run_id:
        _held.pop(dask_worker)[1].cancel()
        _start(dask_worker)


async def _release_when_gone(run_id: str, nanny: Nanny) -> None:
    """Release a nanny once its worker is another process, which knows nothing of the run."""
    pid = nanny.pid
    while nanny.pid == pid:
        await asyncio.sleep(LOOK_SECONDS)
    del _held[nanny]
    _start(nanny)


def _stop(server: Any) -> None:
    if MONITOR in server.periodic_callbacks:
        server.periodic_callbacks[MONITOR].stop()


def _start(server: Any) -> None:
    callback = server.periodic_callbacks.get(MONITOR)
    if callback is not None and not callback.is_running():
        callback.start()
