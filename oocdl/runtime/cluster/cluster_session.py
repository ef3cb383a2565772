"""Runs the steps of a run over the workers of a Dask client.

Members of a crew hold the weights and run the calls; the driver holds nothing but futures of the pass that
runs. What a task computes is fixed by the plan, so the bits are those of a run in one process, whoever is in
the crew.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import count
from math import inf, prod
from time import monotonic, sleep

import numpy as np
from dask import annotate  # type: ignore[attr-defined]
from distributed import Client, Future
from distributed.protocol.pickle import dumps

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings
from oocdl.errors import OocdlError, ResourceError
from oocdl.events import ProcessLook
from oocdl.host.heap import uncollected
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts.exchange import exchanges_of
from oocdl.planning.hosts.segments import outline_of
from oocdl.planning.hosts.share import packed_shares
from oocdl.planning.passes import MAIN, PassInfo
from oocdl.planning.task_key import dask_key, task_key
from oocdl.runtime import dask_private, execute, weight_io
from oocdl.runtime.cluster import connecting, crew, dask_records, scheduler_side, worker_tasks
from oocdl.runtime.cluster.dask_limits import hold_nanny
from oocdl.runtime.cluster.growth import Arrivals
from oocdl.runtime.cluster.member import PassEnd, mark_of
from oocdl.runtime.cluster.member_setup import Setup, pass_setup
from oocdl.runtime.cluster.pass_tasks import PassTasks
from oocdl.runtime.cluster.room import Room
from oocdl.runtime.cluster.shares import Shares
from oocdl.runtime.cluster.watch import Watch, failed, in_loop, on_scheduler, open_client, plain
from oocdl.runtime.lost import SILENT_SECONDS, WorkersLost, check_losses
from oocdl.runtime.measured import MEMORY, Measured, Moved, merged
from oocdl.runtime.session import Deliver, Held, watched_results, watched_values
from oocdl.runtime.trace import Recording
from oocdl.storage.dataset.dataset import Dataset
from oocdl.storage.dataset.identity import identity
from oocdl.storage.run.run_store import RunStore

PAUSE_SECONDS = 1.0
"""Seconds between two attempts to gather a crew."""
LOOK_TIMEOUT_SECONDS = 2.0
"""Seconds within which members tell how they stand; others are left out of a look."""
PRIORITY = 100
"""Dask's priority of segments: a worker has a thread more for each, which no other task is to take."""
FAREWELL_SECONDS = 15.0
"""Seconds that members which are given up have to clear up."""


@dataclass(eq=False, kw_only=True)
class ClusterSession(Held):
    """Runs steps of one run on a client's workers, with the interface of ``Session``."""

    client: Client
    planned: Sequence[crew.Recruit]
    """The workers that the run was planned for."""
    compiled: Mapping[str, CompiledPass]
    dataset: Dataset
    settings: Settings
    preparation: Preparation
    threads: int
    """Number of programs that a member runs at once."""
    store: RunStore
    wait_seconds: float
    """Seconds that it waits for workers where there are none."""
    say: Callable[[str], None]
    """Function that is called with lines for the user."""
    silent_seconds: float = SILENT_SECONDS
    """Seconds of silence after which a worker is given up."""
    deliver: Deliver | None = None
    watched: frozenset[str] = frozenset()
    """Names of the values whose results ``deliver`` gets."""
    owner: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers of passes: no two passes of a session have the same keys, even if one has failed."""
    watch: Watch | None = None
    is_carried: bool = False
    """Whether the scheduler lacks oocdl, so that tasks are carried through it."""
    first_pass: int | None = None
    """Number of the first pass of the step that runs, once it runs."""
    tasks_since_forgetting: int = 0

    def __enter__(self) -> ClusterSession:
        self.before_crew = Moved(0, 0, 0, 0, 0, 0)
        """Totals that the crews before this one have moved."""
        self.connection = connecting.Connection(self.client)
        self.room = Room(self.settings.memory_bytes, self.planned, self.say)
        self.gather()
        return self

    def __exit__(self, *_: object) -> None:
        self.dissolve()
        self.connection.close()

    # --- the crew --------------------------------------------------------------------------

    def gather(self) -> None:
        """Gather a crew of the workers that are there, and set it up; wait ``wait_seconds`` for the first.

        A worker that cannot take part, or has too little room, is left out. Raises ResourceError if no other
        comes, or if they are lost again and again; before the first crew, why a worker cannot take part.
        """
        deadline, told, losses = monotonic() + self.wait_seconds, "", 0
        while True:
            try:
                self.client = self.connection.renew()
                connecting.keep_workers(self.client)
                self.is_carried = on_scheduler(self.client, scheduler_side.lacks_oocdl)
                while not self._gather(max(deadline - monotonic(), 1.0)):
                    self.dissolve()
                connecting.keep_members(self.client, len(self.recruits) >= self.most_hosts)
                return
            except WorkersLost as lost:
                losses += self.watch is not None  # some had come
                self.dissolve()
                check_losses(losses, lost)
                if monotonic() > deadline:
                    raise ResourceError(
                        f"the workers are gone ({lost}), and none has come in "
                        f"{self.wait_seconds:.0f} s; the run is committed up to its last commit: start it "
                        "again to go on"
                    ) from lost
                if str(lost) != told:
                    told = str(lost)
                    left = max(deadline - monotonic(), 0)
                    self.say(f"{told}; gathering workers anew (for up to {left:.0f} s)")
                sleep(PAUSE_SECONDS)
            except BaseException:
                self.dissolve()
                raise

    def _gather(self, timeout_seconds: float) -> bool:
        """Gather a crew and set it up; return whether all of it can take part."""
        there, refusals = crew.gather(
            self.client, timeout_seconds, self.say, self.owner, self.settings.engine
        )
        self.room.leave_out(refusals)
        self.recruits = self.room.fitting(there)
        if not self.recruits:
            everybody = [*(one.address for one in there), *refusals]
            none = self.room.nobody(everybody)
            if len(everybody) >= crew.expected(self.client) > 0:
                raise ResourceError(f"{none}, nor are more to come; it is committed: start it with others")
            raise WorkersLost(none)
        self.addresses = [one.address for one in self.recruits]
        self.arrivals = Arrivals([*(one.address for one in there), *refusals])
        self.run_id = uuid.uuid4().hex[:12]
        kinds = {MAIN: self.compiled[MAIN], **self.compiled} if MAIN in self.compiled else self.compiled
        with uncollected():  # hundreds of thousands of objects, where units are as many
            members, graphs = len(self.addresses), {name: one.graph for name, one in kinds.items()}
            exchanges = exchanges_of(graphs, members, self.threads)
            self.tasks = {
                name: PassTasks(outline_of(one, members, self.threads), self.is_carried)
                for name, one in exchanges.items()
            }
            packed = packed_shares(exchanges, members)
        self.ends: dict[str, PassEnd] = {}
        self.watch = Watch(self.client, self.addresses, self.say, self.silent_seconds)
        setup = Setup(
            run_id=self.run_id,
            owner=self.owner,
            addresses=tuple(self.addresses),
            passes={name: pass_setup(kinds[name], one) for name, one in exchanges.items()},
            dataset=self.dataset.spec,
            identities={name: identity(array) for name, array in self.dataset.stored.items()},
            settings=self.settings,
            preparation=self.preparation,
            watched=watched_results(self.compiled, self.watched),
            run=self.store.path,
            mark=mark_of(self.store.path),
            threads=self.threads,
        )
        refusals = self._set_up(setup, packed)
        if refusals:
            self.room.refuse(refusals)
        else:
            hosts = next(iter(kinds.values())).plan.hosts
            self.most_hosts = inf if hosts is None else hosts
            self.room.enlist(self.recruits, hosts)
        return not refusals

    def _set_up(self, setup: Setup, packed: Sequence[bytes]) -> crew.Refusals:
        """Set up all members; return the refusals of those that cannot take part."""
        assert self.watch is not None
        connecting.watch_over(self.watch, self.run_id)
        common: bytes = dumps(setup)  # type: ignore[no-untyped-call]
        each = {address: (common, mine) for address, mine in zip(self.addresses, packed, strict=True)}
        sees = self.watch.ask_each(worker_tasks.set_up, each, refusal=OocdlError)
        refusals = {address: found for address, found in sees.items() if isinstance(found, OocdlError)}
        if refusals:
            return refusals
        apart = tuple(address for address in self.addresses if not sees[address])
        self.shares = Shares(
            watch=self.watch,
            run_id=self.run_id,
            addresses=tuple(self.addresses),
            apart=apart,
            homes=next(iter(setup.passes.values())).homes,
        )
        self.shares.ask(hold_nanny, nanny=True)
        if apart:
            self.say(
                f"{len(apart)} of {len(self.addresses)} workers do not see {self.store.path}, or may not "
                "write there: their weights are read and committed through this process"
            )
        self._hold_groups()
        dask_records.shorten_client_log(self.client)
        on_scheduler(self.client, scheduler_side.resize_sent, dask_records.LOG_LENGTH)
        return {}

    def _hold_groups(self) -> None:
        layers = dict.fromkeys(layer for tasks in self.tasks.values() for layer in tasks.layers)
        with open_client():
            self.groups = dask_records.hold_groups(self.client, self.run_id, layers)

    def dissolve(self) -> None:
        """Have all members that are left clear up. Never waits long, and never fails."""
        watch, self.watch = self.watch, None
        if watch is None:
            return
        self.groups = []
        self.before_crew = self.moved()
        self.ends = {}
        with suppress(Exception):  # whoever does not answer in time is told by the scheduler when it does
            connecting.watch_no_more(self.client, self.run_id, FAREWELL_SECONDS)
            dask_records.shorten_client_log(self.client, scheduler_side.usual_length())

    def gather_again(self) -> int:
        """Gather a crew anew, after workers were lost or have come; return how many members it has.

        Before that it deletes what those which were left have written of a commit that was broken off.
        """
        self.dissolve()
        self.store.forget_uncommitted()
        self.gather()
        return len(self.addresses)

    def newcomers(self) -> int:
        """Return how many workers have come since the crew was gathered, and are to join it now."""
        new = self.arrivals.settled(self.client) if len(self.recruits) < self.most_hosts else []
        if not new:
            return 0
        try:
            recruits, refusals = crew.ask(self.client, new, self.say, self.owner, self.settings.engine)
        except WorkersLost:  # of those who came: the crew is watched by itself
            return 0
        self.room.welcome(new)
        self.room.leave_out(refusals)
        processes = {one.process for one in self.recruits}
        others = [one for one in recruits if one.process not in processes]
        fitting = self.room.fitting([*self.recruits, *others])
        joining = [one for one in fitting if one.address in new]
        if not joining:
            self.arrivals.ignore(new)
        return len(joining)

    # --- passes ----------------------------------------------------------------------------

    def load(self, plan_id: str, read: weight_io.Read) -> None:
        """Have each member load its share from the run; ``read`` is for those that do not see it."""
        self.shares.load(self.compiled[plan_id], plan_id, read)

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Run all passes of a step or none: if one fails, members hold what they held before the first."""
        self.first_pass = None
        try:
            yield
        except WorkersLost:
            raise
        except BaseException:
            self.spent = not self._roll_back()
            raise
        finally:
            self.first_pass = None

    def _roll_back(self) -> bool:
        """Return whether all members hold again what the step began with."""
        if self.first_pass is None:
            return True
        try:
            return all(self.shares.ask(worker_tasks.roll_back, self.first_pass).values())
        except WorkersLost:
            return False

    def run_pass(self, plan_id: str, info: PassInfo) -> dict[str, float]:
        """Run one pass; return its scalar outputs by value name. Raises WorkersLost."""
        assert self.watch is not None
        starts = self.first_pass is None
        self.first_pass = info.number if starts else self.first_pass
        name = f"{self.run_id}/{next(self.numbers)}"
        of_kind, begun = self.tasks[plan_id], monotonic()
        tasks = of_kind.of_pass(name, self.run_id, (plan_id, info, starts))
        ends = [dask_key(key, name) for key in of_kind.ends]
        workers = {key: [self.addresses[task_key(key).number]] for key in tasks}
        with annotate(workers=workers.__getitem__, retries=0, priority=PRIORITY):
            # The name of the pass tells its graph from all others; Dask would hash all tasks for that.
            graph = dask_private.LLGExpr(tasks, _determ_token=name)  # type: ignore[no-untyped-call]
            with open_client():
                futures: list[Future[PassEnd]] = self.client.get(graph, ends, sync=False)  # type: ignore[no-untyped-call]
        found = self._results(futures)
        self.ends = dict(zip(self.addresses, found, strict=True))
        if of_kind.note(monotonic() - begun):
            self._hold_groups()
        for address, one in self.ends.items():
            self.tell(None if one.notice is None else f"worker {address}: {one.notice}")
        self.tasks_since_forgetting += len(tasks)
        if self.tasks_since_forgetting > dask_records.TASKS_BETWEEN_FORGETTING:
            self.tasks_since_forgetting = 0
            self.watch.ask(dask_records.forget_keys)
            on_scheduler(self.client, scheduler_side.forget_keys)
        for value in watched_values(self.compiled[plan_id], self.watched):
            self._collect(plan_id, value, info)
        return {value: number for one in found for value, number in one.scalars.items()}

    def _collect(self, plan_id: str, value: str, info: PassInfo) -> None:
        """Have members send what they have made of a watched value."""
        assert self.deliver is not None
        factored = self.compiled[plan_id].plan.factored
        nbytes = prod(factored.shapes[value]) * np.dtype(factored.graph.values[value].dtype).itemsize
        for address in self.addresses:  # one at a time: all of it may be more than this process has room for
            made = self.shares.ask(worker_tasks.delivered, value, only=[address], nbytes=nbytes)
            for chunk in made[address]:
                self.deliver(plan_id, value, chunk.region, chunk.copy(), info)

    def _results(self, futures: Sequence[Future[PassEnd]]) -> list[PassEnd]:
        """Return the results of the tasks that end a pass; raise what one of them has raised."""
        assert self.watch is not None
        self.watch.wait(futures, tick=self.tick)
        for future in futures:
            if failed(future):
                error = dask_private.error_of(future) or OSError(f"a task was {future.status}")
                self.room.spare(error, self.addresses)
                self.watch.raise_of(error)
        gathered = in_loop(self.client, dask_private.gather(self.client, futures))
        self.watch.wait([gathered])
        try:
            return list(gathered.result())
        except Exception as error:
            raise WorkersLost(plain(error)) from error

    def commit(self, store: RunStore, plan_id: str, meta: Mapping[str, object]) -> None:
        """Write all weights and state as a new version: each member what it holds. Raises WorkersLost."""
        self.shares.commit(self.compiled[plan_id], plan_id, store, meta)

    # --- what is measured ------------------------------------------------------------------

    def moved(self) -> Moved:
        """Return totals over all members since the session began; memory is that of the largest member."""
        each = [self.before_crew, *(one.moved for one in self.ends.values())]
        totals = map(sum, zip(*map(astuple, each), strict=True))
        largest = {name: max(getattr(one, name) for one in each) for name in MEMORY}
        return replace(Moved(*totals), **largest)

    def looks(self) -> tuple[ProcessLook, ...]:
        """Return how members stand, without those that do not answer in time."""
        assert self.watch is not None
        look, there = worker_tasks.look, self.addresses
        asked = dask_private.run_on_workers(self.client, look, self.run_id, workers=there)
        answer = in_loop(self.client, asked)
        with suppress(TimeoutError, OSError, CancelledError):  # who is lost is noticed by the watch
            found = answer.result(LOOK_TIMEOUT_SECONDS)
            return tuple(one for one in found.values() if isinstance(one, ProcessLook))
        answer.cancel()
        return ()

    def measured(self) -> Measured:
        """Return what was measured of tasks on all members of this crew."""
        return merged(self.shares.ask(worker_tasks.measured).values())

    def start_recording(self) -> None:
        self.shares.ask(execute.start_recording)

    def stop_recording(self) -> list[Recording]:
        return list(self.shares.ask(execute.stop_recording).values())
