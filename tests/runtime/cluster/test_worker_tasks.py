"""Tasks of a pass that is given up leave a member as the step found it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from oocdl.planning.passes import PassInfo
from oocdl.runtime.cluster import member, worker_tasks
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
        running=SimpleNamespace(done=done, fail=fail), began=7, before={"w": "old"}, held={"w": "half"},
        pieces=1, given_up=False, end=lambda *given: ended.append(given),
    )  # fmt: skip
    monkeypatch.setitem(member.members, "run", one)  # type: ignore[arg-type]

    async def both() -> bool:
        end = asyncio.create_task(worker_tasks.end("run", "main"))
        await asyncio.sleep(0)
        if finished:
            done.set_result({})  # the end is about to go on
        complete = await worker_tasks.roll_back("run", 7)
        with pytest.raises(Superseded):
            await end
        with pytest.raises(Superseded):  # one that comes late
            await worker_tasks.begin("run", "run/8", "main", PassInfo(8, 0), True)
        return complete

    assert asyncio.run(both()) and one.held == {"w": "old"} and not ended
