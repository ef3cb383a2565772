"""Random faults of a cluster while it trains: nothing hangs, nothing committed is lost, bits are the same.

``python -m tests.kit.faults --faults 10 --runs 20 --seed 0`` starts a scheduler, a worker with a nanny
and one without, and a driver, as processes of their own. Workers, both of them, the scheduler and the driver
are killed, stopped (for some seconds, or until they are killed half a minute later) and terminated at random
moments; whatever has ended is started again after some seconds, as a batch system would. Prints a table;
exit code 1: a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import oocdl
from oocdl.events import Committed, Event, Notice, RunStarted, StepDone, WorkersChanged
from tests.kit import nets
from tests.kit.processes import Cluster, cluster, remains

HANG_SECONDS = 100.0
"""Without any event for so long, a run hangs."""
STOPPED_SECONDS = 35.0
"""What is stopped for good is killed after so long."""
WAIT_SECONDS = 60.0
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
OPTIONS: dict[str, Any] = {
    "memory": "1000MiB",
    "engine": "onnxruntime",
    "progress": False,
    "threads": 1,
    "batch_size": 1,
    "loss": "dice_ce",
    "seed": 11,
    "parallel": {"space": (2,)},
    "commit_seconds": 0.5,
}


def train(folder: Path, workdir: Path, address: str, steps: int) -> None:
    """What the driver does; tells of itself in lines of JSON."""

    def listen(event: Event) -> None:
        words: dict[str, Any] = {"event": type(event).__name__}
        if isinstance(event, StepDone):
            words["step"] = event.row["step"]
        elif isinstance(event, Committed):
            words["step"] = event.step
        elif isinstance(event, RunStarted):
            words["step"] = event.done
        elif isinstance(event, Notice | WorkersChanged):
            words["text"] = str(event)
        print(json.dumps(words), flush=True)

    oocdl.fit(
        folder / "conv.onnx", folder / "data.zarr", workdir=workdir, client=address,
        wait_seconds=WAIT_SECONDS, callbacks=[listen], steps=steps, **OPTIONS,
    )  # fmt: skip


@dataclass(eq=False)
class Driver:
    """A process that trains, and what it has told."""

    command: Sequence[str]
    log: Path
    said: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.heard = time.monotonic()
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.heard = time.monotonic()
                self.said.append((self.heard, json.loads(line)))

    def steps(self, event: str) -> list[int]:
        """The steps of which it has told by events of a kind."""
        return [words["step"] for _, words in list(self.said) if words["event"] == event]


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

    def judge(self) -> None:
        """Look what the driver has said since; steps that go on mean that no member was hit."""
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
                    return


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
    acknowledged: int = 0
    hangs: int = 0
    by_hand: list[str] = field(default_factory=list)
    """Errors after which the driver had to be started again."""
    unclean: list[str] = field(default_factory=list)
    later: list[threading.Timer] = field(default_factory=list)

    def run(self, wanted: int) -> None:
        """Train to the end, with so many faults or fewer."""
        driver = self._start()
        next_at = time.monotonic() + self.random.uniform(0, 8)
        while True:
            time.sleep(0.05)
            code = driver.process.poll()
            self._note(driver)
            if code == 0:
                break
            if code is not None:
                time.sleep(1)
                self.by_hand.append(self.last_line(driver))
                driver = self._start()
            elif time.monotonic() - driver.heard > HANG_SECONDS:
                self.hangs += 1
                driver.process.kill()
            elif len(self.faults) < wanted and time.monotonic() >= next_at:
                driver = self._strike(driver)
                # Every fourth comes while what the last one has done is being mended.
                next_at = time.monotonic() + self.random.uniform(0, 4)
                if self.random.random() < 0.75:
                    next_at += self._mended(driver)
        for timer in self.later:
            timer.join()
        for fault in self.faults:
            fault.judge()

    def _mended(self, driver: Driver) -> float:
        """Wait until steps are done again, or half a minute."""
        begun, known = time.monotonic(), len(driver.steps("StepDone"))
        while time.monotonic() - begun < 30 and driver.process.poll() is None:
            if len(driver.steps("StepDone")) >= known + 3:
                break
            time.sleep(0.1)
        return 0.0

    def _strike(self, driver: Driver) -> Driver:
        kind = self.random.choices(list(self.kinds), list(self.kinds.values()))[0]
        last = [words["event"] for _, words in list(driver.said)][-1:]
        at_work = last in (["StepDone"], ["Committed"]) and bool(driver.steps("StepDone"))
        self.faults.append(Fault(kind, time.monotonic(), driver, at_work))
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
            driver.process.kill()
            driver.process.wait()
            self._note(driver)
            if self.random.random() < 0.5:
                self.check_clean()
            return self._start()
        return driver

    def _start(self) -> Driver:
        command = [sys.executable, "-m", "tests.kit.faults", "--train", str(self.folder)]
        command += ["--workdir", str(self.workdir), "--address", self.there.address]
        return Driver([*command, "--steps", str(self.steps)], self.workdir.with_suffix(".log"))

    def _note(self, driver: Driver) -> None:
        for done in driver.steps("RunStarted"):
            if done < self.acknowledged and driver.steps("Committed") == []:
                self.unclean.append(f"step {self.acknowledged} was committed, and only {done} are there")
        self.acknowledged = max([self.acknowledged, *driver.steps("Committed")])

    def last_line(self, driver: Driver) -> str:
        """What the driver has ended with."""
        time.sleep(0.2)
        lines = driver.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def check_clean(self) -> None:
        """Note what workers still have of a run that is over."""
        try:
            with Client(self.there.address, timeout=30, set_as_default=False) as client:
                found = remains(client)
        except OSError:
            return  # the scheduler is starting again: its workers are new, too
        self.unclean += [f"{address}: {', '.join(words)}" for address, words in found.items()]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def report(trials: Sequence[Trial], equal: Sequence[bool]) -> tuple[str, bool]:
    """The table, and whether all promises are kept."""
    faults = [fault for trial in trials for fault in trial.faults]
    rows = [
        "| fault | number | in steps | noticed | told after: median s | most s | again: median s | most s |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        mine = [fault for fault in of_kind if fault.at_work]
        told = [fault.told for fault in mine if fault.told is not None]
        again = [fault.resumed for fault in mine if fault.resumed is not None]
        numbers = [f"{f(v):.1f}" if v else "" for v in (told, again) for f in (np.median, np.max)]
        rows.append(f"| {kind} | {len(of_kind)} | {len(mine)} | {len(told)} | {' | '.join(numbers)} |")
    by_hand = [line for trial in trials for line in trial.by_hand]
    unclean = [line for trial in trials for line in trial.unclean]
    hangs = sum(trial.hangs for trial in trials)
    of_workers = sum(fault.kind in OF_WORKERS for fault in faults)
    slow = [fault for fault in faults if fault.at_work and (fault.told or 0) > 15]
    survived = 1 - len(by_hand) / max(of_workers, 1)
    rows.append("")
    rows.append(
        f"{len(trials)} runs, {len(faults)} faults, {hangs} hangs, {len(unclean)} things left or lost, "
        f"{sum(equal)} runs with equal bits, {len(by_hand)} restarts by hand ({survived:.0%} of {of_workers} "
        f"faults of workers survived without), {len(slow)} told later than 15 s"
    )
    rows += [f"- by hand after: {line} ({count} times)" for line, count in Counter(by_hand).items()]
    rows += [f"- {line}" for line in unclean]
    rows += [f"- {fault.kind}: told after {fault.told:.1f} s" for fault in slow]
    good = not hangs and not unclean and all(equal) and survived >= 0.9 and not slow
    return "\n".join(rows), good


def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10, help="at most so many in each run")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--until", type=float, default=float("inf"), help="no new run after so many seconds")
    parser.add_argument("--only", nargs="*", help="kinds of faults")
    for word in ("--train", "--workdir", "--address"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.train:
        train(Path(given.train), Path(given.workdir), given.address, given.steps)
        return 0
    kinds = {kind: often for kind, often in KINDS.items() if not given.only or kind in given.only}
    begun, trials, equal = time.monotonic(), [], []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        nets.write_conv(folder / "conv.onnx")
        nets.write_data(folder / "data.zarr", nets.volumes(3, 8))
        plain = oocdl.fit(
            folder / "conv.onnx", folder / "data.zarr", workdir=folder / "plain", steps=given.steps, **OPTIONS
        )
        expected, losses = nets.files_of(plain), [row["loss"] for row in plain.history]
        with cluster(folder, [True, False], ["--memory-limit", "1050MiB"]) as there:
            for number in range(given.runs):
                if time.monotonic() - begun > given.until:
                    break
                chance = random.Random(given.seed + number)
                trial = Trial(folder, folder / f"run{number}", there, given.steps, chance, kinds)
                trial.run(given.faults)
                trial.check_clean()
                run = oocdl.open(trial.workdir)
                same = nets.files_of(run) == expected and [row["loss"] for row in run.history] == losses
                trials.append(trial)
                equal.append(same)
                print(
                    f"run {number}: {len(trial.faults)} faults, {time.monotonic() - begun:.0f} s, "
                    f"{'equal' if same else 'OTHER'} bits, {trial.hangs} hangs, by hand {trial.by_hand}, "
                    f"{trial.unclean}", flush=True,
                )  # fmt: skip
    text, good = report(trials, equal)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
