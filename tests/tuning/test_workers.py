"""A search over worker processes: trials as in one process, also if workers or the driver are killed.

Most have one rung: which trials go on may depend on which was first.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import oocdl
from oocdl.errors import BudgetError, OocdlError, ResourceError, StoreError
from oocdl.events import Notice, StepDone, TrialDone
from oocdl.runtime.cluster import crew
from oocdl.training.run import Run
from oocdl.tuning.search_study import SearchStudy
from oocdl.tuning.trial_workers import Workers
from tests.kit import nets, processes
from tests.kit.searches import OPTIONS, commit_times, made_of, workers_in

FORKS = multiprocessing.get_context("forkserver")
SIX: dict[str, Any] = {**OPTIONS, "trials": 6}
HALVED: dict[str, Any] = {**SIX, "rungs": 2, "eta": 3}
LONG: dict[str, Any] = {**SIX, "steps": 40}
"""Long enough for a kill to meet trials in the middle."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with workers_in(tmp_path_factory.mktemp("workers")) as client:
        yield client


@pytest.fixture(scope="module")
def here(job: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> oocdl.Search:
    """The search in this process."""
    return oocdl.search(*job, **SIX, workdir=tmp_path_factory.mktemp("here") / "s")


@pytest.fixture(scope="module")
def long(job: tuple[Path, Path], client: Client, tmp_path_factory: pytest.TempPathFactory) -> oocdl.Search:
    """The longer search, undisturbed."""
    return oocdl.search(*job, **LONG, client=client, workdir=tmp_path_factory.mktemp("long") / "s")


def spans(run: Run) -> float:
    """Notes when this process was at it, and for how long."""
    begun = time.monotonic()
    time.sleep(0.1)
    (run.path / f"span-{os.getpid()}-{begun}-{time.monotonic()}").touch()
    return float(run.history[-1]["loss"])


def test_two_workers_train_the_better_ones_on(
    client: Client, job: tuple[Path, Path], here: oocdl.Search, tmp_path: Path
) -> None:
    """The trials of one process; each that stopped has the metric that it has there without rungs."""
    rows = oocdl.search(*job, **HALVED, client=client, workdir=tmp_path / "s").table
    first = {row["trial"]: (row["lr"], row["metric"]) for row in here.table}
    stopped = [row for row in rows if row["state"] == "stopped"]
    assert stopped and all(first[row["trial"]] == (row["lr"], row["metric"]) for row in stopped)
    going = [row for row in rows if row["state"] == "finished"]
    assert len(going) + len(stopped) == 6 and all(row["steps"] == 6 for row in going)
    assert here.best is not None and here.best["trial"] in {row["trial"] for row in going}


@pytest.mark.slow
def test_a_worker_trains_one_trial_at_a_time(job: tuple[Path, Path], tmp_path: Path) -> None:
    """Of two threads, each of which could; and what one worker makes is what two make."""
    with workers_in(tmp_path, count=1, threads=2) as client:
        found = oocdl.search(*job, **HALVED, client=client, metric=spans, workdir=tmp_path / "s")
    names = [path.name.split("-")[1:] for path in (tmp_path / "s").rglob("span-*")]
    times = sorted((float(begun), float(ended)) for _, begun, ended in names)
    assert len(times) >= 8 and len({pid for pid, _, _ in names}) == 1
    assert all(earlier[1] <= later[0] for earlier, later in zip(times, times[1:], strict=False))
    alone = oocdl.search(*job, **HALVED, metric=spans, workdir=tmp_path / "alone")
    assert made_of(found) == made_of(alone)


def when_told(run: Run) -> float:
    """Waits for a file."""
    while not (run.path.parents[1] / "go").exists():
        time.sleep(0.05)
    return float(run.history[-1]["loss"])


FIT = {name: held for name, held in OPTIONS.items() if name not in ("space", "trials", "steps")}


@pytest.mark.slow
def test_a_worker_has_one_run_at_a_time_a_trial_or_a_fit(
    job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit is refused while a trial trains, and a trial waits while a fit does: they would share a tier.

    Another search is not: it gets the worker in turn.
    """
    monkeypatch.setattr(crew, "FREE_SECONDS", 0.5)
    folder, search = tmp_path / "s", {**OPTIONS, "trials": 2, "metric": when_told}
    begun, over, fits, others = threading.Event(), threading.Event(), list[Any](), list[Any]()

    def stay(event: Any) -> None:
        if isinstance(event, StepDone):
            begun.set()
            over.wait(60)

    with workers_in(tmp_path, count=1) as client, ThreadPoolExecutor(3) as pool:
        fit = partial(oocdl.fit, *job, **FIT, steps=2, client=client, workdir=tmp_path / "run")

        def meddle(event: Any) -> None:
            if isinstance(event, TrialDone) and not fits:
                assert [row["error"] for row in others[0].result(60).table] == [None]  # no trial runs now
                fits.append(pool.submit(fit, callbacks=[stay]))
                assert begun.wait(60)
                threading.Timer(1, over.set).start()

        found = pool.submit(oocdl.search, *job, **search, client=client, workdir=folder, callbacks=[meddle])
        while not list(folder.glob("trials/*/history/*")):  # the first trial has trained
            assert not found.done()
            time.sleep(0.05)
        try:
            said = r"worker tcp://\S+ has part in another run.*: wait until"
            with pytest.raises(ResourceError, match=said):
                fit()
            short = {**OPTIONS, "trials": 1, "client": client, "workdir": tmp_path / "other"}
            others.append(pool.submit(oocdl.search, *job, **short))
            with pytest.raises(TimeoutError):
                others[0].result(timeout=3)
        finally:
            (folder / "go").touch()
        table, run = made_of(found.result()), fits[0].result()
        last = max(commit_times(found.result()).values())
    assert last > max(path.stat().st_mtime_ns for path in run.path.rglob("*"))
    assert nets.files_of(run) == nets.files_of(oocdl.fit(*job, **FIT, steps=2, workdir=tmp_path / "alone"))
    alone = {**search, "metric": "loss", "last_steps": 1, "workdir": tmp_path / "here"}
    assert table == made_of(oocdl.search(*job, **alone))


def test_a_search_moves_between_process_and_workers(
    client: Client, job: tuple[Path, Path], here: oocdl.Search, tmp_path: Path
) -> None:
    """Two workers make the same table."""
    oocdl.search(*job, **{**SIX, "trials": 4}, client=client, workdir=tmp_path / "s")
    assert made_of(oocdl.search(*job, **SIX, workdir=tmp_path / "s")) == made_of(here)


@pytest.mark.slow
def test_workers_that_are_killed_cost_no_trial(
    client: Client, job: tuple[Path, Path], long: oocdl.Search, tmp_path: Path
) -> None:
    before = client.run(os.getpid)
    killed: list[int] = []

    def kill(event: Any) -> None:
        if isinstance(event, TrialDone) and event.done in (2, 4) and len(killed) < 3:
            pids = sorted(client.run(os.getpid).values())
            for pid in pids[: 1 + len(killed)]:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    found = oocdl.search(*job, **LONG, client=client, workdir=tmp_path / "s", callbacks=[kill])
    assert made_of(found) == made_of(long)
    assert len(killed) == 3 and set(killed) & set(before.values())
    assert not set(killed) & set(client.run(os.getpid).values())


def where(run: Run) -> float:
    """Notes which process was at it."""
    (run.path / f"by-{os.getpid()}").touch()
    time.sleep(1)
    return float(run.history[-1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("minimum", [0, 1])
def test_a_cluster_that_adapts_grows_for_trials(job: tuple[Path, Path], tmp_path: Path, minimum: int) -> None:
    """Also where a worker is there already, and has threads that Dask would give a task each."""
    with workers_in(tmp_path, count=0, threads=2) as client:
        client.cluster.adapt(minimum=minimum, maximum=2, interval="500ms", wait_count=2)
        oocdl.search(*job, **OPTIONS | {"trials": 8}, client=client, metric=where, workdir=tmp_path / "s")
        deadline = time.monotonic() + 20  # releases go over the wire
        while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.unrunnable)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert len({path.name for path in (tmp_path / "s").rglob("by-*")}) == 2


def drive(address: str, job: tuple[Path, Path], workdir: Path, pipe: Connection) -> None:
    """The driver that is killed."""
    with Client(address) as client:
        oocdl.search(*job, **LONG, client=client, workdir=workdir, callbacks=[lambda event: pipe.send(1)])


def test_a_driver_that_is_killed_costs_no_trial(
    client: Client, job: tuple[Path, Path], long: oocdl.Search, tmp_path: Path
) -> None:
    receiver, sender = FORKS.Pipe(duplex=False)
    driver = FORKS.Process(target=drive, args=(client.scheduler.address, job, tmp_path / "s", sender))
    driver.start()
    for _ in range(2):
        assert receiver.poll(120)
        receiver.recv()
    driver.kill()
    driver.join()
    before = commit_times(oocdl.Search(tmp_path / "s"))
    assert 2 <= len(before) <= 6
    found = oocdl.search(*job, **LONG, client=client, workdir=tmp_path / "s")
    assert made_of(found) == made_of(long)
    assert before.keys() <= commit_times(found).keys()


@pytest.mark.slow
def test_a_worker_that_comes_late_gets_trials(
    client: Client, job: tuple[Path, Path], here: oocdl.Search, tmp_path: Path
) -> None:
    """None is there at first."""
    client.cluster.scale(0)
    _wait_for_none(client)
    notes: list[str] = []

    def come(event: Any) -> None:
        if isinstance(event, Notice):
            notes.append(event.text)
            client.cluster.scale(2)

    found = oocdl.search(*job, **SIX, client=client, workdir=tmp_path / "s", callbacks=[come])
    assert notes[0].startswith("waiting for workers at ")
    assert made_of(found) == made_of(here)


def _wait_for_none(client: Client) -> None:
    until = time.monotonic() + 60
    while client.scheduler_info(n_workers=-1)["workers"]:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_budgets_that_workers_do_not_have_are_refused(
    client: Client, job: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(BudgetError, match=r"memory=2950 MiB is more than .* any worker \(2918 MiB of"):
        oocdl.search(*job, **{**HALVED, "memory": "2950MiB"}, client=client, workdir=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_by_default_workers_share_what_there_is(
    client: Client, job: tuple[Path, Path], tmp_path: Path
) -> None:
    client.wait_for_workers(2, timeout=60)
    options = {**HALVED, "memory": None, "threads": None, "trials": 1, "rungs": 1}
    found = oocdl.search(*job, **options, client=client, workdir=tmp_path / "s")
    memory_bytes, threads = SearchStudy(found.path).share
    assert threads == 1 and memory_bytes is not None and memory_bytes <= 0.9 * 0.95 * (3 << 30)
    assert found.table[0]["peak_bytes"] <= memory_bytes


async def never(*_: Any) -> None:
    """What a worker does that was asked something and hangs."""
    await asyncio.Event().wait()


NEEDS = b"cno_such_module\nname\n."
"""The pickle of what stands in a module that workers do not have, as a user's own loss may need it."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("error", "told", "unseen", "parts"),
    [
        (StoreError, "does not see /nowhere/net.onnx", ["/nowhere/net.onnx"], {}),
        (ResourceError, "No module named 'no_such_module'.*install", [], {"parts": NEEDS}),
        (ResourceError, "does not answer", [], {}),
    ],
    ids=["no files", "no module", "hangs"],
)
def test_a_worker_that_cannot_takes_no_trial(
    client: Client, job: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch,
    error: type[OocdlError], told: str, unseen: list[str], parts: dict[str, bytes],
) -> None:  # fmt: skip
    """If all are such, the search ends. One that hangs sends heartbeats: for Dask all is well with it."""
    if told == "does not answer":
        monkeypatch.setattr("oocdl.runtime.cluster.cluster_progress.STILL_SECONDS", 1.0)
        monkeypatch.setattr("oocdl.tuning.trial_workers._unseen", never)
    notes: list[str] = []
    crew = Workers(client, [*map(Path, unseen), *job], notes.append, 5.0, **parts)
    with pytest.raises(error, match=told):
        crew.hire(1 << 20)
    assert len(notes) >= 2 and all("is left out" in note for note in notes[-2:])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_scheduler_that_is_stopped_ends_a_search_that_can_go_on(
    job: tuple[Path, Path], here: oocdl.Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections live on, and nothing comes of them."""
    monkeypatch.setattr("oocdl.runtime.cluster.watch.ANSWER_SECONDS", 3.0)
    with processes.cluster(tmp_path, [False]) as there:

        def stop(event: Any) -> None:
            if isinstance(event, TrialDone):
                there.scheduler.send(signal.SIGSTOP)

        with Client(there.address, timeout=60, set_as_default=False) as client:
            try:
                with pytest.raises(ResourceError, match="scheduler was lost.*has not answered"):
                    oocdl.search(*job, **SIX, client=client, workdir=tmp_path / "s", callbacks=[stop])
            finally:
                there.scheduler.send(signal.SIGCONT)
    assert made_of(oocdl.search(*job, **SIX, workdir=tmp_path / "s")) == made_of(here)


def test_workers_of_one_process_take_turns(
    job: tuple[Path, Path], here: oocdl.Search, tmp_path: Path
) -> None:
    notes: list[str] = []

    def take(event: Any) -> None:
        if isinstance(event, Notice):
            notes.append(event.text)

    with LocalCluster(n_workers=2, processes=False, memory_limit=0, dashboard_address=":0") as cluster:
        found = oocdl.search(*job, **SIX, client=cluster, workdir=tmp_path / "s", callbacks=[take])
    assert made_of(found) == made_of(here)
    assert sum("shares its process with another" in note for note in notes) == 1


def test_a_search_without_workers_ends(job: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        workers_in(tmp_path, count=0) as client,
        pytest.raises(ResourceError, match="no worker has come to .* in 1 s"),
    ):
        oocdl.search(*job, **HALVED, client=client, workdir=tmp_path / "s", wait_seconds=1.0)


@pytest.mark.slow
def test_a_scheduler_that_is_lost_ends_a_search_that_can_go_on(
    job: tuple[Path, Path], here: oocdl.Search, tmp_path: Path
) -> None:
    def lose(event: Any) -> None:
        if isinstance(event, TrialDone):
            client.cluster.close()

    with workers_in(tmp_path) as client, pytest.raises(ResourceError, match="scheduler was lost"):
        oocdl.search(*job, **SIX, client=client, workdir=tmp_path / "s", callbacks=[lose])
    assert made_of(oocdl.search(*job, **SIX, workdir=tmp_path / "s")) == made_of(here)
