"""Holds one worker's share of the weights of a run, and runs its part of passes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distributed.protocol.pickle import loads

from oocdl.engines.engine import get_engine
from oocdl.errors import DiskFullError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region
from oocdl.host.heap import give_back_freed_memory, trim
from oocdl.host.limits import check_budget
from oocdl.planning.calls import UnitCall
from oocdl.planning.hosts.exchange import Bundle
from oocdl.planning.hosts.local_order import local_order
from oocdl.planning.hosts.share import Share
from oocdl.planning.machine import discards_old_weights, machine_for
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import TaskKey, stored_key
from oocdl.runtime import execute, weight_io
from oocdl.runtime.cluster.cluster_progress import Report, Work
from oocdl.runtime.cluster.local_pass import LocalPass, Superseded
from oocdl.runtime.cluster.member_setup import PassSetup, Setup
from oocdl.runtime.inputs import Kept, sources_of
from oocdl.runtime.measured import Moved
from oocdl.storage.cache.chunk import Chunk, home, use
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.dataset.identity import check_same
from oocdl.storage.run.commit import Writer
from oocdl.storage.run.run_store import RunStore

IN_ANOTHER_RUN = (
    "has part in another run; a worker process takes part in one at a time: wait until that is over, or "
    "start workers for this one"
)
SENDING = 2
"""Maximum number of large bundles that are on their way to others at once."""
TRAVELLING = 1 + SENDING
"""Number of largest bundles for which memory is kept: one arrives, and the others leave."""


@dataclass(frozen=True)
class PassEnd:
    """A member's report at the end of its part of a pass."""

    scalars: Mapping[str, float]
    moved: Moved
    """Totals since the member was set up."""
    notice: str | None
    """Warning of its memory guard for the user; None: there is none."""


@dataclass(eq=False)
class Member:
    """The part of a run that this process has."""

    setup: Setup
    number: int
    spill: Path
    pool: Executor
    held: dict[TaskKey, Chunk] = field(default_factory=dict)
    before: dict[TaskKey, Chunk] = field(default_factory=dict)
    """Pieces that were held when the last step began that has not been committed."""
    began: int | None = None
    """Number of the first pass of that step."""
    running: LocalPass | None = None
    delivered: dict[str, list[Chunk]] = field(default_factory=dict)
    """Value -> chunks of it that were made in the last pass, if it is watched."""
    delivering: threading.Lock = field(default_factory=threading.Lock)
    given_up: bool = False
    """Whether a step was broken off: what is held is committed, and no pass begins any more, however late."""
    is_closing: bool = False
    ended: LocalPass | None = None
    """The last pass: others may still ask for bundles of it."""
    awaited: dict[str, asyncio.Future[LocalPass]] = field(default_factory=dict)
    """Passes that others ask for before they have begun here, by name."""
    asked: dict[int, Bundle] = field(default_factory=dict)
    """Bundles that others were asked for and that have not come, by number."""
    work: Work = field(default_factory=Work)
    sending: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, SENDING))
    """Semaphore that limits how many large bundles are on their way to others."""
    received_bytes: int = 0
    """Total of the bundles that have come from other members."""
    begun_before: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    """Names of the last passes."""

    def open(self, packed: bytes) -> None:
        """Get tier, engine and orders ready, from the pickled shares of passes by plan id.

        It takes seconds, so a thread of ``pool`` calls it.
        """
        known = self.setup
        shares: dict[str, Share] = loads(packed)  # type: ignore[no-untyped-call]
        dataset = open_dataset(known.dataset)
        check_same(dataset, known.identities)
        engine = get_engine(known.settings.engine)
        check_budget(known.settings.memory_bytes)
        machine = self.machine = machine_for(
            known.settings, dataset, known.threads, preparing_bytes=known.preparation.nbytes
        )
        calls = (call for share in shares.values() for call in share.own.values())
        together = max((call.unit.program.threads for call in calls if isinstance(call, UnitCall)), default=1)
        machine = self.machine = replace(machine, together=together)
        largest_bytes = max(one.crossing_bytes for one in known.passes.values())
        room = machine.room_bytes(known.passes.values(), TRAVELLING * largest_bytes)
        heap, self.tier = execute.open_tier(machine, room, self.spill)
        data = dataset, known.preparation, Kept(machine.batch_cache_bytes)
        sources = {
            name: sources_of(name, one.factored, one.feeds, one.labels, *data)
            for name, one in known.passes.items()
        }
        self.context = execute.Context(shares, sources, engine, self.tier, heap, self._deliver, known.watched)
        execute.register(known.run_id, self.context)
        self.orders = {name: local_order(share) for name, share in shares.items()}
        gc.freeze()  # as ``heap.lasting``: to go through them took a quarter of a second every third step

    def report(self) -> Report:
        """Return what this member does now."""
        moved, waiting = [self.work.done], 0
        if hasattr(self, "tier"):
            stats, waiting = self.tier.stats, len(self.tier.ledger.line)
            moved += [stats.read_bytes, stats.written_bytes]
        first = next(iter(self.asked.values()), None)
        words = "has nothing to do"
        if first is not None:
            what = f"layer {first.key.layer!r}" if first.key.layer else "weights"
            words = f"waits for {what} of {self.setup.addresses[first.sender]}"
        elif self.running is not None:
            words = "waits for others" if self.running.is_between else "waits for its own units"
        arriving_bytes = sum(bundle.nbytes for bundle in self.asked.values())
        return Report(self.work.running - waiting, moved, arriving_bytes, words)

    def named(self, error: DiskFullError) -> DiskFullError:
        """Return an error that names the worker whose disk is full: this one, unless another is named."""
        text = str(error)
        is_named = text.startswith("worker ")
        return error if is_named else DiskFullError(f"worker {self.setup.addresses[self.number]}: {text}")

    @property
    def sees_run(self) -> bool:
        """Whether this worker shares a disk with the driver on which the run is, and may write there."""
        return mark_of(self.setup.run) == self.setup.mark and may_write(self.setup.run)

    def _deliver(self, plan_id: str, value: str, region: Region, array: Array, info: PassInfo) -> None:
        """Keep what was made of a watched value until the driver asks for it."""
        with self.delivering:
            self.delivered.setdefault(value, []).append(self.tier.adopt(array, region))

    def close(self) -> None:
        """Stop what runs, and let go of everything. Waits for units that run."""
        self.is_closing = True
        if self.running is not None:
            self.running.fail(Superseded("the run has left this worker"))
        self.pool.shutdown()
        self.work.run(self._let_go)

    def _let_go(self) -> None:
        self.held.clear()
        self.before.clear()
        self.delivered.clear()
        execute.forget(self.setup.run_id)
        if hasattr(self, "tier") and home() is self.tier:
            use(None)
        if hasattr(self, "tier"):
            self.tier.close()
        gc.unfreeze()
        give_back_freed_memory()

    async def pass_named(self, name: str) -> LocalPass:
        """Return the pass of this name, once it has begun here; raise Superseded if it is over."""
        for known in (self.running, self.ended):
            if known is not None and known.name == name:
                return known
        if name in self.begun_before:
            raise Superseded("the pass is over on this worker")
        future = self.awaited.setdefault(name, asyncio.get_running_loop().create_future())
        found: LocalPass = await asyncio.shield(future)
        return found

    def begin(self, name: str, plan_id: str, info: PassInfo, starts_step: bool) -> LocalPass:
        """Start this member's part of a pass, which may be the first of a step."""
        known = self.setup.passes[plan_id]
        order = self.orders[plan_id]
        if starts_step:
            self.before, self.began = dict(self.held), info.number
        graph = known.factored.graph
        large = discards_old_weights(known, self.machine)

        def take(key: TaskKey) -> Chunk:
            if not (large and key.value in graph.updates):
                return self.held[key]
            self.before.pop(key, None)  # gone with its last reader: the beginning of the step included
            return self.held.pop(key)

        self.tier.renew((chunk, order.uses.get(key, ())) for key, chunk in self.held.items())
        wanted = [*self._renewed(known).values()]
        wanted += [key for key in known.scalars.values() if key in order.group_of]
        facts = (self.setup.run_id, name, plan_id, info)
        self.ended = None
        self.delivered.clear()
        self.context.begin_pass(plan_id)
        keys, threads = list(dict.fromkeys(wanted)), self.setup.threads
        self.running = LocalPass(order, take, keys, facts, threads, self.work)
        self.asked = {}
        self.running.start(self.pool)
        self.begun_before.append(name)
        waiting = self.awaited.pop(name, None)
        if waiting is not None:
            waiting.set_result(self.running)
        return self.running

    def _renewed(self, known: PassSetup) -> dict[TaskKey, TaskKey]:
        """Return stored piece -> the chunk that replaces it, of the pieces that this member holds."""
        return {key: made for key, made in known.renewed.items() if known.homes[key] == self.number}

    def end(self, plan_id: str, results: Mapping[TaskKey, Chunk]) -> PassEnd:
        """End a pass: hold what the next one starts from, and return a report."""
        known = self.setup.passes[plan_id]
        self.held = weight_io.after_pass(known.factored, self._renewed(known), results, self.held)
        self.running, self.ended = None, self.running
        scalars = {name: float(results[key].copy()) for name, key in known.scalars.items() if key in results}
        self.context.end_pass(plan_id)
        return PassEnd(scalars, self.context.moved(self.machine.base_bytes), self.context.heap.notice)

    def load(self, plan_id: str) -> None:
        """Load the pieces that this member holds from the run."""
        known, read = self.setup.passes[plan_id], RunStore.open(self.setup.run).read
        mine = {key for key, home in known.homes.items() if home == self.number}
        self.hold(weight_io.load(known.pieces, known.factored, read, self.tier, mine))
        trim()

    def hold(self, pieces: Mapping[TaskKey, Chunk]) -> None:
        """Hold these pieces, and no others, as those that the next step starts from."""
        self.held, self.before, self.began = dict(pieces), {}, None
        self.pieces = len(self.held)

    def write(self, plan_id: str, writer: Writer, names: Sequence[str]) -> dict[str, Any]:
        """Write the pieces of a commit that this member holds; return the records of each array."""
        known = self.setup.passes[plan_id]
        self.before, self.began = {}, None
        records: dict[str, Any] = {}
        for name in names:
            for number, region in enumerate(known.pieces[name]):
                chunk = self.held.get(stored_key(name, number))
                if chunk is None:
                    continue
                if self.is_closing:
                    raise Superseded("the run has left this worker")
                with self.tier.reserve(0, [chunk]):
                    box, array = weight_io.box_of(known.factored, name, region, chunk.array())
                    records.setdefault(name, {}).update(writer.write(name, box, array))
                    del array
        return records


def mark_of(run: Path) -> str:
    """Return a digest of the ``run.json`` of a run directory; "" where there is none."""
    try:
        return hashlib.sha256((run / "run.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def may_write(run: Path) -> bool:
    """Return whether this process may write to a run directory: some clusters mount a home read-only."""
    return os.access(run, os.W_OK)


members: dict[str, Member] = {}
"""Members of this process, by run; more than one only for a moment."""
guests: set[str] = set()
"""Trials of searches that this process trains; while there is one it is no member, and vice versa."""
SEARCH = "search"
"""Name of all searches where owners of a process are listed: they share workers, a trial each at a time."""
_taking = threading.Lock()


def become_member(member: Member) -> bool:
    """Take part in a run; return whether this process does: not if it does in another, or trains a trial."""
    with _taking:
        if not members and not guests:
            members[member.setup.run_id] = member
        return members.get(member.setup.run_id) is member


def owners() -> tuple[str, ...]:
    """Return the users of this process: sessions in whose runs it has part, or ``SEARCH``."""
    return (*(one.setup.owner for one in members.values()), *([SEARCH] if guests else []))


def become_host(trial: str) -> bool:
    """Take a trial to train until it leaves ``guests``; return whether this process was free to do so."""
    with _taking:
        if not members and not guests:
            guests.add(trial)
        return trial in guests


def member_of(run_id: str) -> Member:
    """Return this process's part of a run; raise Superseded if it has none, or none any more."""
    try:
        return members[run_id]
    except KeyError:
        raise Superseded("this worker is no member of the run, or was given up") from None
