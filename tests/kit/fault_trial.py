"""One run under random faults: its drivers and what they tell, the faults, and checks of what is promised."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client

import oocdl
from tests.kit.processes import Cluster, ask, remains, runs_of

HANG_SECONDS = 100.0
"""Without any event for so long, a run hangs."""
STEPLESS_SECONDS = 300.0
"""Without any step for so long, too, whatever it tells."""
CHECK_SECONDS = 90.0
"""For so long it is tried to ask workers what is left there; the scheduler may be starting again."""
STOPPED_SECONDS = 35.0
"""What is stopped for good is killed after so long."""
MOST_BY_HAND = 5
"""After so many starts by hand without a step between them a run is given up, which counts as a hang."""
KINDS = {
    "kill a worker": 4,
    "terminate a worker": 3,
    "stop a worker for some seconds": 2,
    "stop a worker for good": 2,
    "kill all workers": 2,
    "kill the scheduler": 2,
    "kill the driver": 2,
}
"""Faults, and how often each comes."""
OF_WORKERS = {kind for kind in KINDS if "worker" in kind}


@dataclass(eq=False)
class Driver:
    """A process that trains, and what it has told."""

    command: Sequence[str]
    log: Path
    said: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.heard = self.stepped = time.monotonic()
        self.hearing = threading.Thread(target=self._hear, daemon=True)
        self.hearing.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.heard = time.monotonic()
                words = json.loads(line)
                self.said.append((self.heard, words))
                if words["event"] == "StepDone":
                    self.stepped = self.heard

    @property
    def hangs(self) -> bool:
        """Whether nothing comes of it any more."""
        now = time.monotonic()
        return now - self.heard > HANG_SECONDS or now - self.stepped > STEPLESS_SECONDS

    def end(self) -> None:
        """Kill it, if it lives, and hear what it has told until then."""
        self.process.kill()
        self.process.wait()
        self.hearing.join()

    def steps(self, event: str) -> list[int]:
        """The steps of which it has told by events of a kind."""
        return [words["step"] for _, words in list(self.said) if words["event"] == event]


@dataclass(eq=False)
class Ledger:
    """Checks every commit of which drivers have told against what goes on from it."""

    acknowledged: int = 0
    next_step: int | None = None
    """The step that is to be done next, where that is known."""
    checked: int = 0
    lost: list[str] = field(default_factory=list)

    def hear(self, words: Mapping[str, Any]) -> None:
        """Take what a driver has told, in order, life after life."""
        if words["event"] == "Committed":
            self.acknowledged = max(self.acknowledged, words["step"])
        elif words["event"] in ("RunStarted", "WorkersChanged"):
            self.check(words["step"], words["event"])
            self.next_step = words["step"] + 1
        elif words["event"] == "StepDone":
            if self.next_step not in (None, words["step"]):
                self.lost.append(f"step {words['step']} was done where {self.next_step} was to come")
            self.next_step = words["step"] + 1

    def check(self, step: int, where: str) -> None:
        """Something goes on from a step: all that was acknowledged must be in it."""
        self.checked += 1
        if step < self.acknowledged:
            self.lost.append(f"{where}: step {self.acknowledged} was committed, and only {step} are there")


@dataclass(eq=False)
class Fault:
    """One fault, and what came of it."""

    kind: str
    at: float
    driver: Driver
    at_work: bool
    """Whether steps were being done: else the user is told of a fault before, or that workers are awaited."""
    resumed: float | None = None
    """When a step was done again, in seconds after the fault."""
    told: float | None = None
    """When the driver said something of it."""
    went_on: bool = False
    """Steps were done as if nothing had happened: no member was hit, or not for long."""

    @property
    def overtaken(self) -> bool:
        """Whether the driver, whose own end tells of itself, has ended before it could say anything."""
        return self.told is None and not self.went_on

    def judge(self) -> None:
        """Look what the driver has said since."""
        steps = 0
        for when, words in list(self.driver.said):
            if when < self.at:
                continue
            if words["event"] in ("Notice", "WorkersChanged") and self.told is None:
                self.told = when - self.at
            if words["event"] == "StepDone":
                steps += 1
                if self.told is not None:
                    self.resumed = when - self.at
                    return
                if steps == 3:
                    self.went_on = True
                    return
            if words["event"] == "RunFinished" and self.told is None:
                self.went_on = True


@dataclass(eq=False)
class Trial:
    """One run under faults."""

    folder: Path
    workdir: Path
    there: Cluster
    steps: int
    random: random.Random
    kinds: Mapping[str, int]
    faults: list[Fault] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    hangs: int = 0
    by_hand: list[str] = field(default_factory=list)
    """Errors after which the driver had to be started again."""
    unclean: list[str] = field(default_factory=list)
    """What was left on workers."""
    clean_checks: int = 0
    unchecked: list[str] = field(default_factory=list)
    """Checks that could not be made, and why."""
    later: list[threading.Timer] = field(default_factory=list)

    def run(self, wanted: int) -> None:
        """Train to the end, with so many faults or fewer."""
        driver, in_vain = self._start(), 0
        next_at = time.monotonic() + self.random.uniform(0, 8)
        while in_vain < MOST_BY_HAND:
            time.sleep(0.05)
            code = driver.process.poll()
            if code is not None:
                self._hear_out(driver)
                if code == 0:
                    break
                time.sleep(1)
                self._note_by_hand(driver)
                in_vain = 0 if driver.steps("StepDone") else in_vain + 1
                driver = self._start()
            elif driver.hangs:
                self.hangs += 1
                self.tell("HANGS", dump([driver.process.pid, *(one.pid() for one in self.there.workers)]))
                driver.process.kill()
            elif len(self.faults) < wanted and time.monotonic() >= next_at:
                driver = self._strike(driver)
                # Every fourth comes while what the last one has done is being mended.
                next_at = time.monotonic() + self.random.uniform(0, 4)
                if self.random.random() < 0.75:
                    self._mended(driver)
                    next_at = time.monotonic() + self.random.uniform(0, 4)
        else:
            self.hangs += 1
            driver.end()
        for timer in self.later:
            timer.join()
        for fault in self.faults:
            fault.judge()

    def check_end(self) -> None:
        """All that was acknowledged is in the run."""
        self.ledger.check(oocdl.open(self.workdir).steps, "the end")

    def tell(self, *words: object) -> None:
        """Print what happens, with the time."""
        print(time.strftime("%H:%M:%S"), f"run {self.workdir.name}:", *words, flush=True)

    def _hear_out(self, driver: Driver) -> None:
        """Check all that a driver which has ended has told."""
        driver.end()
        for _, words in driver.said:
            self.ledger.hear(words)
        self.ledger.next_step = None

    def _note_by_hand(self, driver: Driver) -> None:
        self.by_hand.append(self.last_line(driver))
        self.tell("by hand after", self.by_hand[-1])

    def _mended(self, driver: Driver) -> None:
        """Wait until steps are done again, or half a minute."""
        begun, known = time.monotonic(), len(driver.steps("StepDone"))
        while time.monotonic() - begun < 30 and driver.process.poll() is None:
            if len(driver.steps("StepDone")) >= known + 3:
                break
            time.sleep(0.1)

    def _strike(self, driver: Driver) -> Driver:
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        last = [words["event"] for _, words in list(driver.said)][-1:]
        at_work = last in (["StepDone"], ["Committed"]) and bool(driver.steps("StepDone"))
        self.faults.append(Fault(kind, time.monotonic(), driver, at_work))
        self.tell(kind, "in steps" if at_work else "while it begins, or mends")
        worker = self.random.choice(self.there.workers)
        if kind == "kill a worker":
            worker.send(signal.SIGKILL)
        elif kind == "terminate a worker":
            worker.send(signal.SIGTERM)
        elif kind.startswith("stop"):
            pid = worker.send(signal.SIGSTOP)
            good = kind.endswith("good")
            seconds = STOPPED_SECONDS if good else self.random.uniform(1, 12)
            if pid is not None:
                timer = threading.Timer(seconds, _signal, (pid, signal.SIGKILL if good else signal.SIGCONT))
                timer.start()
                self.later.append(timer)
        elif kind == "kill all workers":
            for one in self.there.workers:
                one.send(signal.SIGKILL)
        elif kind == "kill the scheduler":
            self.there.scheduler.send(signal.SIGKILL)
        else:
            self._hear_out(driver)
            if self.random.random() < 0.5:
                self.check_clean()
                return self._start()
            driver = self._start()
            self._mended(driver)
            self.check_clean(besides=1)
        return driver

    def _start(self) -> Driver:
        command = [sys.executable, "-m", "tests.kit.faults", "--train", str(self.folder)]
        command += ["--workdir", str(self.workdir), "--address", self.there.address]
        return Driver([*command, "--steps", str(self.steps)], self.workdir.with_suffix(".log"))

    def last_line(self, driver: Driver) -> str:
        """What the driver has ended with."""
        time.sleep(0.2)
        lines = driver.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def check_clean(self, besides: int = 0) -> None:
        """Note what workers still have of a run that is over, ``besides`` one that is not."""
        begun, found = time.monotonic(), None
        while found is None:
            try:
                with Client(self.there.address, timeout=30, set_as_default=False) as client:
                    found = foreign(client) if besides else remains(client)
            except (OSError, RuntimeError, TypeError, CancelledError) as error:  # somebody is starting again
                if time.monotonic() - begun > CHECK_SECONDS:
                    self.unchecked.append(f"what is left on workers: {type(error).__name__}: {error}")
                    return
                time.sleep(1)
        self.clean_checks += 1
        self.unclean += [f"{address}: {', '.join(words)}" for address, words in found.items()]


def foreign(client: Client, seconds: float = 30.0) -> dict[str, list[str]]:
    """Runs of which workers have parts after some seconds, where there should be one; empty: no more."""
    deadline = time.monotonic() + seconds
    while True:
        found = {address: runs for address, runs in ask(client, runs_of).items() if runs}
        if len({run for runs in found.values() for run in runs}) <= 1:
            return {}
        if time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def dump(pids: Sequence[int | None]) -> str:
    """What the threads of processes do, by py-spy where it is there."""
    spy = Path(sys.executable).with_name("py-spy")
    texts = []
    for pid in filter(None, pids if spy.exists() else ()):
        command = [str(spy), "dump", "--nonblocking", "--pid", str(pid)]
        texts.append(subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout)
    return "\n".join(texts)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
