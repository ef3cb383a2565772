"""Trials as Dask tasks: each in one worker, on any that is free, one at a time in each.

A worker takes no trial before it was looked at: whether it sees the files, and has the memory. Then it gets
one unit of a Dask resource, of which a trial needs one. No more trials are submitted than workers were hired,
so that a worker that comes later finds some left.
"""

from __future__ import annotations

import os
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import dask
from distributed import Future, KilledWorker, Reschedule, Scheduler, Status, Worker, get_worker
from distributed.client import ClosedClientError

from oocdl.errors import BudgetError, ResourceError, StoreError
from oocdl.host.heap import use_one_heap
from oocdl.host.limits import DEFAULT_BUDGET_SHARE, available
from oocdl.runtime import dask_private
from oocdl.runtime.cluster.growth import Wanted
from oocdl.runtime.cluster.member import become_host, guests
from oocdl.runtime.cluster.watch import Watch, in_loop, on_scheduler, roll, words_of
from oocdl.runtime.lost import WorkersLost
from oocdl.tuning.halving import Result
from oocdl.tuning.own_parts import packed, take
from oocdl.tuning.search_record import read_result, write_result
from oocdl.tuning.trainers import committed_steps
from oocdl.tuning.trial import Task, Unwanted, run_trial

RESOURCE = "oocdl-trial"
LOOK_SECONDS = 1.0
"""So often it is looked who has come and who has gone."""
TELL_SECONDS = 60.0
GATHER_SECONDS = 10.0
LEAVING = (Status.closing, Status.closing_gracefully, Status.closed, Status.failed, Status.stopping)


@dataclass(frozen=True)
class Facts:
    """What a worker says of itself."""

    process: tuple[str, int]
    """Host and number of its process."""
    limit: tuple[str, str]
    """Host, and name of what limits its memory there: workers of one limit share it."""
    limit_bytes: int
    own_bytes: int | None
    """The worker's own ``memory_limit``; None: it has none."""
    ended_bytes: int | None
    """Dask ends the worker when it has so much; None: it never does."""
    threads: int
    missing: str
    """A path that it does not see; empty if it sees all."""


def _facts(paths: Sequence[str], parts: bytes, dask_worker: Worker) -> Facts:
    """Runs on the worker, which can take what is registered."""
    take(parts)
    own, share = (
        dask_worker.memory_manager.memory_limit,
        dask.config.get("distributed.worker.memory.terminate"),
    )
    limit, missing = available(), [path for path in paths if not os.path.exists(path)]
    return Facts(
        (os.uname().nodename, os.getpid()),
        (os.uname().nodename, limit.name),
        limit.nbytes,
        own or None,
        int(own * share) if own and share and dask_worker.nanny else None,
        dask_worker.state.nthreads,
        missing[0] if missing else "",
    )


def _why(error: Exception) -> str:
    """Why a worker takes no trial that fails when it is asked."""
    words = " ".join(words_of(error).split())
    return f"fails ({words}); install the same versions there, and modules that your own need"


async def _hire(dask_worker: Worker) -> None:
    """Runs on the worker. Never twice: the scheduler would forget which trials the worker runs."""
    if RESOURCE not in dask_worker.state.total_resources:
        await dask_worker.set_resources(**{RESOURCE: 1})


def _placed(dask_scheduler: Scheduler) -> set[Any]:
    """Keys of the tasks that workers have; runs on the scheduler."""
    return {state.key for worker in dask_scheduler.workers.values() for state in worker.processing}


def run_on_worker(task: Task, key: str, parts: bytes) -> Result:
    """Run a trial on this worker, until nobody waits for it or the worker has to go.

    It waits while a run of ``fit`` has this process: two at once would share a memory tier.
    ``parts``: what the user has registered; another search may have others of these names.
    """
    worker = get_worker()
    take(parts)

    def check() -> None:
        known = worker.state.tasks.get(key)
        if worker.status in LEAVING or known is None or known.state not in ("executing", "long-running"):
            raise Unwanted

    use_one_heap()
    # A thread of its own, which shares the main heap; the worker's may have started before.
    with ThreadPoolExecutor(1, thread_name_prefix="oocdl") as pool:
        try:
            while not become_host(key):
                check()
                time.sleep(LOOK_SECONDS)
            return pool.submit(run_trial, task, check).result()
        except Unwanted:
            raise Reschedule from None
        finally:
            guests.discard(key)


def _result_of(future: Future[Result]) -> Result | None:
    """What a trial has returned, where its file is not seen here yet; None if it went with its worker."""
    try:
        found: Result = future.result(timeout=GATHER_SECONDS)
    except (OSError, TimeoutError):
        return None
    return found


@dataclass(eq=False)
class Workers:
    """The workers of a client, as a crew."""

    client: Any
    """A ``distributed.Client``."""
    paths: Sequence[Path]
    """What each worker has to see: the model, the dataset, the folder of the search."""
    say: Callable[[str], None]
    wait_seconds: float
    """So long it is waited for a worker while there is none."""
    known: dict[str, Facts] = field(default_factory=dict)
    """All workers that there are, by address."""
    hired: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    """Why workers take no trial."""
    memory_bytes: int = 0
    waiting_since: float | None = None
    told_at: float = float("-inf")
    looked_at: float = float("-inf")
    numbers: Iterator[int] = field(default_factory=count)
    more: Wanted = field(init=False)
    """Workers of a cluster that adapts: a trial that waits here is no task of Dask's."""
    search_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    parts: bytes = field(default_factory=packed)
    """What the user has registered, for the workers."""

    def __post_init__(self) -> None:
        self.more = Wanted(self.client)

    def share(self) -> tuple[int, int | None]:
        """Return a safe share of what each worker may use, and the threads that each has, of the least."""
        self._wait_for(lambda: bool(self.known))
        sharing = Counter(facts.limit for facts in self.known.values())
        least = min(
            min(facts.limit_bytes // sharing[facts.limit], facts.own_bytes or facts.limit_bytes)
            for facts in self.known.values()
        )
        return int(least * DEFAULT_BUDGET_SHARE), min(facts.threads for facts in self.known.values())

    def check(self, memory_bytes: int) -> None:
        """Hire the workers that have so much. BudgetError or StoreError if all of them are refused."""
        self.memory_bytes = memory_bytes
        self._wait_for(lambda: bool(self.hired or self.refused))
        if not self.hired:
            address, why = min(self.refused.items())
            known = self.known.get(address)
            kind = ResourceError if known is None else StoreError if known.missing else BudgetError
            raise kind(f"worker {address} {why}")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise ResourceError if the scheduler cannot be reached in this block."""
        try:
            yield
        except (OSError, TimeoutError, ClosedClientError, WorkersLost) as error:  # a lost comm is an OSError
            raise self._lost(f"{type(error).__name__}: {error}") from error

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        while True:
            with self._reaching():
                self._look()
                self.more.ask(1)
            if ready():
                return
            self._tell_if_nobody()
            time.sleep(LOOK_SECONDS)

    def _look(self) -> bool:
        """Look who is there, and hire who is new; returns whether somebody was hired."""
        self.looked_at = time.monotonic()
        there = set(roll(self.client))
        new = sorted(there - self.known.keys() - self.refused.keys())
        found = self._ask(new, _facts, [str(path) for path in self.paths], self.parts)
        for address in [address for address, answer in found.items() if isinstance(answer, Exception)]:
            self._refuse(address, _why(found.pop(address)))
        self.known = {address: facts for address, facts in (self.known | found).items() if address in there}
        self.refused = {address: why for address, why in self.refused.items() if address in there}
        self.hired &= there
        wanted = [a for a in sorted(self.known) if a not in self.hired and a not in self.refused]
        hired = bool(self.memory_bytes and [a for a in wanted if self._hire(a)])
        return hired

    def _ask(self, addresses: Sequence[str], function: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """What workers answer, maybe by an error; one that has gone meanwhile does not."""
        found: dict[str, Any] = {}
        asked = {
            address: in_loop(
                self.client, dask_private.run_on_workers(self.client, function, *args, workers=[address])
            )
            for address in addresses
        }
        for address, answer in asked.items():
            try:
                Watch(self.client, [address], self.say).wait([answer])
                found |= answer.result()
            except WorkersLost:
                answer.cancel()
                if address in roll(self.client):
                    found[address] = ResourceError("it does not answer")
        return {address: answer for address, answer in found.items() if not isinstance(answer, OSError)}

    def _refuse(self, address: str, why: str) -> None:
        self.refused[address] = why
        self.say(f"worker {address} {why}; it takes no trial")

    def _hire(self, address: str) -> bool:
        why = self._refusal(self.known[address])
        answer = {} if why else self._ask([address], _hire)
        if isinstance(answer.get(address), Exception):
            why = _why(answer[address])
        if why:
            self._refuse(address, why)
        elif address in answer:
            self.hired.add(address)
        return not why

    def _refusal(self, facts: Facts) -> str:
        """Why a worker takes no trial; empty if it may take one."""
        need, need_mib = self.memory_bytes, -(-self.memory_bytes >> 20)
        if facts.missing:
            return f"does not see {facts.missing}; a search needs files that all its workers share"
        if facts.ended_bytes is not None and need > facts.ended_bytes:
            return (
                f"is ended by Dask at {facts.ended_bytes >> 20} MiB, and a trial may take {need_mib} MiB; "
                "give memory= less, or the worker a larger memory_limit"
            )
        if any(self.known[address].process == facts.process for address in self.hired):
            return "shares its process with another, which takes trials"
        others = sum(self.known[address].limit == facts.limit for address in self.hired)
        if need * (others + 1) > facts.limit_bytes:
            shared = f" together with {others} that take trials" if others else ""
            return (
                f"may use {facts.limit_bytes >> 20} MiB{shared}, and each trial may take {need_mib} MiB; "
                "give memory= less"
            )
        return ""

    def _tell_if_nobody(self) -> None:
        now = time.monotonic()
        if self.hired if self.memory_bytes else self.known:
            self.waiting_since = None
            return
        self.waiting_since = self.waiting_since or now
        if now - self.waiting_since > self.wait_seconds:
            raise ResourceError(
                f"no worker has come in {self.wait_seconds:.0f} s; trials stay at their last commits, and "
                "the same call goes on"
            )
        if now - self.told_at > TELL_SECONDS:
            self.told_at = now
            self.say(f"waiting for workers of the client, up to {self.wait_seconds:.0f} s")

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Train these trials on whoever is free."""
        left, done = list(reversed(tasks)), queue.SimpleQueue[Any]()
        running: dict[Any, tuple[Task, int]] = {}
        """Future -> its trial, and the steps that were committed when it was submitted."""

        def submit(task: Task) -> None:
            key = f"{RESOURCE}-{self.search_id}-{next(self.numbers)}"
            future = self.client.submit(
                run_on_worker, task, key, self.parts, key=key, resources={RESOURCE: 1}, pure=False
            )
            running[future] = task, committed_steps(task.run)
            future.add_done_callback(done.put)

        try:
            while left or running:
                with self._reaching():
                    while left and len(running) < max(len(self.hired), 1):
                        submit(left.pop())
                    if time.monotonic() - self.looked_at > LOOK_SECONDS:
                        left += self._stuck(running) if self._look() else []
                        self.more.ask(len(left) + len(running), busy=len(running))
                self._tell_if_nobody()
                try:
                    future = done.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    continue
                if future not in running:
                    continue  # was taken back
                task, steps = running.pop(future)
                found = self._ended(future, task, steps)
                if found is None:
                    left.append(task)
                else:
                    yield found
        finally:
            self.more.forget()
            for future in running:  # a trial that still runs stops at its next step, and commits
                future.release()

    def _stuck(self, running: dict[Any, tuple[Task, int]]) -> list[Task]:
        """Take trials back that no worker has: Dask does not look for one when a worker gets a resource."""
        placed = on_scheduler(self.client, _placed)
        lost = [future for future in running if future.key not in placed and not future.done()]
        tasks = []
        for future in lost:
            tasks.append(running.pop(future)[0])
            future.release()
        return tasks

    def _ended(self, future: Future[Result], task: Task, steps: int) -> Result | None:
        """What has become of a trial; None if it is to be tried again."""
        if future.status in ("finished", "pending"):  # pending: its worker was lost just after the end
            found = read_result(task.folder, task.trial, task.rung)
            return found or _result_of(future)
        if future.status != "error":
            raise self._lost(f"trial {task.trial} is {future.status}")
        error: Any = future.exception()  # type: ignore[no-untyped-call]
        if isinstance(error, KilledWorker) and committed_steps(task.run) > steps:
            self.say(f"trial {task.trial} has lost several workers, and goes on from its last commit")
            return None
        text = " ".join(f"{type(error).__name__}: {error}".split())
        failed = Result(task.trial, task.rung, task.steps, None, text, final=False)
        write_result(task.folder, failed)
        return failed

    def _lost(self, reason: str) -> ResourceError:
        return ResourceError(
            f"the Dask scheduler was lost ({reason}); trials stay at their last commits, and the same call "
            "with another client goes on"
        )
