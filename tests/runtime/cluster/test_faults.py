"""What goes wrong with the workers of a run: it is told, it goes on with equal bits, and nothing is left."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError

import oocdl
from oocdl.errors import ResourceError
from oocdl.events import Committed, Event, Notice, RunStopped, StepDone, WorkersChanged
from oocdl.runtime import execute
from oocdl.runtime import lost as lost_
from oocdl.runtime.cluster import connecting, crew, worker_tasks
from oocdl.runtime.cluster.cluster_session import ClusterSession
from oocdl.runtime.cluster.transfers import HANDLER
from oocdl.runtime.cluster.watch import Watch, on_scheduler
from oocdl.runtime.lost import WorkersLost
from oocdl.storage.files import io_error
from tests.kit import nets, processes
from tests.kit.faults import OPTIONS
from tests.kit.runs import after
from tests.kit.searches import workers_in

pytestmark = pytest.mark.usefixtures("planned_once")
QUICK: dict[str, Any] = {**OPTIONS, "steps": 6, "commit_seconds": 0}
Go = Callable[..., oocdl.Run]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two workers with nannies, whose limit is hardly more than the budget.

    A worker that is killed in two tests within Dask's 15 s would be taken for one that has not come back.
    """
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "600s"}),
        workers_in(tmp_path_factory.mktemp("workers"), memory_limit="1890MiB") as client,
    ):
        yield client.cluster


@pytest.fixture
def client(workers: LocalCluster) -> Iterator[Client]:
    with Client(workers, set_as_default=False) as client:
        client.wait_for_workers(2)
        yield client


@pytest.fixture(scope="module")
def expected(job: tuple[Path, Path]) -> dict[str, bytes]:
    """What a run in this process makes."""
    return nets.files_of(oocdl.fit(*job, **QUICK))


@pytest.fixture
def go(client: Client, job: tuple[Path, Path], expected: dict[str, bytes], tmp_path: Path) -> Iterator[Go]:
    """``fit`` of the job on these workers: its bits are those of one process, and nothing is left on them."""

    def fit(**options: Any) -> oocdl.Run:
        run = oocdl.fit(*job, client=client, **{**QUICK, "workdir": tmp_path / "run", **options})
        assert nets.files_of(run) == expected
        return run

    yield fit
    client.wait_for_workers(2)
    assert processes.remains(client) == {}


def at_step(number: int, do: Callable[[], Any]) -> Callable[[Event], None]:
    """A listener that does something after a step, the first time."""
    return after(number, functools.cache(do))


def test_limits_are_lifted_while_a_run_lasts(client: Client, go: Go) -> None:
    found: list[Any] = []

    def look() -> None:
        for words in client.run(processes.left_behind).values():
            found.append(" ".join(words))
        found.extend(client.run(processes.held_nanny, nanny=True).values())

    go(callbacks=[at_step(2, look)])
    for words in found[:2]:
        assert "memory monitor that is off" in words and "threads" not in words, words
    assert found[2:] == [["a nanny's memory monitor that is off"]] * 2


async def beside(number: int) -> int:
    """Wait; return how many of these a worker has at once; runs there."""
    beside.here = getattr(beside, "here", 0) + 1  # type: ignore[attr-defined]
    most: int = beside.here  # type: ignore[attr-defined]
    await asyncio.sleep(0.1)
    beside.here -= 1  # type: ignore[attr-defined]
    return most


def test_tasks_of_others_get_the_threads_that_they_had(client: Client, go: Go) -> None:
    others: list[Any] = []
    go(callbacks=[at_step(1, lambda: others.extend(client.map(beside, range(60), pure=False)))])
    assert {future.status for future in others} != {"finished"}, "the run has waited for them"
    assert max(client.gather(others)) == 1


def test_a_run_waits_for_no_task_of_others(client: Client, go: Go) -> None:
    others = client.map(time.sleep, [20.0] * 6, pure=False)
    go()
    assert {future.status for future in others} == {"pending"}
    client.cancel(others)


def test_a_killed_worker_is_told_and_made_up_for(client: Client, go: Go) -> None:
    events: list[Event] = []
    pid = sorted(client.run(os.getpid).values())[0]
    kill = at_step(3, lambda: os.kill(pid, signal.SIGKILL))
    run = go(callbacks=[events.append, kill])
    changed = [event for event in events if isinstance(event, WorkersChanged)]
    assert changed and changed[0].done >= 2 and any(isinstance(event, Notice) for event in events)
    assert [row["step"] for row in run.history] == [1, 2, 3, 4, 5, 6]
    # The nanny of the new worker, too, watches it again, as ``go`` sees.


def fill_disk(dask_worker: Any) -> None:
    """Have a worker find no room for what it spills; runs there."""

    def run_unit(*_: Any) -> None:
        raise io_error(OSError(errno.ENOSPC, "No space left on device"), Path("/"), 1)

    execute.run_unit = run_unit


def test_a_worker_with_a_full_disk_is_left_out_and_the_rest_goes_on(client: Client, go: Go) -> None:
    events: list[Event] = []
    first, second = sorted(client.scheduler_info(n_workers=-1)["workers"])
    pid = client.run(os.getpid)[second]
    try:
        go(callbacks=[events.append, at_step(3, lambda: client.run(fill_disk, workers=[first]))])
    finally:
        client.restart_workers([first])
    assert client.run(os.getpid, workers=[second]) == {second: pid}, "the other one has gone on"
    said = " ".join(event.text for event in events if isinstance(event, Notice))
    assert f"worker {first} is left out: no space left for /" in said and "the run goes on" in said


def swallow_bundles(dask_worker: Any) -> None:
    """Have a worker answer its crew nothing more; runs there. The next crew is answered."""

    async def swallow(**_: Any) -> None:
        await asyncio.Event().wait()

    dask_worker.handlers[HANDLER] = swallow


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_crew_of_which_nobody_moves_is_told_and_gathered_anew(
    client: Client, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members live and send heartbeats, and each waits for what another has given, or will never give."""
    monkeypatch.setattr("oocdl.runtime.cluster.cluster_progress.STILL_TELL_SECONDS", 2.0)
    monkeypatch.setattr("oocdl.runtime.cluster.cluster_progress.STILL_SECONDS", 6.0)
    events: list[Event] = []
    lose = at_step(3, lambda: client.run(swallow_bundles))
    go(callbacks=[events.append, lose])
    told = [event.text for event in events if isinstance(event, Notice)]
    assert "no worker has moved for" in told[0] and "waits for layer" in told[0], told
    assert [type(event) for event in events].count(WorkersChanged) == 1


def slow_down(seconds: float) -> None:
    """Have the next unit of a worker take so long; runs there."""
    run_unit = execute.run_unit

    def slow(*given: Any) -> Any:
        execute.run_unit = run_unit
        time.sleep(seconds)
        return run_unit(*given)

    execute.run_unit = slow


@pytest.mark.slow
def test_a_slow_unit_is_waited_for(client: Client, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocdl.runtime.cluster.cluster_progress.STILL_TELL_SECONDS", 1.0)
    monkeypatch.setattr("oocdl.runtime.cluster.cluster_progress.STILL_SECONDS", 2.0)
    events: list[Event] = []
    slow = at_step(3, lambda: client.run(slow_down, 5.0))
    run = go(callbacks=[events.append, slow])
    assert max(row["seconds"] for row in run.history) >= 5
    assert not [event for event in events if isinstance(event, Notice | WorkersChanged)]


def test_a_second_run_is_refused_and_the_first_unharmed(
    client: Client, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "FREE_SECONDS", 0.5)
    nannies: list[Any] = []

    def second() -> None:
        with pytest.raises(ResourceError, match="has part in another run"):
            go(workdir=tmp_path / "second")
        nannies.extend(client.run(processes.held_nanny, nanny=True).values())

    go(callbacks=[at_step(2, second)])
    assert len(nannies) == 2 and all(nannies)


def test_a_client_that_is_closed_ends_the_run(
    workers: LocalCluster, job: tuple[Path, Path], tmp_path: Path
) -> None:
    with (
        Client(workers, set_as_default=False) as mine,
        pytest.raises(ResourceError, match="client was closed"),
    ):
        oocdl.fit(*job, workdir=tmp_path / "run", client=mine, callbacks=[at_step(3, mine.close)], **QUICK)
    assert oocdl.open(tmp_path / "run").steps >= 2
    with Client(workers, set_as_default=False) as other:
        assert processes.remains(other) == {}


@pytest.mark.parametrize(("number", "where"), [(signal.SIGINT, "a pass"), (signal.SIGTERM, "recovering")])
def test_a_signal_ends_the_run(
    client: Client, go: Go, tmp_path: Path, number: signal.Signals, where: str
) -> None:
    events: list[Event] = []
    pids = client.run(os.getpid).values()

    def begin() -> None:
        if where == "recovering":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            threading.Timer(0.02, os.kill, (os.getpid(), number)).start()

    def stop(event: Event) -> None:
        events.append(event)
        if where == "recovering" and isinstance(event, Notice) and "gathering" in event.text:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        go(steps=1000, callbacks=[stop, at_step(3, begin)])
    run = oocdl.open(tmp_path / "run")
    assert events[-1] == RunStopped(number.name, str(run.path), run.steps) and run.steps >= 2


SLOW = [pytest.param(where, marks=pytest.mark.slow) for where in ("set-up", "weights")]


@pytest.mark.parametrize("where", ["second step", *SLOW])
def test_workers_that_are_lost_again_and_again_end_the_run(
    client: Client, go: Go, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As those are that their job's memory limit kills: at the same place, although they come each time."""
    name = {"set-up": "_set_up", "weights": "load", "second step": "run_pass"}[where]
    before, lost = getattr(ClusterSession, name), [0]

    def lose(session: ClusterSession, *arguments: Any) -> Any:
        if where != "second step" or arguments[1].number == 1:
            lost[0] += 1
            assert lost[0] < 6
            raise WorkersLost("worker x is gone")
        return before(session, *arguments)

    monkeypatch.setattr(lost_, "MOST_LOSSES", 3)
    monkeypatch.setattr(ClusterSession, name, lose)
    with pytest.raises(ResourceError, match="lost 3 times before a further step was done"):
        go(commit_seconds=1e9)
    assert lost == [3] or where == "second step" and lost == [4]


def test_after_the_last_commit_nobody_is_needed(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of the last commit asks the workers for what they have measured."""
    commits: list[int] = []

    before = ClusterSession.measured

    def measured(session: ClusterSession) -> Any:
        if commits[-1] != 3:
            return before(session)
        raise WorkersLost("worker x is gone")

    def listen(event: Event) -> None:
        if isinstance(event, Committed):
            commits.append(event.step)
        assert not isinstance(event, WorkersChanged)

    monkeypatch.setattr(ClusterSession, "measured", measured)
    run = go(callbacks=[listen], commit_seconds=1e9)  # an epoch is three steps
    assert run.finished and commits[-1] == 6


def test_a_look_that_ends_with_its_client_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch then tells that the client was closed."""
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    monkeypatch.setattr("oocdl.runtime.cluster.cluster_session.in_loop", lambda *_: cancelled)
    there = SimpleNamespace(_run=lambda *_, **__: None)
    session: Any = SimpleNamespace(watch=True, client=there, run_id="run", addresses=[])
    assert ClusterSession.looks(session) == ()


def test_errors_tell_who_is_lost(client: Client) -> None:
    address = min(client.scheduler_info(n_workers=-1)["workers"])
    here, gone = Watch(client, [address], print), Watch(client, ["tcp://127.0.0.1:1"], print)
    with pytest.raises(ResourceError, match="cannot use its files"):
        here.raise_of(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(WorkersLost, match="closed"):
        here.raise_of(CommClosedError("closed"))
    with pytest.raises(KeyError):
        here.raise_of(KeyError("x"))
    with pytest.raises(WorkersLost, match="gone"):
        gone.raise_of(KeyError("x"))


def test_a_run_that_a_worker_has_left_is_unknown_to_it(client: Client, job: tuple[Path, Path]) -> None:
    """Who asks for something of a run that a worker has left is told so."""

    async def ask(dask_worker: Any) -> str:
        try:
            worker_tasks.member_of("nobody")
        except worker_tasks.Superseded as error:
            return str(error)
        return ""

    assert all("no member" in text for text in client.run(ask).values())


def test_a_scheduler_that_is_silent_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("oocdl.runtime.cluster.watch.TELL_SECONDS", 1.0)
    monkeypatch.setattr("oocdl.runtime.cluster.watch.ANSWER_SECONDS", 2.5)

    async def slow(dask_scheduler: Any) -> None:
        await asyncio.sleep(4)

    with pytest.raises(WorkersLost, match="has not answered"):
        on_scheduler(client, slow, tell=told.append)
    assert len(told) == 1 and "the scheduler has been silent" in told[0]


def test_workers_of_one_process(job: tuple[Path, Path], expected: dict[str, bytes], tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        run = oocdl.fit(*job, workdir=tmp_path / "run", client=client, **QUICK)
        assert nets.files_of(run) == expected and processes.remains(client) == {}


def test_nobody_comes(job: tuple[Path, Path], tmp_path: Path) -> None:
    told: list[Event] = []
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(ResourceError, match="no worker has come to .* in 2 s"),
    ):
        how = {**QUICK, "wait_seconds": 2, "callbacks": [told.append]}
        oocdl.fit(*job, workdir=tmp_path / "run", client=client, **how)
    assert len(told) == 1 and "waiting for workers" in str(told[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cluster_that_adapts_leaves_members_alone(
    job: tuple[Path, Path], expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Between its passes a member has no task, which is when Dask takes workers away."""
    changed: list[Event] = []

    def pause(event: Event) -> None:
        if isinstance(event, StepDone):
            time.sleep(0.5)
        if isinstance(event, WorkersChanged) and "have come" not in event.reason:
            changed.append(event)

    with workers_in(tmp_path, count=0, memory_limit="1890MiB") as client:
        client.cluster.adapt(minimum=0, maximum=2, interval="500ms", wait_count=2)
        run = oocdl.fit(*job, workdir=tmp_path / "run", client=client, callbacks=[pause], **QUICK)
    assert nets.files_of(run) == expected and changed == []


def test_a_scheduler_is_found_again_by_its_file_or_without(tmp_path: Path) -> None:
    """It has taken its file away as it ended; the next one may be elsewhere, and write another."""
    file = tmp_path / "scheduler.json"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with processes.cluster(tmp_path / "first", []) as first:
        file.write_text(json.dumps({"address": first.address}))
        with Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:
            connection = connecting.Connection(client)
            client._timeout = 1.0
            file.unlink()
            first.scheduler.send(signal.SIGKILL)
            assert renewed(connection).status == "running"
            connection.client._timeout = 1.0
            with processes.cluster(tmp_path / "second", []) as second:
                file.write_text(json.dumps({"address": second.address}))
                first.over.set()
                first.scheduler.end()
                found = renewed(connection)
                assert found.scheduler is not None and found.scheduler.address == second.address
                connection.close()


def renewed(connection: connecting.Connection) -> Client:
    """A connection to the scheduler that was started again."""
    deadline = time.monotonic() + 60
    while True:
        time.sleep(0.5)
        try:
            if connection.client.status != "running":
                return connection.renew()
        except WorkersLost:
            assert time.monotonic() < deadline


def of_the_run(address: str) -> list[str]:
    """Plugins of a scheduler that keep workers from being taken away, and that show the run."""

    def found(dask_scheduler: Any) -> list[str]:
        return [name for name in dask_scheduler.plugins if "oocdl-stay" in name or name == "oocdl-page"]

    with Client(address, timeout=60, set_as_default=False) as client:
        return client.run_on_scheduler(found)


@pytest.mark.slow
def test_the_scheduler_starts_anew(
    job: tuple[Path, Path], expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Its client gives up after a second; the run makes a new one, and the workers are new as well.

    The new scheduler, too, is told to take no worker away, and shows the run.
    """
    kept: list[list[str]] = []
    with processes.cluster(tmp_path, [False, False], dashboard=True) as there:
        with Client(there.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            client._timeout = 1.0
            kill = at_step(3, lambda: there.scheduler.send(signal.SIGKILL))
            look = at_step(5, lambda: kept.append(of_the_run(there.address)))
            run = oocdl.fit(*job, workdir=tmp_path / "run", client=client, callbacks=[kill, look], **QUICK)
            assert client.status == "closed"
        assert len(kept[0]) == 2 and "oocdl-page" in kept[0] and of_the_run(there.address) == []
        assert nets.files_of(run) == expected
        with Client(there.address, timeout=60, set_as_default=False) as client:
            assert processes.remains(client) == {}


def test_a_worker_that_only_its_host_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no network leads anywhere, Dask's workers tell the loopback address: nobody can reach them."""

    addresses = ["tls://10.1.0.3:4000", "tls://127.0.0.1:4321"]
    asked: list[float] = []

    class Unreachable:
        def __init__(self, *_: Any) -> None: ...

        def ask(self, *_: Any, **__: Any) -> dict[str, Exception]:
            asked.append(time.monotonic())
            return {address: OSError("timed out") for address in addresses}

    far = SimpleNamespace(scheduler=SimpleNamespace(address="tls://10.1.0.2:8786"), status="running")
    monkeypatch.setattr(crew, "_awaited", lambda *_: addresses)
    monkeypatch.setattr(crew, "Watch", Unreachable)
    monkeypatch.setattr(crew, "FREE_SECONDS", 0.6)  # and is asked again meanwhile
    recruits, refusals = crew.gather(far, 5.0, print)  # type: ignore[arg-type]
    assert not recruits and [*refusals] == addresses and len(asked) > 2
    assert "has told an address that only its own host can reach" in str(refusals[addresses[1]])
    assert "the scheduler at tls://10.1.0.2:8786 (timed out)" in str(refusals[addresses[0]])
