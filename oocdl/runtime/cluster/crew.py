"""Finds the workers that can take part in a run: waits for them, asks what each may use."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from distributed import Client, Worker
from distributed.comm.addressing import get_address_host

from oocdl.engines.engine import get_engine
from oocdl.errors import InputError, OocdlError, ResourceError
from oocdl.host.heap import give_back_freed_memory
from oocdl.host.limits import Limit, anonymous_bytes, available, code_digest, installed_version
from oocdl.host.main_heap import MainHeapThreads
from oocdl.planning.machine import machine_facts
from oocdl.runtime.cluster import dask_limits
from oocdl.runtime.cluster.cluster_progress import Report
from oocdl.runtime.cluster.growth import Wanted
from oocdl.runtime.cluster.member import IN_ANOTHER_RUN, guests, members, owners
from oocdl.runtime.cluster.scheduler_side import METRIC
from oocdl.runtime.cluster.watch import TELL_SECONDS, Watch, plain, roll
from oocdl.runtime.lost import WorkersLost, check_losses

SETTLE_SECONDS = 3.0
"""Seconds without a further worker after which a run starts, although more are expected."""
POLL_SECONDS = 0.25
FREE_SECONDS = 10.0
"""Seconds within which a worker in the run of a driver that is gone is free again; one whose connection
breaks is gone, or silent."""


@dataclass(frozen=True)
class Recruit:
    """A worker that may take part in a run, and what it may use."""

    address: str
    host: str
    pid: int
    threads: int
    limit_bytes: int | None
    """Memory limit that Dask was told; None: there is none."""
    available: Limit
    """Memory that its process may use by the limits of its host and job."""
    own_bytes: int
    """Bytes that its process has taken already, with the engine loaded that was asked for."""
    owners: tuple[str, ...] = ()
    """Sessions in whose runs its process has part, or ``SEARCH`` where it trains trials."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Facts of its machine for that engine, as ``machine_facts`` has them."""

    @property
    def process(self) -> tuple[str, int]:
        """Host and id of its process, in which other workers may be."""
        return self.host, self.pid


Refusals = Mapping[str, OocdlError]
"""Address of a worker that cannot take part -> why, as an error that names it."""
Tell = Callable[[str], None]


def expected(client: Client) -> int:
    """Return how many workers the client's cluster is to have; 0 if nobody knows."""
    cluster = client.cluster
    adaptive = getattr(cluster, "_adaptive", None)
    if adaptive is not None and isfinite(adaptive.maximum):
        return int(adaptive.maximum)
    return len(getattr(cluster, "plan", ()))


def gather(
    client: Client, timeout_seconds: float, tell: Tell, owner: str = "", engine: str | None = None
) -> tuple[list[Recruit], Refusals]:
    """Wait for workers until all that are expected, or no more for a while, have come, and ask them.

    Of workers that share a process, one takes part. Each loads ``engine`` first, if one is named. Returns
    those that can take part, and those that cannot, such as one that has part in a run of another ``owner``.
    Raises ResourceError if none has come in time, or if they are lost again and again, as where an engine
    takes more memory than they have; WorkersLost if the connection is broken.
    """
    begun, losses = monotonic(), 0
    while True:
        left = timeout_seconds - (monotonic() - begun)
        there = _awaited(client, left, tell)
        try:
            recruits, refusals = ask(client, there, tell, owner, engine)
        except WorkersLost as lost:
            if client.status != "running" or monotonic() - begun > timeout_seconds:
                raise
            losses += 1
            check_losses(losses, lost)
            tell(f"{lost}; asking anew who can take part")
            sleep(POLL_SECONDS)
            continue
        may_pass = any(isinstance(error, NotNowError) for error in refusals.values())
        if not may_pass or monotonic() - begun > FREE_SECONDS:
            return one_a_process(recruits), refusals
        sleep(POLL_SECONDS)


class NotNowError(ResourceError):
    """A worker has part in another run, or cannot be reached: soon it may be free, or known to be gone."""


def ask(
    client: Client, workers: Sequence[str], tell: Tell, owner: str = "", engine: str | None = None
) -> tuple[list[Recruit], Refusals]:
    """Return what workers tell of themselves, and why others cannot take part.

    Each loads ``engine`` first, if one is named. Raises WorkersLost if one of them is lost meanwhile.
    """
    watch = Watch(client, workers, tell)
    if engine is not None:
        watch.ask(dask_limits.count_anonymous, nanny=True, refusal=Exception)
    found = watch.ask(_present, engine, code_digest(), refusal=Exception)
    recruits: list[Recruit] = []
    refusals: dict[str, OocdlError] = {}
    for address, answer in found.items():
        if isinstance(answer, OocdlError):
            refusals[address] = answer
        elif isinstance(answer, Exception):
            refusals[address] = _unreachable(client, address, answer)
        elif set(answer.owners) - {owner}:
            refusals[address] = NotNowError(f"worker {address} {IN_ANOTHER_RUN}")
        else:
            recruits.append(answer)
    return recruits, refusals


def _unreachable(client: Client, address: str, error: Exception) -> NotNowError:
    """Return an error that says why a worker is there and does not answer."""
    assert client.scheduler is not None
    if is_loopback(address) and not is_loopback(str(client.scheduler.address)):
        return NotNowError(
            f"worker {address} has told an address that only its own host can reach, as it found no other: "
            "name the network that hosts share, by interface= of oocdl.cluster, interface in the site file "
            "or dask worker --interface"
        )
    return NotNowError(
        f"worker {address} cannot be reached by the scheduler at {client.scheduler.address} "
        f"({plain(error)}); look whether a firewall is between them"
    )


def is_loopback(address: str) -> bool:
    """Return whether only the host itself can reach an address.

    >>> is_loopback("tls://127.0.0.1:4321"), is_loopback("tcp://10.1.0.2:8786")
    (True, False)
    """
    host: str = get_address_host(address)
    return host.startswith("127.") or host in ("::1", "localhost")


def _awaited(client: Client, timeout_seconds: float, tell: Tell) -> list[str]:
    """Wait for workers; return the addresses of those that are there. Raises ResourceError if none comes."""
    assert client.scheduler is not None
    begun, changed, known = monotonic(), monotonic(), 0
    wanted, said, more = max(expected(client), 1), False, Wanted(client)
    while True:
        there = [address for address, seen in roll(client).items() if seen.silent < TELL_SECONDS]
        if len(there) != known:
            changed, known = monotonic(), len(there)
        settled = monotonic() - changed > SETTLE_SECONDS
        if there and (len(there) >= wanted or settled or not expected(client)):
            return there
        if monotonic() - begun > timeout_seconds:
            raise ResourceError(
                f"no worker has come to {client.scheduler.address} in {timeout_seconds:.0f} s; look whether "
                "its jobs are still queued, or give it longer with wait_seconds="
            )
        if monotonic() - begun > 1:
            more.ask(wanted)
            if not said:
                tell(
                    f"waiting for workers at {client.scheduler.address}: {len(there)} of {wanted} are there "
                    f"(for up to {timeout_seconds:.0f} s)"
                )
            said = True
        sleep(POLL_SECONDS)


async def _load(engine: str, dask_worker: Worker) -> None:
    """Load an engine, which may take longer than a worker may be silent, or a crew without moving."""
    dask_worker.metrics[METRIC] = _loads
    pool = MainHeapThreads(1)
    try:
        await asyncio.get_running_loop().run_in_executor(pool, get_engine, engine)
    finally:
        pool.shutdown(wait=False)
        if dask_worker.metrics.get(METRIC) is _loads:
            del dask_worker.metrics[METRIC]


def _loads(worker: Worker) -> list[Any]:
    return [*Report(1, [], 0, "loads its engine")]


async def _present(engine: str | None, code: str, dask_worker: Worker) -> Recruit | OocdlError:
    """Return what a worker tells of itself, or why it takes no part, as by an oocdl of other ``code``.

    Runs there. An error is a value: Dask fails at those whose traceback cannot be pickled, and tells nothing.
    """
    if code_digest() != code:
        return InputError(
            f"worker {dask_worker.address} has another version of oocdl ({installed_version('oocdl')}, in "
            f"{Path(__file__).parents[2]}); install the one of this process there"
        )
    try:
        if engine is not None and not members and not guests:
            await _load(engine, dask_worker)
    except OocdlError as error:
        return type(error)(f"worker {dask_worker.address}: {error}")
    give_back_freed_memory()
    return Recruit(
        dask_worker.address,
        socket.gethostname(),
        os.getpid(),
        dask_worker.state.nthreads,
        dask_worker.memory_manager.memory_limit,
        available(),
        anonymous_bytes(),
        owners(),
        machine_facts(engine) if engine is not None and not guests else {},
    )


def one_a_process(recruits: Sequence[Recruit]) -> list[Recruit]:
    """Return one worker of each process, with the threads of all of them."""
    found: dict[tuple[str, int], Recruit] = {}
    for recruit in sorted(recruits, key=lambda one: one.address):
        first, threads = found.get(recruit.process), recruit.threads
        found[recruit.process] = recruit if first is None else replace(first, threads=first.threads + threads)
    return list(found.values())
