"""What a bench of one network does: variants in rounds, each in a process and a cgroup of its own.

Each round measures every variant; before and after them, what the machine can do (``limits.py``). PyTorch
in memory runs with several allocators in the first round; the fastest goes on, and its seconds over those of
a variant are that one's practicality. Parts of a budget are of what the smallest takes, and all of it is what
the largest does. The first step of a process does not count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from cage import Outcome
from cases import Case, write_data
from measure import MIB, failure, folder, measure_rates, mib, one_process, parser, result
from results import Limits, Row, row_of, show, show_all
from variants import Variant

from oocdl.config import parse_bytes
from oocdl.host.limits import available, cores

LEARNING_RATE = 1e-4
NO_COMMIT = 1e9
"""Seconds between commits: PyTorch writes no weights within the steps that count, either."""
TOY_MEMORY = 2 << 30
FIRST_TOLERANCE, LOSS_TOLERANCE = 1e-4, 5e-2
"""Of the first loss, which no update has touched, and of all: Adam makes steps of one size from gradients
that are hardly more than rounding, so PyTorch on one thread and on two drift apart as well."""


@dataclass(frozen=True)
class Bench:
    """A network, and what is set beside each other on it."""

    case: Case
    variants: tuple[Variant, ...]
    optimizer: str = "adam"
    only: str = ""
    """Patterns of the variants that run; empty: those of ``--only``."""


@dataclass(eq=False)
class Rounds:
    """A bench while it runs."""

    bench: Bench
    args: argparse.Namespace
    place: Path
    before: Mapping[str, list[Row]]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    @cached_property
    def variants(self) -> list[Variant]:
        """Those that are asked for, and the baselines that they need."""
        patterns = (self.bench.only or self.args.only).split(",")
        named = [v for v in self.bench.variants if any(fnmatchcase(v.name, p) for p in patterns)]
        if not named:
            names = "; ".join(variant.name for variant in self.bench.variants)
            raise SystemExit(f"--only {','.join(patterns)} names none of: {names}")
        needed = {variant.precision for variant in named}
        return [
            v
            for v in self.bench.variants
            if v in named or (v.baseline and v.precision in needed)
            if not (self.args.toy and v.baseline and v.env)
        ]

    def seconds(self, variant: Variant) -> float | None:
        """Median of all counted steps so far; None if a process has failed, or none has run."""
        found = self.outcomes.get(variant.name, [])
        if not found or any(failure(outcome) for outcome in found):
            return None
        return float(median(s for outcome in found for s in outcome.result["seconds"][1:]))

    def baselines(self, precision: str) -> list[Variant]:
        """Runs in memory of that precision."""
        return [variant for variant in self.variants if variant.baseline and variant.precision == precision]

    def baseline(self, precision: str) -> Variant | None:
        """The fastest of them so far."""
        known = [
            (took, number, variant)
            for number, variant in enumerate(self.baselines(precision))
            if (took := self.seconds(variant)) is not None
        ]
        return min(known)[2] if known else None

    def budget(self, variant: Variant) -> int | None:
        """Bytes of a process; None: no limit. ValueError if that hangs on what did not run."""
        if variant.part is None or self.args.toy:
            return None if variant.part is None else TOY_MEMORY
        known = [self.outcomes.get(found.name, []) for found in self.baselines(variant.precision)]
        taken = [outcomes[0].anonymous_bytes for outcomes in known if outcomes and not failure(outcomes[0])]
        if not taken and not self.args.peak:
            raise ValueError("no run in memory to take a part of; --peak would tell what it takes")
        peak = parse_bytes(self.args.peak or (max(taken) if variant.part == 1 else min(taken)))
        # A cgroup's limit is whole pages, and a budget above it is refused.
        return peak // variant.part // MIB * MIB

    def start(self, variant: Variant) -> Outcome:
        """One process."""
        try:
            budget = self.budget(variant)
        except ValueError as error:
            return Outcome(0, {"refused": str(error)})
        script, words = self.job(variant, budget)
        baseline = self.baseline(variant.precision) if variant.env is None else None
        env = baseline.env if baseline else variant.env
        limit = None if self.args.toy else budget
        outcome = one_process(script, words, limit, self.args.timeout, env)
        for left in ("model.run", "hooks"):
            shutil.rmtree(self.place / left, ignore_errors=True)  # only those that it has made are there
        return outcome

    def job(self, variant: Variant, budget: int | None) -> tuple[str, dict[str, Any]]:
        """Script and words of a variant's process."""
        common = {
            "model": str(self.place / "model.onnx"), "dataset": str(self.place / "data.zarr"),
            "optimizer": self.bench.optimizer, "lr": LEARNING_RATE, "steps": self.args.steps,
        }  # fmt: skip
        if variant.how != "oocdl":
            words = {**common, "twin": self.bench.case.twin, "threads": self.args.threads}
            words |= {"mode": variant.how, "precision": variant.precision}
            return "train_one.py", {**words, **({"least_bytes": 1} if self.args.toy else {})}
        words = {
            **common, "engine": self.args.engine, "workdir": str(self.place / "model.run"), "shuffle": False,
            "commit_seconds": NO_COMMIT, **self.bench.case.options(),
        }  # fmt: skip
        words |= {"memory": budget, "threads": self.args.threads}
        return "one_run.py", {**words, **variant.options}

    def plan_flops(self) -> int | None:
        """Of a step that nothing is cut or done twice for: what is left to do, whoever does it."""
        most = int(0.9 * available().nbytes)
        script, words = self.job(Variant("plan"), TOY_MEMORY if self.args.toy else most)
        outcome = one_process(script, {**words, "plan": True}, None, self.args.timeout)
        if why := failure(outcome):
            print(f"FLOPs are not known: {why}", file=sys.stderr)
            return None
        return int(outcome.result["planned"]["flops"])

    def measure_limits(self) -> None:
        """What the machine can do now."""
        precisions = sorted({variant.precision for variant in self.variants})
        words = {
            "folder": str(self.place), "threads": self.args.threads, "precisions": precisions,
            "toy": self.args.toy,
        }  # fmt: skip
        self.limits.add(result(one_process("limits.py", words, None, self.args.timeout), "limits.py: "))

    def run(self) -> None:
        """All rounds; what is found is written after every process."""
        self.limits.flops = self.plan_flops()
        for number in range(self.args.rounds):
            self.measure_limits()
            for variant in self.variants:
                if number and variant.baseline and variant is not self.baseline(variant.precision):
                    continue
                outcome = self.start(variant)
                self.outcomes.setdefault(variant.name, []).append(outcome)
                told = failure(outcome) or " ".join(f"{s:.2f}" for s in outcome.result["seconds"])
                taken = mib(outcome.anonymous_bytes)
                print(f"round {number + 1}: {variant.name}: {told}; {taken} MiB", file=sys.stderr)
                self.write()
            if not self.args.toy:
                self.measure_limits()

    def rows(self) -> list[Row]:
        """One for each variant that has run."""
        float32 = self.baseline("float32")
        rows = []
        for variant in self.variants:
            if variant.name not in self.outcomes:
                continue
            baseline = self.baseline(variant.precision)
            true = float32 or baseline
            try:
                budget = self.budget(variant)
            except ValueError:
                budget = None
            row = row_of(variant, self.outcomes[variant.name], budget, self.limits)
            row.practicality_beside(self.seconds(baseline) if baseline else None)
            row.loss_beside(self.outcomes[true.name][0].result["losses"] if true else None)
            rows.append(row)
        return rows

    def write(self) -> None:
        """Everything so far, to ``--json``."""
        if self.args.json:
            networks = {**self.before, self.bench.case.name: self.rows()}
            found = {
                "arguments": {name: str(value) for name, value in vars(self.args).items()},
                "limits": asdict(self.limits),
                "rows": [{"network": name, **asdict(row)} for name, rows in networks.items() for row in rows],
            }
            self.args.json.write_text(json.dumps(found, indent=1))


def options(text: str | None) -> argparse.ArgumentParser:
    """Of every bench that has rounds."""
    made = parser(text)
    made.add_argument("--rounds", type=int, help="default: 3 (in a toy 1)")
    made.add_argument("--steps", type=int, help="of each process, the first not counted; default: 3")
    made.add_argument("--threads", type=int, default=cores(), help="of everything that is measured")
    made.add_argument("--only", default="*", help="patterns of variants' names, such as 'oocdl 1/4,*hooks'")
    made.add_argument("--peak", help="memory that budgets are parts of; default: as measured")
    return made


def settle(made: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a toy is small."""
    args = made.parse_args(words)
    args.rounds = args.rounds or (1 if args.toy else 3)
    args.steps = args.steps or (2 if args.toy else 3)
    if args.steps < 2:
        made.error("--steps must be at least 2: the first does not count")
    return args


def broken(rows: Sequence[Row]) -> list[str]:
    """What should not be: oocdl killed or failed, or losses that are not PyTorch's."""
    found = []
    for row in rows:
        if row.variant.how == "oocdl" and row.why and not row.why.startswith("refused"):
            found.append(f"{row.variant.name}: {row.why}")
        for off, most in ((row.first_off, FIRST_TOLERANCE), (row.loss_off, LOSS_TOLERANCE)):
            if row.variant.plain and off is not None and not off <= most:
                found.append(f"{row.variant.name}: losses are {off:.1e} off")
    return found


def run(benches: Sequence[Bench], args: argparse.Namespace) -> None:
    """Write networks and data, measure, tell. Exit code 1 if something is broken."""
    found = dict[str, list[Row]]()
    for bench in benches:
        found[bench.case.name] = _run_one(bench, args, found)
    if len(found) > 1:
        show_all(found)
    if wrong := [f"BROKEN: {name}: {text}" for name, rows in found.items() for text in broken(rows)]:
        raise SystemExit("\n".join(wrong))


def _run_one(bench: Bench, args: argparse.Namespace, before: Mapping[str, list[Row]]) -> list[Row]:
    """One network; ``before`` are those that are done, which are written with it."""
    with folder(args) as place:
        rounds = Rounds(bench, args, place, before)
        for engine in {v.options.get("engine", args.engine) for v in rounds.variants if v.how == "oocdl"}:
            measure_rates(argparse.Namespace(**{**vars(args), "engine": engine}))
        bench.case.write(place / "model.onnx")
        write_data(bench.case, place / "data.zarr")
        rounds.run()
        rounds.write()
    rows = rounds.rows()
    show(bench.case.name, rows, rounds.limits)
    return rows
