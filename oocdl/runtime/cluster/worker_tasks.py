"""Has the functions that the driver calls on members, and the coroutines that are Dask's tasks.

They run in a worker's event loop; what takes long goes to the member's own threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker
from distributed.protocol.pickle import loads

from oocdl.errors import DiskFullError, OocdlError, ResourceError
from oocdl.events import ProcessLook
from oocdl.host.main_heap import MainHeapThreads
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import TaskKey
from oocdl.runtime import dask_private
from oocdl.runtime.cluster.dask_limits import Limits, lift_limits, log_again, restore_limits
from oocdl.runtime.cluster.local_pass import Superseded
from oocdl.runtime.cluster.member import IN_ANOTHER_RUN, Member, PassEnd, become_member, member_of, members
from oocdl.runtime.cluster.member_setup import Setup
from oocdl.runtime.cluster.scheduler_side import METRIC
from oocdl.runtime.cluster.transfers import HANDLER, answer, error_of, fetch_all, result
from oocdl.runtime.measured import Measured
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.run.commit import Writer

_closing: set[asyncio.Future[None]] = set()
"""Futures of the members of this process that let go of what they have."""
_left: deque[str] = deque(maxlen=64)
"""Runs that this process was told to leave, maybe before it was told to take part: messages may overtake."""


class MemberPlugin(WorkerPlugin):
    """Makes room for the tasks of a member, and closes it when its worker closes, whatever the reason."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.limits: Limits | None = None
        self.name = f"oocdl-{member.setup.run_id}"

    def setup(self, worker: Worker) -> None:
        worker.handlers[HANDLER] = answer
        worker.metrics[METRIC] = self.report
        self.limits = lift_limits(worker, self.member.setup.run_id)

    def report(self, worker: Worker) -> list[Any]:
        """Return what this member does, which a heartbeat tells the scheduler."""
        return [*self.member.report()]

    async def teardown(self, worker: Worker) -> None:
        members.pop(self.member.setup.run_id, None)
        worker.handlers.pop(HANDLER, None)
        if self.limits is not None:
            restore_limits(worker, self.limits)
        for waiting in self.member.awaited.values():  # others ask for a pass that will not begin here
            if not waiting.done():
                waiting.set_exception(Superseded("this worker was given up"))
        closing = asyncio.get_running_loop().run_in_executor(None, self.member.close)
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        await closing
        if self.limits is not None:
            log_again(self.limits)
        if worker.metrics.get(METRIC) == self.report:  # else that of the next run
            del worker.metrics[METRIC]


async def set_up(packed: bytes, shares: bytes, dask_worker: Worker) -> bool | OocdlError:
    """Make this worker a member; return whether it sees the run directory, or why it cannot be one.

    ``packed`` is the pickled ``Setup``; ``shares`` is its own part, as ``Member.open`` takes it. If set-up
    fails, the worker has nothing of the run. The answer is Superseded if it was told to leave the run before,
    or another run or a trial of a search took it meanwhile: then workers are asked anew who can take part.
    Errors are values: of what is raised Dask logs all arguments, and those without a pickled traceback fail.
    """
    setup: Setup = loads(packed)  # type: ignore[no-untyped-call]
    for other in list(members.values()):
        if other.setup.owner != setup.owner:
            return ResourceError(f"worker {dask_worker.address} {IN_ANOTHER_RUN}")
        await dask_worker.plugin_remove(f"oocdl-{other.setup.run_id}")
    if _closing:  # two runs at once would take twice the memory
        await asyncio.wait(set(_closing))
    if setup.run_id in _left:
        return Superseded("the run has ended before this worker took part")
    folder = setup.settings.spill_folder(Path(dask_worker.local_directory) / "spill")
    number, pool = setup.addresses.index(dask_worker.address), MainHeapThreads(setup.threads + 1)
    member = Member(setup, number, folder, pool)
    if not become_member(member):
        pool.shutdown(wait=False)
        return Superseded("another run, or a trial of a search, was faster to take this worker")
    plugin = MemberPlugin(member)
    try:
        await dask_worker.plugin_add(plugin, plugin.name, catch_errors=False)
        await _in_pool(member, lambda: member.open(shares))
    except OocdlError as error:
        await dask_worker.plugin_remove(plugin.name)
        return type(error)(f"worker {dask_worker.address}: {error}")
    except BaseException:
        await dask_worker.plugin_remove(plugin.name)
        raise
    return member.sees_run


def look(run_id: str) -> ProcessLook:
    """Return how this member stands."""
    member = member_of(run_id)
    known = member.context.look(member.setup.threads, member.machine.base_bytes)
    return replace(known, received_bytes=member.received_bytes)


async def tear_down(run_id: str, dask_worker: Worker) -> None:
    """End this worker's part of a run, or keep it from having one later."""
    _left.append(run_id)
    if run_id in members:
        await dask_worker.plugin_remove(f"oocdl-{run_id}")


async def load(run_id: str, plan_id: str) -> None:
    """Load this member's weights and state from the run, which it sees."""
    member = member_of(run_id)
    await _in_pool(member, lambda: member.load(plan_id))


async def hold(run_id: str, pieces: Mapping[TaskKey, Chunk], more: bool) -> None:
    """Hold pieces that the driver has read; ``more``: beside those that are held."""
    member = member_of(run_id)
    member.hold({**member.held, **pieces} if more else pieces)


async def delivered(run_id: str, value: str) -> list[Chunk]:
    """Hand over what this member has made of a watched value in the last pass."""
    return member_of(run_id).delivered.pop(value, [])


async def write(run_id: str, plan_id: str, writer: Writer, names: Sequence[str]) -> dict[str, Any]:
    """Write this member's part of a commit."""
    member = member_of(run_id)
    records: dict[str, Any] = await _in_pool(member, lambda: member.write(plan_id, writer, names))
    return records


async def held(run_id: str, keys: Collection[TaskKey]) -> dict[TaskKey, Chunk]:
    """Return those of the pieces that this member holds."""
    mine = member_of(run_id).held
    return {key: mine[key] for key in keys if key in mine}


async def roll_back(run_id: str, number: int) -> bool:
    """Go back to what was held when the step began whose first pass has this number.

    Returns whether all of it is still there.
    """
    member = member_of(run_id)
    member.given_up = True
    running, member.running = member.running, None  # its end, which may be about to run, finds it gone
    if running is not None:
        running.fail(Superseded("the step was broken off"))
        await error_of(running.done)
    if member.began == number:
        member.held = member.before
    return len(member.held) >= member.pieces


async def measured(run_id: str) -> Measured:
    """Return what was measured of this member's tasks so far."""
    return member_of(run_id).context.measured


@dataclass(frozen=True)
class Begin:
    """Names the pass that a member's first segment begins."""

    name: str
    plan_id: str
    info: PassInfo
    starts_step: bool


async def run_segment(
    run_id: str, last_group: int, begins: Begin | None, ends: bool, *_: None
) -> PassEnd | None:
    """Run this member's part of a pass up to the end of a group of layers; this is a task of Dask's.

    The first one of a pass begins it, once, when the one before is over; the last one returns a report.
    """
    member = member_of(run_id)
    if begins is not None:
        _begin(member, begins)
    running = member.running
    if running is None:
        raise Superseded("the pass is over on this worker")
    try:
        await result(running.run_through(last_group))
        results = await result(running.done) if ends else None
    except DiskFullError as error:
        raise member.named(error) from None
    if results is None:
        return None
    if member.running is not running:
        raise Superseded("the pass was given up before its end")
    return member.end(running.plan_id, results)


def _begin(member: Member, pass_: Begin) -> None:
    if member.given_up:
        raise Superseded("the run is about to end on this worker")
    if member.running is not None or pass_.name in member.begun_before:
        raise Superseded("the pass has begun on this worker, or another is not over")
    running = member.begin(pass_.name, pass_.plan_id, pass_.info, pass_.starts_step)
    worker = get_worker()
    dask_private.call_soon(worker, fetch_all, worker, member, running)


async def _in_pool(member: Member, call: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(member.pool, member.work.run, call)
