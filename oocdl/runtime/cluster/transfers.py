"""Moves bundles: each member asks others for what it will read, and answers as soon as that is made.

They go from worker to worker over Dask's connections (and their TLS), without the scheduler: a normalization
over a whole volume makes all members wait for each other, several times a layer, and a task of Dask takes
four messages. A member asks some groups of layers ahead, so an answer is on its way when it is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Status, Worker
from distributed.comm.core import CommClosedError
from distributed.core import error_message
from distributed.protocol.serialize import to_serialize

from oocdl.errors import DiskFullError
from oocdl.planning.hosts.exchange import DIRECT_BYTES, GROUPS_AHEAD, MOST_ASKED, SMALL_BYTES, Bundle
from oocdl.runtime.cluster.local_pass import LocalPass, Superseded
from oocdl.runtime.cluster.member import Member, member_of
from oocdl.storage.cache.chunk import Chunk

HANDLER = "oocdl_bundle"


@dataclass(frozen=True)
class Parcel:
    """The chunks of a bundle on their way."""

    chunks: tuple[Chunk, ...]


async def answer(comm: Any, **asked: Any) -> Any:
    """Answer as ``hand_out`` does; an error is told to who asks, and not in this worker's log."""
    try:
        return await hand_out(comm, **asked)
    except Exception as error:
        return error_message(error)


async def hand_out(comm: Any, run_id: str, name: str, number: int, now: bool) -> Any:
    """Answer another member once a bundle is made: with the bundle (``now``), or that it is there.

    ``name`` is that of the pass. This runs in the worker's event loop. Only as many large bundles are on
    their way as memory is kept free for: a later one waits until another has left this process.
    """
    member = member_of(run_id)
    running = await member.pass_named(name)
    try:
        chunks = await result(running.bundle(number))
    except DiskFullError as error:  # with which the pass of the other member fails, too
        raise member.named(error) from None  # an error that is its own cause hangs Dask
    if not now:
        return None
    running.handed_out(number)
    member.work.count()
    answer = to_serialize(Parcel(chunks))  # type: ignore[no-untyped-call]
    if sum(chunk.nbytes for chunk in chunks) <= SMALL_BYTES:
        return answer
    async with member.sending:
        await comm.write(answer)
        await _left(comm)
    return Status.dont_reply


async def _left(comm: Any) -> None:
    """Wait until all that was written to a connection has left this process; ``write`` does not."""
    try:
        if (stream := getattr(comm, "stream", None)) is not None:  # of TCP and TLS
            await stream.write(b"")
    except OSError as error:
        raise CommClosedError(f"a member left before it got a bundle ({error})") from error


async def fetch_all(worker: Worker, member: Member, running: LocalPass) -> None:
    """Fetch all bundles of a pass that this member reads, in the order of ``LocalOrder.arriving``.

    If one cannot be had, the pass fails, and no further one is asked for.
    """
    room, one_at_a_time = asyncio.Semaphore(MOST_ASKED), asyncio.Lock()
    direct = 0
    """Bytes of bundles that will come as soon as they are made."""

    async def fetch(bundle: Bundle) -> None:
        async def ask(now: bool) -> Any:
            asked = getattr(worker.rpc(member.setup.addresses[bundle.sender]), HANDLER)
            answer = await asked(
                run_id=member.setup.run_id, name=running.name, number=bundle.key.number, now=now
            )
            if now and not isinstance(answer, Parcel):  # a worker that closes answers with nothing
                raise Superseded("a member has left in the middle of a pass")
            return answer

        nonlocal direct
        is_direct = bundle.nbytes <= max(DIRECT_BYTES - direct, SMALL_BYTES)
        direct += bundle.nbytes * is_direct
        try:
            if is_direct:
                parcel = await ask(True)
            else:
                await ask(False)
                async with one_at_a_time:
                    parcel = await ask(True)
            member.received_bytes += bundle.nbytes
            _arrived(member, running, bundle.items, parcel.chunks)
            del member.asked[bundle.key.number]
        except Exception as error:  # told to whoever waits for the end of the pass
            running.fail(error)
        finally:
            direct -= bundle.nbytes * is_direct
            room.release()

    asked = set()
    for bundle in member.orders[running.plan_id].arriving:
        before = bundle.reader - GROUPS_AHEAD
        if before >= 0 and await error_of(running.groups[before]) is not None:
            break  # whoever waits for the end of the pass is told
        await room.acquire()
        member.asked[bundle.key.number] = bundle
        task = asyncio.create_task(fetch(bundle))
        asked.add(task)
        task.add_done_callback(asked.discard)
    if asked:
        await asyncio.wait(asked)


def _arrived(member: Member, running: LocalPass, keys: Sequence[Any], chunks: Sequence[Chunk]) -> None:
    if member.running is not running:
        raise Superseded("a bundle has come after its pass")
    for key, chunk in zip(keys, chunks, strict=True):
        member.tier.foresee(chunk, running.uses(key))
    member.work.count()
    running.arrive(keys, chunks)


async def result(future: Any) -> Any:
    """Return the result of a future that others wait for as well."""
    return await asyncio.shield(asyncio.wrap_future(future))


async def error_of(future: Any) -> BaseException | None:
    """Wait for a future of threads; return its error."""
    waiting = asyncio.wrap_future(future)
    await asyncio.wait([waiting])
    return waiting.exception()
