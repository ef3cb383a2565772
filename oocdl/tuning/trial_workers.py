"""Trials as Dask tasks: one at a time on each worker, which gets what a user has registered, by value."""

from __future__ import annotations

import os
import pickle
import queue
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import dask
from distributed import Client, Future, KilledWorker, Reschedule, Status, get_worker
from distributed.client import ClosedClientError

from oocdl.errors import BudgetError, InputError, OocdlError, ResourceError, StoreError
from oocdl.graph.onnx.own_operators import OWN
from oocdl.host.main_heap import MainHeapThreads
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import KNOWN, OPTIMIZERS, Own
from oocdl.ops.own_loss import FORMULAS
from oocdl.runtime.cluster.carried import carried
from oocdl.runtime.cluster.crew import NotNowError, Recruit, ask, gather, one_a_process
from oocdl.runtime.cluster.growth import Wanted
from oocdl.runtime.cluster.member import SEARCH, become_host, guests
from oocdl.runtime.cluster.room import Room, budget_bytes, check_limits
from oocdl.runtime.cluster.scheduler_side import call_packed
from oocdl.runtime.cluster.watch import Watch, roll
from oocdl.runtime.lost import MOST_LOSSES, WorkersLost
from oocdl.storage.dataset.data_array import one_line
from oocdl.tuning.trial import Result, Task, Unwanted, failure, run_trial

LOOK_SECONDS = 1.0
"""Seconds between two looks at which workers have come or gone."""
GATHER_SECONDS = 10.0
"""Seconds after which a result that has not come counts as lost with its worker."""
LEAVING = (Status.closing, Status.closing_gracefully, Status.closed, Status.failed, Status.stopping)
_packing = Lock()
"""Guards the set of modules that are pickled by value, which is the whole process's."""


def packed() -> bytes:
    """Return what is registered here, pickled. Raises InputError if a function holds what cannot be sent."""
    own = OWN, FORMULAS, KNOWN
    functions: list[Callable[..., Any]] = [operator.function for operator in OWN.values()]
    functions += [*(formula for _, formula in FORMULAS.values()), *(known.update for known in KNOWN.values())]
    names = {function.__module__ for function in functions} - {"__main__"}
    with _packing:
        names -= {*cloudpickle.list_registry_pickle_by_value()}
        new = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            pickled: bytes = cloudpickle.dumps(own)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            text = f"what is registered ({', '.join([*OWN, *FORMULAS, *KNOWN])}) cannot be sent to workers"
            way_out = "have its functions read numbers, texts and arrays only"
            raise InputError(f"{text} ({error}); {way_out}") from error
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)
    return pickled


def take(parts: bytes) -> None:
    """Know in this process what was ``packed`` in another, in the place of what has the same names."""
    operators, formulas, optimizers = pickle.loads(parts)
    OWN.update(operators)
    FORMULAS.update(formulas)
    LOSSES.update({name: spec for name, (spec, _) in formulas.items()})
    KNOWN.update(optimizers)
    OPTIMIZERS.update({name: partial(Own, name) for name in optimizers})


def _unseen(paths: Sequence[str], parts: bytes) -> str:
    """Take what is registered, on a worker; returns the first path that it does not see, or nothing."""
    take(parts)
    return next((path for path in paths if not os.path.exists(path)), "")


def run_on_worker(task: Task, key: str, parts: bytes) -> Result:
    """Run a trial here, once no other has this process, until nobody waits for it or the worker has to go."""
    worker = get_worker()
    take(parts)

    def check() -> None:
        known = worker.state.tasks.get(key)
        if worker.status in LEAVING or known is None or known.state not in ("executing", "long-running"):
            raise Unwanted

    with MainHeapThreads(1) as pool:
        try:
            while not become_host(key):
                check()
                time.sleep(LOOK_SECONDS)
            return pool.submit(run_trial, task, check).result()
        except Unwanted:
            raise Reschedule from None
        finally:
            guests.discard(key)


@contextmanager
def _reaching() -> Iterator[None]:
    """Raise ResourceError if the scheduler cannot be reached in this block."""
    try:
        yield
    except (OSError, ClosedClientError, WorkersLost) as error:  # a lost comm is an OSError
        text = f"the Dask scheduler was lost ({one_line(error)}); trials stay at their last commits, and the "
        raise ResourceError(f"{text}same call with another client goes on") from error


@dataclass(eq=False)
class Workers:
    """The workers of a client, as a crew."""

    client: Client
    paths: Sequence[Path]
    """Paths that each worker must see: the model, the dataset, the folder of the search."""
    say: Callable[[str], None]
    wait_seconds: float
    parts: bytes = field(default_factory=packed)
    hired: dict[str, Recruit] = field(default_factory=dict)
    losses: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Trial -> its committed steps when it last lost its worker, and how many it has lost since then."""
    running: dict[Any, tuple[Task, str]] = field(default_factory=dict)
    """Future -> its trial, and the address of its worker."""
    ended: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    waiting_since: float | None = None
    """Monotonic time since which no worker has been seen to take trials; None: one does."""

    def hire(self, memory_bytes: int | None) -> tuple[int, int | None]:
        """Wait for workers, and hire those with room for a trial; returns its bytes, and its threads."""
        with _reaching():
            recruits, refusals = gather(self.client, self.wait_seconds, self.say, SEARCH)
            for error in refusals.values():
                raise error
            recruits = [_of_dask(recruit) for recruit in recruits]
            memory_bytes = memory_bytes or budget_bytes(recruits)
            check_limits(recruits, memory_bytes)
            self.room = Room(memory_bytes, (), self.say)
            errors = self._join([recruit.address for recruit in recruits])
        if not self.hired:
            nobody = BudgetError(self.room.nobody([recruit.address for recruit in recruits]))
            raise next(iter(errors.values()), nobody)
        return memory_bytes, min(recruit.threads for recruit in recruits)

    def _join(self, addresses: Sequence[str]) -> dict[str, OocdlError]:
        """Hire those of the workers that can take a trial; returns why others cannot, but for their room."""
        try:
            errors = self._errors(addresses)
        except WorkersLost:
            if addresses[1:]:
                alone = [self._join([address]) for address in addresses]
                return {address: error for errors in alone for address, error in errors.items()}
            there = [address for address in addresses if address in roll(self.client)]
            errors = {address: ResourceError(f"worker {address} does not answer") for address in there}
        self.room.leave_out(errors)
        return errors

    def _errors(self, addresses: Sequence[str]) -> dict[str, OocdlError]:
        """Hire as ``_join``. Raises WorkersLost if one of the workers is lost, or does not answer."""
        recruits, refusals = ask(self.client, addresses, self.say, SEARCH)
        errors = {one: error for one, error in refusals.items() if not isinstance(error, NotNowError)}
        processes = {recruit.process for recruit in self.hired.values()}
        apart = [one for one in one_a_process(recruits) if one.process not in processes]
        for address in {recruit.address for recruit in recruits} - {recruit.address for recruit in apart}:
            errors[address] = ResourceError(f"worker {address} shares its process with another")
        self.room.members = frozenset(self.hired)
        fitting = self.room.fitting([*self.hired.values(), *map(_of_dask, apart)])
        new = {recruit.address: recruit for recruit in fitting if recruit.address not in self.hired}
        what = list(map(str, self.paths)), self.parts
        answers = Watch(self.client, list(new), self.say).ask(_unseen, *what, refusal=Exception)
        for address, answer in answers.items():
            if isinstance(answer, OSError):  # of its connection: it is asked again, if it is there
                new.pop(address)
            elif answer:
                why = f"does not see {answer}; a search needs files that all its workers share"
                is_error = isinstance(answer, OocdlError)
                errors[address] = answer if is_error else StoreError(f"worker {address} {why}")
        self.hired |= {address: recruit for address, recruit in new.items() if address not in errors}
        return errors

    def run(self, tasks: deque[Task]) -> Iterator[Result]:
        wanted, looked_at = Wanted(self.client), float("-inf")
        try:
            while tasks or self.running:
                with _reaching():
                    if time.monotonic() - looked_at > LOOK_SECONDS:
                        self._look()
                        looked_at = time.monotonic()
                        wanted.ask(len(tasks) + len(self.running), busy=len(self.running))
                    self._submit(tasks)
                self._check_waiting()
                for task, result in self._ended():
                    result = result or self._loss(task)
                    if result is None:
                        tasks.appendleft(task)
                    else:
                        yield result
        finally:
            wanted.forget()
            for future in self.running:  # a trial that still runs stops at its next step, and commits
                future.release()

    def _look(self) -> None:
        there = roll(self.client)
        self.room.welcome([address for address in self.room.told if address not in there])
        self.hired = {address: recruit for address, recruit in self.hired.items() if address in there}
        for address in sorted(there.keys() - self.hired.keys() - self.room.told.keys()):
            self._join([address])

    def _submit(self, tasks: deque[Task]) -> None:
        busy = {address for _, address in self.running.values()}
        for address in [address for address in self.hired if address not in busy][: len(tasks)]:
            task, key = tasks.popleft(), f"oocdl-trial-{uuid.uuid4().hex}"
            packed = cloudpickle.dumps((run_on_worker, (task, key, self.parts)))
            future = self.client.submit(carried(call_packed), packed, key=key, workers=[address], pure=False)
            self.running[future] = task, address
            future.add_done_callback(self.ended.put)  # type: ignore[no-untyped-call]

    def _ended(self) -> Iterator[tuple[Task, Result | None]]:
        """Yield trials that have ended by now or in the next second; None: the worker was lost."""
        for future, (task, address) in list(self.running.items()):
            if address not in self.hired and not future.done():
                del self.running[future]
                future.release()
                yield task, None
        with suppress(queue.Empty):
            future = self.ended.get(timeout=LOOK_SECONDS)
            if future in self.running:
                task, _ = self.running.pop(future)
                yield task, _result_of(future, task)

    def _loss(self, task: Task) -> Result | None:
        """Return the outcome of a trial that has lost its worker; None if it is to be tried again."""
        steps = failure(task, "").steps
        before, losses = self.losses.get(task.trial, (0, 0))
        losses = 1 if steps > before else losses + 1
        self.losses[task.trial] = steps, losses
        if losses < MOST_LOSSES:
            return None
        text = f"WorkersLost: {losses} workers were lost in a row while they trained it; look in their logs"
        return failure(task, text)

    def _check_waiting(self) -> None:
        if self.hired:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = time.monotonic()
            self.say(f"waiting for workers of the client, up to {self.wait_seconds:.0f} s")
        elif time.monotonic() - self.waiting_since > self.wait_seconds:
            stay = "trials stay at their last commits, and the same call goes on"
            raise ResourceError(f"no worker has come in {self.wait_seconds:.0f} s; {stay}")


def _of_dask(recruit: Recruit) -> Recruit:
    """A worker with the limit at which Dask ends it, which a trial must not reach."""
    share = dask.config.get("distributed.worker.memory.terminate") or 1.0
    return replace(recruit, limit_bytes=recruit.limit_bytes and int(recruit.limit_bytes * share))


def _result_of(future: Future[Result], task: Task) -> Result | None:
    try:
        return future.result(timeout=GATHER_SECONDS)
    except (OSError, KilledWorker, CancelledError):
        return None
    except Exception as error:
        return failure(task, one_line(error))
