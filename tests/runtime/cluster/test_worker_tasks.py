"""What members are told late, twice or in another order changes nothing."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.ioloop import IOLoop

from oocdl.errors import ResourceError
from oocdl.planning.passes import PassInfo
from oocdl.runtime.cluster import dask_limits, member, scheduler_side, worker_tasks
from oocdl.runtime.cluster.local_pass import Superseded


@pytest.mark.parametrize("finished", [True, False])
def test_a_pass_that_ends_after_a_step_was_rolled_back_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """Else a commit would have weights of two steps: of members told before their end, and after it."""
    done: Future[dict[Any, Any]] = Future()

    def fail(error: BaseException) -> None:
        if not done.done():
            done.set_exception(error)

    ended: list[Any] = []
    one = SimpleNamespace(
        running=SimpleNamespace(done=done, fail=fail, run_through=lambda _: done, plan_id="main"),
        began=7, before={"w": "old"}, held={"w": "half"},
        pieces=1, given_up=False, end=lambda *given: ended.append(given),
    )  # fmt: skip
    monkeypatch.setitem(member.members, "run", one)  # type: ignore[arg-type]

    async def both() -> bool:
        end = asyncio.create_task(worker_tasks.run_segment("run", 0, None, True))
        await asyncio.sleep(0)
        if finished:
            done.set_result({})  # the end is about to go on
        complete = await worker_tasks.roll_back("run", 7)
        with pytest.raises(Superseded):
            await end
        with pytest.raises(Superseded):  # one that comes late
            begin = worker_tasks.Begin("run/8", "main", PassInfo(8, 0), True)
            await worker_tasks.run_segment("run", 0, begin, False)
        return complete

    assert asyncio.run(both()) and one.held == {"w": "old"} and not ended


def test_a_worker_that_was_told_to_leave_takes_no_part_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has died while workers were set up, and the message to set up is the slower one."""
    monkeypatch.setattr(worker_tasks, "_left", worker_tasks._left.copy())
    monkeypatch.setattr(dask_limits, "_over", dask_limits._over.copy())
    worker: Any = SimpleNamespace(address="tcp://1", local_directory=".", plugins={})
    setup = pickle.dumps(SimpleNamespace(run_id="late", owner="x"))
    monitor = SimpleNamespace(callback=print)
    nanny: Any = SimpleNamespace(periodic_callbacks={dask_limits.MONITOR: monitor}, pid=1)

    async def both() -> None:
        await worker_tasks.tear_down("late", worker)
        assert isinstance(await worker_tasks.set_up(setup, b"", worker), Superseded)
        await dask_limits.release_nanny("late", nanny)
        await dask_limits.hold_nanny("late", nanny)

    asyncio.run(both())
    assert "late" not in member.members and monitor.callback is print


def test_of_two_runs_that_wait_for_the_same_worker_one_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come while the member before lets go of its memory: two at once would take twice the budget."""
    monkeypatch.setattr(member, "members", {})
    monkeypatch.setattr(worker_tasks, "members", member.members)
    monkeypatch.setattr(worker_tasks, "_closing", set())
    monkeypatch.setattr(worker_tasks, "Member", lambda setup, *_: SimpleNamespace(setup=setup, sees_run=True))
    monkeypatch.setattr(worker_tasks, "MemberPlugin", lambda _: SimpleNamespace(name="x"))
    monkeypatch.setattr(worker_tasks, "_in_pool", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(worker_tasks, "loads", lambda setup: setup)

    async def added(*_: Any, **__: Any) -> None: ...

    worker: Any = SimpleNamespace(address="here", local_directory=".", plugin_add=added)

    def setup(run_id: str, owner: str) -> Any:
        settings = SimpleNamespace(spill_folder=lambda folder: folder)
        return SimpleNamespace(run_id=run_id, owner=owner, settings=settings, threads=1, addresses=("here",))

    async def both() -> list[Any]:
        closing = asyncio.get_running_loop().create_future()
        worker_tasks._closing.add(closing)
        runs = [asyncio.create_task(worker_tasks.set_up(setup(one, one), b"", worker)) for one in "ab"]
        await asyncio.sleep(0)
        worker_tasks._closing.discard(closing)
        closing.set_result(None)
        return await asyncio.gather(*runs)

    first, second = asyncio.run(both())
    assert first is True and isinstance(second, Superseded) and [*worker_tasks.members] == ["a"]
    third = asyncio.run(worker_tasks.set_up(setup("b", "b"), b"", worker))  # not raised, which Dask would log
    assert isinstance(third, ResourceError)
    monkeypatch.setattr(member, "guests", {"trial"})
    worker_tasks.members.clear()
    found = asyncio.run(worker_tasks.set_up(setup("c", "c"), b"", worker))
    assert isinstance(found, Superseded)  # so that workers are asked anew
    assert not worker_tasks.members


def test_members_that_do_not_answer_are_told_until_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped goes on later than a connection waits; one that has left needs nothing."""
    monkeypatch.setattr("oocdl.runtime.cluster.scheduler_side.AGAIN_SECONDS", 0.0)
    tries: list[tuple[str, bool]] = []

    async def broadcast(*, msg: Any, workers: list[str], nanny: bool, on_error: str) -> dict[str, Any]:
        tries.append((workers[0], nanny))
        return {} if workers == ["stopped"] and len(tries) < 9 else {workers[0]: {"status": "OK"}}

    scheduler: Any = SimpleNamespace(
        plugins={}, stream_comms={}, client_comms={}, broadcast=broadcast,
        workers={"stopped": SimpleNamespace(nanny=None), "well": SimpleNamespace(nanny="n")},
    )  # fmt: skip
    scheduler.remove_plugin = scheduler.plugins.pop
    farewells = [(b"", b"", nanny) for nanny in (False, True)]
    members = ["gone", "stopped", "well"]
    scheduler.plugins["oocdl-run"] = scheduler_side.Cleanup("run", "client", members, farewells)

    async def clear_up() -> None:
        scheduler.loop = IOLoop.current()
        await scheduler_side.clear_up("oocdl-run", 10.0, scheduler)

    asyncio.run(clear_up())
    assert tries.count(("well", False)) == tries.count(("well", True)) == 1
    assert tries[-1] == ("stopped", False) and len(tries) == 9 and not scheduler.plugins
