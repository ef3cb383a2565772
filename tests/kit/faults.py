"""Random faults of a cluster while it trains: nothing hangs, nothing committed is lost, bits are the same.

``python -m tests.kit.faults --faults 10 --runs 20 --seed 0`` starts a scheduler, a worker with a nanny
and one without, and a driver, as processes of their own. Workers, both of them, the scheduler and the driver
are killed, stopped (for some seconds, or until they are killed half a minute later) and terminated at random
moments; whatever has ended is started again after some seconds, as a batch system would. Every commit
of which a driver has told is checked against what goes on from it, and every driver that was killed for what
it leaves. Prints a table, with the checks that could not be made; exit code 1: a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import oocdl
from oocdl.events import Event, StepDone
from oocdl.planning.hosts import segments
from tests.kit import nets
from tests.kit.fault_trial import KINDS, OF_WORKERS, Fault, Trial
from tests.kit.processes import cluster

WAIT_SECONDS = 60.0
LIMIT = "1890MiB"  # of a worker, as people type it: a little above the budget
OPTIONS: dict[str, Any] = {
    "memory": "1800MiB",
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
        step = event.row["step"] if isinstance(event, StepDone) else getattr(event, "step", None)
        text = getattr(event, "reason", getattr(event, "text", ""))
        words = {"event": type(event).__name__, "step": getattr(event, "done", step), "text": text}
        print(json.dumps(words), flush=True)

    segments.HANDOVER_SECONDS = 1e-5  # a layer each: faults come between segments, too
    oocdl.fit(
        folder / "conv.onnx", folder / "data.zarr", workdir=workdir, client=address,
        wait_seconds=WAIT_SECONDS, callbacks=[listen], steps=steps, **OPTIONS,
    )  # fmt: skip


def report(trials: Sequence[Trial], equal: Sequence[bool]) -> tuple[str, bool]:
    """The table, and whether all promises are kept."""
    faults = [fault for trial in trials for fault in trial.faults]
    by_hand = [line for trial in trials for line in trial.by_hand]
    left = [line for trial in trials for line in trial.unclean]
    lost = [line for trial in trials for line in trial.ledger.lost]
    unchecked = [line for trial in trials for line in trial.unchecked]
    hangs = sum(trial.hangs for trial in trials)
    of_workers = sum(fault.kind in OF_WORKERS for fault in faults)
    slow = [fault for fault in faults if fault.at_work and (fault.told or 0) > 15]
    survived = 1 - len(by_hand) / max(of_workers, 1)
    rows = [
        *_table(faults),
        "",
        f"{len(trials)} runs, {len(faults)} faults: {hangs} hangs; {len(lost)} committed steps lost "
        f"({sum(trial.ledger.checked for trial in trials)} checks); {len(left)} things left on workers "
        f"({sum(trial.clean_checks for trial in trials)} checks, {len(unchecked)} could not be made); "
        f"{sum(equal)} runs with equal bits; {len(by_hand)} starts by hand ({survived:.0%} of {of_workers} "
        f"faults of workers survived without); {len(slow)} told later than 15 s",
    ]
    rows += [f"- by hand after: {line} ({count} times)" for line, count in Counter(by_hand).items()]
    rows += [f"- {line}" for line in (*lost, *left)]
    rows += [f"- not checked: {line} ({count} times)" for line, count in Counter(unchecked).items()]
    rows += [f"- {fault.kind}: told after {fault.told:.1f} s" for fault in slow]
    good = not hangs and not left and not lost and all(equal) and survived >= 0.9 and not slow
    return "\n".join(rows), good


def _table(faults: Sequence[Fault]) -> list[str]:
    rows = [
        "| fault | number | in steps | told | went on | overtaken | told: median s | most s "
        "| next step: median s | most s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        mine = [fault for fault in of_kind if fault.at_work]
        told = [fault.told for fault in mine if fault.told is not None]
        again = [fault.resumed for fault in mine if fault.resumed is not None]
        counts = [len(of_kind), len(mine), len(told)]
        counts += [sum(fault.went_on for fault in mine), sum(fault.overtaken for fault in mine)]
        numbers = [f"{f(v):.1f}" if v else "" for v in (told, again) for f in (np.median, np.max)]
        rows.append(f"| {kind} | {' | '.join([*map(str, counts), *numbers])} |")
    return rows


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
        with cluster(folder, [True, False], ["--memory-limit", LIMIT]) as there:
            for number in range(given.runs):
                if time.monotonic() - begun > given.until:
                    break
                chance = random.Random(given.seed + number)
                trial = Trial(folder, folder / f"run{number}", there, given.steps, chance, kinds)
                trial.run(given.faults)
                trial.check_clean()
                trial.check_end()
                run = oocdl.open(trial.workdir)
                same = nets.files_of(run) == expected and [row["loss"] for row in run.history] == losses
                trials.append(trial)
                equal.append(same)
                trial.tell(
                    f"{len(trial.faults)} faults, {time.monotonic() - begun:.0f} s since the beginning,",
                    f"{'equal' if same else 'OTHER'} bits, {trial.hangs} hangs,",
                    f"{trial.ledger.lost}, {trial.unclean}",
                )
    text, good = report(trials, equal)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
