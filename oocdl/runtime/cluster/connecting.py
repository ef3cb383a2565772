"""Connects to a scheduler, again if it starts anew; has it take no workers away meanwhile."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client, Status
from distributed.comm.core import connect

from oocdl.config import shown
from oocdl.errors import InputError, ResourceError
from oocdl.runtime import dask_private
from oocdl.runtime.cluster import dask_limits, scheduler_side, worker_tasks
from oocdl.runtime.cluster.carried import Carried
from oocdl.runtime.cluster.scheduler_side import Stay, forget_plugin, set_complete
from oocdl.runtime.cluster.watch import Watch, in_loop, on_scheduler, open_client, plain
from oocdl.runtime.lost import WorkersLost

CONNECT_SECONDS = 30.0
NOT_CONNECTED = (OSError, ValueError, RuntimeError, TypeError, ImportError)
"""Errors that Dask raises: RuntimeError for a cluster that is closed, TypeError for TLS without keys."""
PROBE_SECONDS = 2.0
"""Seconds within which a scheduler that is there accepts a connection."""


@contextmanager
def connected(given: Any) -> Iterator[Client]:
    """Give a client for a client, a cluster, the address of a scheduler or the path of a scheduler file.

    A client made here is closed. Raises InputError for anything else, ResourceError if nobody answers.
    """
    if getattr(given, "asynchronous", False) is True:
        raise InputError(
            "this waits for workers, and cannot be called in the event loop of its client or cluster: "
            "call it in a thread, as by asyncio.to_thread"
        )
    if isinstance(given, Client):
        if given.status in ("closing", "closed"):
            raise InputError("the client is closed: give one that is connected, or its cluster")
        with _staying(given):
            yield given
        return
    how = _scheduler_of(given)
    try:
        client = OwnClient(**how, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
    except NOT_CONNECTED as error:
        raise ResourceError(f"no scheduler answers at {given}: {error}") from error
    try:
        with _staying(client):
            yield client
    finally:
        client.close()  # type: ignore[no-untyped-call]


class OwnClient(Client):
    """A client that is closed if it cannot connect, whatever the reason.

    Dask closes one without keys for TLS at the end of the process, and waits a minute for what has ended.
    """

    async def _start(self, *given: Any, **options: Any) -> Any:
        try:
            return await super()._start(*given, **options)  # type: ignore[no-untyped-call]
        except Exception:
            await self._close()
            raise


def _scheduler_of(given: Any) -> dict[str, Any]:
    """Return the argument by which a client finds the scheduler that a user names. Raises InputError."""
    if hasattr(given, "scheduler_address") or (isinstance(given, str) and "://" in given):
        return {"address": given}
    if isinstance(given, str | os.PathLike) and os.path.isfile(given):
        try:
            address = json.loads(Path(given).read_text())["address"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            address = error
        if not isinstance(address, str):
            raise InputError(
                f"the scheduler file {given} names no scheduler ({shown(address)}); is it still starting?"
            )
        return {"scheduler_file": os.fspath(given)}
    raise InputError(
        "client takes a distributed.Client, a Dask cluster, the address of a scheduler (tcp://..) or the "
        f"path of a scheduler file that is there, got {shown(given)}"
    )


@contextmanager
def _staying(client: Client) -> Iterator[None]:
    """Have the scheduler take no idle workers away while the block lasts."""
    try:
        keep_workers(client)
    except WorkersLost as lost:
        raise ResourceError(f"no scheduler answers the client: {lost}") from lost
    with _counting:
        _calls[client.id] += 1
    try:
        yield
    finally:
        with _counting:
            _calls[client.id] -= 1
            last = not _calls[client.id]
        if last:
            with suppress(WorkersLost):  # it is gone with its scheduler, or with the client
                on_scheduler(client, forget_plugin, Stay(client.id).name)


_counting, _calls = threading.Lock(), Counter[str]()
"""Number of calls that need the workers of a client, by its id: one may be refused while another trains."""


def keep_workers(client: Client) -> None:
    """Have the scheduler take no workers away; a scheduler that has started anew has to be told again.

    Raises WorkersLost if it does not answer, ResourceError if it cannot.
    """
    stay = Stay(client.id)
    asked = dask_private.register_scheduler_plugin(client, Carried(stay))
    try:
        in_loop(client, asked).result(CONNECT_SECONDS)
    except (OSError, CancelledError) as error:
        raise WorkersLost(f"the scheduler does not answer ({plain(error)})") from error
    except (ImportError, ValueError) as error:  # ValueError: it was told to unpickle nothing
        assert client.scheduler is not None
        why = f"{type(error).__name__}: {error}"
        raise ResourceError(
            f"the scheduler at {client.scheduler.address} cannot take part ({why}); start it with the Python "
            "and Dask that this process and workers have, and let it unpickle (distributed.scheduler.pickle)"
        ) from error
    keep_members(client, complete=False)


def keep_members(client: Client, complete: bool) -> None:
    """Have the scheduler take other workers away if it wants to, as a crew is ``complete``; or none again."""
    on_scheduler(client, set_complete, Stay(client.id).name, complete)


def watch_over(watch: Watch, run_id: str) -> None:
    """Have the scheduler tell ``watch`` of members that are gone, and clear up if this process ends."""
    client, members = watch.client, watch.members
    farewells = [
        (pickle.dumps(worker_tasks.tear_down), pickle.dumps((run_id,)), False),
        (pickle.dumps(dask_limits.release_nanny), pickle.dumps((run_id,)), True),
    ]
    cleanup = scheduler_side.Cleanup(run_id, client.id, members, farewells)
    watch.wait([in_loop(client, dask_private.register_scheduler_plugin(client, Carried(cleanup)))])
    with open_client():
        client.subscribe_topic(cleanup.name, watch.removed)


def watch_no_more(client: Client, run_id: str, most_seconds: float) -> None:
    """Undo ``watch_over``: the scheduler clears up, which is awaited for so many seconds."""
    name = f"oocdl-{run_id}"
    on_scheduler(client, scheduler_side.clear_up, name, most_seconds)
    client.unsubscribe_topic(name)  # type: ignore[no-untyped-call]


class Connection:
    """The scheduler of a client, which may end and start anew while the client lives or not."""

    def __init__(self, client: Client) -> None:
        assert client.scheduler is not None
        self.client, self._given = client, client
        self._address, self._file = client.scheduler.address, client.scheduler_file

    def renew(self) -> Client:
        """Return a client that is connected: the one that there was, or a new one of the same scheduler.

        Raises WorkersLost while no scheduler is there, ResourceError if the client was closed on purpose.
        """
        client = self.client
        if client.status == "running":
            return client
        if client.status != "closed":  # Dask itself tries for a while
            raise WorkersLost(f"no scheduler answers at {self._address}")
        cluster = client.cluster
        here = dask_private.is_started(client)
        if not here or (cluster is not None and cluster.status != Status.running):
            raise ResourceError(
                "the client was closed while its workers trained; the run is committed up to its last "
                "commit: start it again to go on"
            )
        try:
            if self._file and Path(self._file).is_file():  # one that starts elsewhere has written it anew
                self._address = json.loads(Path(self._file).read_text())["address"]
            in_loop(client, self._probe()).result(CONNECT_SECONDS)
            self.client = OwnClient(  # type: ignore[no-untyped-call]
                self._address, security=client.security, timeout=CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, ValueError) as error:
            raise WorkersLost(f"no scheduler answers at {self._address}") from error
        self.close(client)
        return self.client

    def close(self, client: Client | None = None) -> None:
        """Close a client that was made here, by default the last one."""
        client = client or self.client
        if client is not self._given:
            client.close()  # type: ignore[no-untyped-call]

    async def _probe(self) -> None:
        comm = await connect(  # type: ignore[no-untyped-call]
            self._address, timeout=PROBE_SECONDS, **self.client.security.get_connection_args("client")
        )
        await comm.close()
