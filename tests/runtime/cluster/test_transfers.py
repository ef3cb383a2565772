"""What is on its way to other members at once."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.comm.core import connect
from distributed.core import Server

from oocdl.planning.hosts.exchange import GROUPS_AHEAD
from oocdl.runtime.cluster import member
from oocdl.runtime.cluster.cluster_progress import Work
from oocdl.runtime.cluster.local_pass import Superseded
from oocdl.runtime.cluster.transfers import HANDLER, fetch_all, hand_out
from oocdl.storage.cache.chunk import Chunk, Home, Slot

COUNT = 5
ELEMENTS = 8 << 20
"""More bytes than connections hold that nobody reads."""


def test_no_more_bundles_are_on_their_way_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that have left RAM are read anew for each: all that is on its way takes memory."""
    packed: list[int] = []

    class Counted(Chunk):
        def __reduce__(self) -> Any:
            packed.append(1)
            return super().__reduce__()

    made: dict[int, Future[tuple[Chunk, ...]]] = {}
    for number in range(COUNT):
        chunk = Counted(Home(), Slot(np.zeros(ELEMENTS, np.float32), ()), ((0, ELEMENTS),))
        made[number] = Future()
        made[number].set_result((chunk,))
    running = SimpleNamespace(bundle=made.__getitem__, handed_out=made.pop)

    async def pass_named(_: str) -> Any:
        return running

    most = member.SENDING
    one = SimpleNamespace(pass_named=pass_named, work=Work(), sending=asyncio.Semaphore(most))
    monkeypatch.setitem(member.members, "run", one)  # type: ignore[arg-type]

    async def ask_for_all() -> None:
        server = Server({HANDLER: hand_out})
        await server.listen("tcp://127.0.0.1:0")
        comms = [await connect(server.address) for _ in made]
        for number, comm in enumerate(comms):
            asked = {"run_id": "run", "name": "pass", "number": number, "now": True}
            await comm.write({"op": HANDLER, **asked})
        for came, comm in enumerate(comms):
            while len(packed) < min(came + most, COUNT):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert len(packed) <= came + most
            answer = await comm.read()
            assert answer.chunks[0].shape == (ELEMENTS,)
            await comm.close()
        await server.close()

    asyncio.run(asyncio.wait_for(ask_for_all(), 60))
    assert len(packed) == COUNT and not made


def test_of_a_pass_that_fails_nothing_more_is_asked_for() -> None:
    """Nor is its error told but to who waits for its end: asyncio would log it for each member."""
    failed: Future[None] = Future()
    failed.set_exception(Superseded("the pass was given up"))
    bundle = SimpleNamespace(reader=GROUPS_AHEAD)
    one: Any = SimpleNamespace(
        setup=SimpleNamespace(addresses=(), run_id="run"), asked={},
        orders={"main": SimpleNamespace(arriving=[bundle])},
    )  # fmt: skip
    running: Any = SimpleNamespace(groups=[failed], plan_id="main", name="pass")
    worker: Any = None
    logged: list[Any] = []

    async def fetch() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        await fetch_all(worker, one, running)
        gc.collect()

    asyncio.run(fetch())
    assert not one.asked and not logged
