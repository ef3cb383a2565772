"""Finds the workers that can take part in a run: connects, waits for them, asks what each may use."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from distributed import Client, Worker

from oocdl.errors import BudgetError, InputError, ResourceError
from oocdl.host.limits import default_budget_bytes
from oocdl.runtime.cluster.watch import TELL_SECONDS, in_loop, roll
from oocdl.runtime.lost import WorkersLost

SETTLE_SECONDS = 3.0
"""A run starts when so long no further worker has come, although more are expected."""
POLL_SECONDS = 0.25
ASK_SECONDS = 60.0
"""A worker that starts to import libraries answers within this time."""
CONNECT_SECONDS = 30.0
LIMIT_SHARE = 0.9
"""What of a worker's memory limit is its budget by default: its nanny and the system need a little."""


@dataclass(frozen=True)
class Recruit:
    """A worker, and what it may use."""

    address: str
    host: str
    pid: int
    threads: int
    limit_bytes: int | None
    """Its memory limit, as Dask was told."""
    budget_bytes: int
    """What its process should take by the limits of its host."""


Tell = Callable[[str], None]


@contextmanager
def connected(given: Any) -> Iterator[Client]:
    """Give a client for a client, a cluster, the address of a scheduler or the path of a scheduler file.

    One that was made here is closed. Raises InputError for anything else, ResourceError if nobody answers.
    """
    if isinstance(given, Client):
        yield given
        return
    if hasattr(given, "scheduler_address"):
        how: dict[str, Any] = {"address": given}
    elif isinstance(given, str) and "://" in given:
        how = {"address": given}
    elif isinstance(given, str | os.PathLike) and Path(given).is_file():
        how = {"scheduler_file": os.fspath(given)}
    else:
        raise InputError(
            "client takes a distributed.Client, a Dask cluster, the address of a scheduler (tcp://..) or the "
            f"path of a scheduler file, got {given!r}"
        )
    try:
        client = Client(**how, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ResourceError(f"no scheduler answers at {given}: {error}") from error
    try:
        yield client
    finally:
        client.close()  # type: ignore[no-untyped-call]


def expected(client: Client) -> int:
    """Return how many workers the client's cluster is to have; 0 if nobody knows."""
    cluster = client.cluster
    adaptive = getattr(cluster, "_adaptive", None)
    if adaptive is not None and isfinite(adaptive.maximum):
        return int(adaptive.maximum)
    return len(getattr(cluster, "plan", ()))


def gather(client: Client, timeout_seconds: float, tell: Tell) -> list[Recruit]:
    """Wait until workers are there, all that are expected or none for a while, and ask them.

    Of workers that share a process, one takes part. Raises ResourceError if none has come in time.
    """
    assert client.scheduler is not None
    begun, changed, known = monotonic(), monotonic(), 0
    wanted, told, calls = max(expected(client), 1), False, []
    while True:
        there = [address for address, silent in roll(client).items() if silent < TELL_SECONDS]
        if len(there) != known:
            changed, known = monotonic(), len(there)
        settled = monotonic() - changed > SETTLE_SECONDS
        if there and (len(there) >= wanted or settled or not expected(client)):
            break
        if monotonic() - begun > timeout_seconds:
            raise ResourceError(
                f"no worker has come to {client.scheduler.address} in {timeout_seconds:.0f} s; look whether "
                "its jobs are still queued, or give it longer with wait_seconds="
            )
        if not told and monotonic() - begun > 1:
            told = True
            tell(
                f"waiting for workers at {client.scheduler.address}: {len(there)} of {wanted} are there "
                f"(for up to {timeout_seconds:.0f} s)"
            )
            # A cluster that adapts starts workers for tasks only.
            calls.append(client.submit(int, key=f"oocdl-waits-{id(client)}-{begun}"))
        sleep(POLL_SECONDS)
    return _one_a_process(_asked(client, there))


def _asked(client: Client, addresses: Sequence[str]) -> list[Recruit]:
    """What each of the workers answers; those that do not answer are left out."""

    async def one(address: str) -> Any:
        try:
            asked = client._run(_present, workers=[address], on_error="return")
            return (await asyncio.wait_for(asked, ASK_SECONDS)).get(address)
        except (OSError, TimeoutError):
            return None

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(address) for address in addresses))

    found = []
    for address, answer in zip(addresses, in_loop(client, every()).result(), strict=True):
        if isinstance(answer, ImportError):
            raise ResourceError(
                f"worker {address} cannot import oocdl ({answer}); install the same version there"
            )
        if isinstance(answer, Recruit):
            found.append(answer)
    if not found:
        raise WorkersLost("no worker answers")
    return found


async def _present(dask_worker: Worker) -> Recruit:
    """What a worker tells of itself; runs there."""
    return Recruit(
        dask_worker.address,
        socket.gethostname(),
        os.getpid(),
        dask_worker.state.nthreads,
        dask_worker.memory_manager.memory_limit,
        default_budget_bytes(),
    )


def _one_a_process(recruits: Sequence[Recruit]) -> list[Recruit]:
    """One worker of each process, with the threads of all of them."""
    found: dict[tuple[str, int], Recruit] = {}
    for recruit in sorted(recruits, key=lambda one: one.address):
        place = recruit.host, recruit.pid
        first = found.get(place)
        found[place] = recruit if first is None else replace(first, threads=first.threads + recruit.threads)
    return list(found.values())


def budget_bytes(recruits: Sequence[Recruit]) -> int:
    """Return the budget of each process for a user who gives none: of the worker that may take least.

    Workers of one host share what it has.
    """
    on_host = Counter(recruit.host for recruit in recruits)
    shares = [
        min(
            recruit.budget_bytes // on_host[recruit.host],
            recruit.budget_bytes if not recruit.limit_bytes else int(recruit.limit_bytes * LIMIT_SHARE),
        )
        for recruit in recruits
    ]
    return min(shares)


def check_limits(recruits: Sequence[Recruit], memory_bytes: int) -> list[Recruit]:
    """Return those whose memory limit has room for the budget; BudgetError if it is none of them."""
    roomy = [one for one in recruits if not one.limit_bytes or one.limit_bytes >= memory_bytes]
    if not roomy:
        largest = max(recruits, key=lambda one: one.limit_bytes or 0)
        raise BudgetError(
            f"memory={memory_bytes >> 20} MiB is more than the memory limit of any worker "
            f"({(largest.limit_bytes or 0) >> 20} MiB of {largest.address}); give less, or start workers "
            "with a higher --memory-limit"
        )
    return roomy
