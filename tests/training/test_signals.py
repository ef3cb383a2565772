"""SIGINT, SIGTERM and SIGHUP commit what is done, wherever they come, and a run goes on from there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest

import oocdl
from oocdl.events import Event, RunStopped, StepDone
from oocdl.runtime.session import Session
from oocdl.storage.run import run_store
from oocdl.storage.run.commit import Commit, Writer
from oocdl.training import signals
from oocdl.training.signals import Signals
from tests.kit import nets
from tests.kit.commands import python
from tests.kit.settings import QUICK

Fit = Callable[..., oocdl.Run]
SIGNALS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit, signal.SIGHUP: SystemExit}
STEPS, AT = 6, 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def fit(job: tuple[Path, Path], tmp_path: Path) -> Fit:
    def call(workdir: str | Path = "run", **options: Any) -> oocdl.Run:
        given = {**QUICK, "batch_size": 2, "steps": STEPS, "commit_seconds": 1e9, **options}
        return oocdl.fit(*job, workdir=tmp_path / workdir, **given)

    return call


WHOLE: dict[Path, dict[str, bytes]] = {}
"""By job, what a run makes that nothing stops."""


@pytest.fixture
def whole(job: tuple[Path, Path], fit: Fit) -> dict[str, bytes]:
    if job[0] not in WHOLE:
        WHOLE[job[0]] = nets.files_of(fit("whole"))
    return WHOLE[job[0]]


class Sender:
    """Sends a signal to this process, once it is armed; notes what the run says."""

    def __init__(self, number: signal.Signals, where: str) -> None:
        self.number, self.where, self.armed, self.events = number, where, False, list[Event]()

    def __call__(self, event: Event) -> None:
        """A listener."""
        self.events.append(event)
        self.armed = isinstance(event, StepDone) and event.row["step"] == AT
        if self.armed and self.where == "a callback":
            self.send()

    def send(self) -> None:
        self.armed = False
        os.kill(os.getpid(), self.number)

    def get(self, tasks: Any, keys: Any, **options: Any) -> Any:
        """A scheduler of Dask."""
        if self.armed and self.where == "a step":
            self.send()
        return dask.get(tasks, keys, **options)

    def fsync(self, handle: int) -> None:
        """What a commit calls, in threads of its own."""
        if self.armed and self.where == "a commit":
            self.send()


@pytest.mark.parametrize(
    ("number", "where"),
    [*((one, "a step") for one in SIGNALS), (signal.SIGINT, "a commit"), (signal.SIGTERM, "a callback")],
)
def test_what_is_done_is_committed(
    fit: Fit, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals, where: str,
) -> None:  # fmt: skip
    sender = Sender(number, where)
    monkeypatch.setattr(os, "fsync", sender.fsync)
    before = [signal.getsignal(one) for one in SIGNALS]
    commit_seconds = 0 if where == "a commit" else 1e9
    with pytest.raises(SIGNALS[number]) as caught:
        fit(callbacks=[sender], scheduler=sender.get, commit_seconds=commit_seconds)
    if number != signal.SIGINT:
        assert caught.value.code == 128 + number  # type: ignore[attr-defined]
    assert [signal.getsignal(one) for one in SIGNALS] == before
    run = oocdl.open(tmp_path / "run")
    assert run.steps == AT and [row["step"] for row in run.history] == [1, 2, 3]
    assert sender.events[-1] == RunStopped(number.name, str(run.path), AT)
    assert oocdl.verify(run.path).sound
    assert nets.files_of(fit()) == whole


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Commit, "finish"), (Writer, "write"), (run_store, "sync_all")],
    ids=lambda one: str(one),
)
@pytest.mark.parametrize("first", ["a commit", "a callback"])
def test_a_second_signal_breaks_a_commit_off_and_says_no_more_than_that(
    fit: Fit, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    owner: Any, name: str, first: str,
) -> None:  # fmt: skip
    """The version is open then, or not any more, and is not written again."""
    monkeypatch.setattr(signals, "SAME_SECONDS", 0.05)
    sender, usual = Sender(signal.SIGINT, first), getattr(owner, name)

    def interrupted(*arguments: Any) -> Any:
        if sender.events and isinstance(sender.events[-1], StepDone) and sender.events[-1].row["step"] == AT:
            for _ in range(2 if first == "a commit" else 1):
                time.sleep(2 * signals.SAME_SECONDS)
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)  # the same one, sent by two
        return usual(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(commit_seconds=0, callbacks=[sender])
    assert oocdl.open(tmp_path / "run").steps == AT - 1 and oocdl.verify(tmp_path / "run").sound
    assert sender.events[-1] == RunStopped("SIGINT", str(tmp_path / "run"), AT - 1)
    monkeypatch.undo()
    assert nets.files_of(fit()) == whole


def test_a_signal_waits_while_locks_are_taken_that_units_need(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the entry of a lock of Python's leaves it locked: units waited for ever."""
    looks, looked = Session.looks, list[int]()

    def stopped(self: Session) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        looked.append(len(self.held))
        return looks(self)

    monkeypatch.setattr(Session, "looks", stopped)
    with pytest.raises(SystemExit):
        fit()
    assert looked and oocdl.open(tmp_path / "run").steps == 0


def test_what_was_kept_last_is_that_of_the_committed_step(fit: Fit, tmp_path: Path) -> None:
    sender = Sender(signal.SIGTERM, "a step")
    with pytest.raises(SystemExit):
        fit(callbacks=[sender], scheduler=sender.get, keep="h")
    run = oocdl.open(tmp_path / "run")
    assert run.kept["h"].attrs["step"] == AT and oocdl.verify(run.path).sound
    whole = fit("whole", steps=AT, keep="h")
    assert run.kept["h"][...].tolist() == whole.kept["h"][...].tolist()  # type: ignore[union-attr]


def test_handlers_of_the_program_stay_its_own(fit: Fit, tmp_path: Path) -> None:
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sender, hangs_up = Sender(signal.SIGTERM, "a step"), Sender(signal.SIGHUP, "a callback")
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(callbacks=[hangs_up, sender], scheduler=sender.get)
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)
    assert oocdl.open(tmp_path / "run").steps == AT


def test_a_commit_is_whole_also_inside_of_who_watches_signals_already(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(signal.SIGTERM, "a commit")
    monkeypatch.setattr(os, "fsync", sender.fsync)
    with pytest.raises(SystemExit), Signals() as outermost, outermost.allowed():
        outer = signal.getsignal(signal.SIGTERM)
        try:
            fit(callbacks=[sender], commit_seconds=0)
        finally:
            assert signal.getsignal(signal.SIGTERM) == outer
    assert oocdl.open(tmp_path / "run").steps == AT and oocdl.verify(tmp_path / "run").sound
    assert sender.events[-1] == RunStopped("SIGTERM", str(tmp_path / "run"), AT)


def test_threads_install_no_handlers(fit: Fit) -> None:
    def handlers(*_: Any) -> list[Any]:
        return [signal.getsignal(one) for one in SIGNALS]

    before, seen = handlers(), list[Any]()
    thread = threading.Thread(target=lambda: fit(callbacks=[lambda event: seen.append(handlers(event))]))
    thread.start()
    thread.join(60)
    assert seen and all(found == before for found in seen)


STOPS_ITSELF = """
import os, signal, sys, threading
from oocdl.cli.app import main
from oocdl.storage.dataset.dataset import DataArray

read, number = DataArray.read, int(sys.argv[1])

def stopping(self, region):
    if threading.current_thread() is not threading.main_thread():  # a unit reads its input
        os.kill(os.getpid(), number)
    return read(self, region)

DataArray.read = stopping
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("fit", signal.SIGTERM),
        ("predict", signal.SIGHUP),
        pytest.param("evaluate", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_every_command_ends_with_the_signal_s_code(
    fit: Fit, job: tuple[Path, Path], tmp_path: Path, verb: str, number: signal.Signals
) -> None:
    model, data = map(str, job)
    arguments = {
        "fit": [model, data, "--workdir", "new", "--memory", "3GiB", "--engine", "onnxruntime"],
        "predict": ["run", data, "out.zarr"],
        "evaluate": ["run", data],
    }[verb]
    if verb != "fit":
        fit(steps=1)
    ended = python("-c", STOPS_ITSELF, int(number), verb, *arguments, folder=tmp_path, seconds=120)
    assert ended.returncode == 128 + number, ended.stderr
    told = {
        "fit": "0 steps are committed in new; the same command goes on",
        "predict": "out.zarr is unfinished, the same command goes on",
        "evaluate": "nothing was changed",
    }[verb]
    last = ended.stderr.splitlines()[-1].replace(f"{tmp_path}/", "")
    assert last == f"oocdl: stopped by {number.name}; {told}"
    assert not [path for path in tmp_path.rglob("spill/*") if path.is_dir()]
