"""Is a memory budget kept? Networks at budgets from the smallest that is accepted up to in-core.

For each network the smallest budget is asked of the planner: it refuses a smaller one, and names it.
From there to what a step needs that spills nothing, budgets are spaced geometrically. At each of them
a process trains for some steps inside a memory cgroup of exactly the budget. Needs root.

    python perf/promise.py [--toy | --small | --families] [--model unet96,mlp] [--count 8]
                           [--budgets 600MiB,1GiB] [--json FILE] [--too-low 10] [--unguarded]

Exit code 1 if a promise is broken: a process was killed or failed, its peak of anonymous memory was
above the predicted peak, that was above the budget, or without freed memory that is kept more than
``--slack`` times what was measured.
With ``--too-low`` predictions are wrong on purpose: then a peak above the budget breaks a promise.
Seconds off by more than a factor 1.5 are told, too, but do not count: others may use the machine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cage import Outcome
from cases import Case, gpt, images, mlp, plain, recurrent, res_enc, resnet, unet, write_data
from measure import (
    MIB,
    failure,
    folder,
    gb,
    later,
    limit_of,
    measure_rates,
    mib,
    one_run,
    parser,
    print_row,
    print_top,
    write_json,
)

from oocdl.config import parse_bytes
from oocdl.host.limits import available

MODELS = {
    "unet96": unet(16, 96),
    "unet128": unet(16, 128),
    "resnet50": resnet((3, 4, 6, 3), 64, 32, 224, 1000),
    "gpt": gpt(12, 512, 8, 8, 256, 8192),
    "mlp": mlp(16, 4096, 64),
}
SMALL = {
    "unet64": unet(16, 64),
    "mlp": mlp(4, 1536, 16),
    "gpt": gpt(2, 256, 4, 4, 256, 8192),
    "plain": plain(8, 4, 80),
    "resnet14": resnet((1, 1, 1, 1), 16, 16, 128, 100),
}
"""A step of these takes a second or two; what the process itself takes is half of their budgets."""
_VISION = "torchvision.models"
FAMILIES = {
    **SMALL,
    "resenc": res_enc(16, 4, 64),
    "mobilenet_v2": images(_VISION, "mobilenet_v2", 16, 128),
    "efficientnet_b0": images(_VISION, "efficientnet_b0", 16, 128),
    "convnext_tiny": images(_VISION, "convnext_tiny", 4, 128),
    "swin_t": images(_VISION, "swin_t", 4, 128),
    "lstm": recurrent(2, 256, 16, 200),
}
"""Others of further kinds; torchvision's and nnU-Net's need these installed (see ``networks.py``)."""
TOYS = {
    "unet96": unet(8, 32, 2),
    "unet128": unet(4, 16, 2),
    "resnet50": resnet((1, 1), 8, 2, 32, 10),
    "gpt": gpt(1, 32, 2, 2, 16, 64),
    "mlp": mlp(2, 64, 4),
}
SLACK = 1.25
TIME_FACTOR = 1.5
TRIES = 12
"""Budgets that are asked for until one is accepted."""
MORE = 1.1
"""Where none is named, the next one is so much larger."""
NAMED = re.compile(r"memory='(\d+)MiB' would do")


class NoBudget(Exception):
    """The planner accepts none, or does not say which."""


@dataclass(frozen=True)
class Row:
    """One network at one budget."""

    model: str
    budget_bytes: int
    planned: dict[str, Any]
    """What was predicted; empty if there is no plan."""
    outcome: Outcome
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """A network on disk."""

    name: str
    case: Case
    place: Path
    args: argparse.Namespace

    def start(self, limit_bytes: int | None, **options: Any) -> Outcome:
        """One process that plans or trains."""
        return one_run(
            self.place / "model.onnx", self.place / "data.zarr", limit_bytes, self.args.timeout,
            engine=self.args.engine, optimizer="adam", **self.case.options(), **options,
        )  # fmt: skip

    def plan(self, budget_bytes: int) -> Outcome:
        """What the planner says to a budget."""
        return self.start(None, plan=True, memory=budget_bytes)


def smallest(bench: Bench) -> tuple[int, list[str]]:
    """The smallest budget in bytes, as the planner names it; complaints if that was refused in turn,
    or none named. Then more is asked for until a budget is accepted; NoBudget if none ever is.
    """
    budget, complaints, named = MIB, list[str](), False
    for _ in range(TRIES):
        why = failure(bench.plan(budget))
        if not why:
            return budget, complaints
        told = NAMED.search(why)
        if named:
            complaints.append(
                f"{bench.name}: {mib(budget)} MiB was named as the smallest budget, and is {why}"
            )
        elif told is None:
            complaints.append(f"{bench.name}: {mib(budget)} MiB is {why}; no budget is named")
        named = told is not None
        budget = int(told[1]) * MIB if told else int(budget * MORE) // MIB * MIB
    raise NoBudget(f"{bench.name}: no budget was accepted up to {mib(budget)} MiB: {why}")


def budgets(bench: Bench) -> tuple[list[int], list[str]]:
    """Budgets in bytes, ascending, and complaints. Raises NoBudget."""
    args = bench.args
    if args.budgets:
        return sorted(parse_bytes(text) for text in args.budgets.split(",")), []
    low, complaints = smallest(bench)
    most = available().nbytes
    outcome = bench.plan(most)
    if why := failure(outcome):
        raise NoBudget(f"{bench.name}: {mib(most)} MiB, all that this machine has: {why}")
    high = max(low, min(most, -(-outcome.result["planned"]["needed"] // MIB) * MIB))
    print(
        f"{bench.name}: from {mib(low)} MiB, the smallest budget, to {mib(high)} MiB, in core",
        file=sys.stderr,
    )
    steps = max(args.count - 1, 1)
    spaced = [int(low * (high / low) ** (index / steps)) // MIB * MIB for index in range(args.count)]
    return sorted({low, *spaced[1:-1], *([high] if args.count > 1 else [])}), complaints


def measure(bench: Bench, budget_bytes: int) -> Row:
    """Train at one budget, and judge."""
    run = bench.place / "run"
    how = {"too_low": bench.args.too_low, "unguarded": bench.args.unguarded}
    outcome = bench.start(
        limit_of(bench.args, budget_bytes),
        memory=budget_bytes,
        steps=bench.args.steps,
        workdir=str(run),
        **how,
    )
    shutil.rmtree(run, ignore_errors=True)  # it is not there if the budget was refused
    planned = outcome.result.get("planned")
    if planned is None:
        planned = bench.plan(budget_bytes).result.get("planned", {})
    row = Row(bench.name, budget_bytes, planned, outcome)
    row.broken.extend(judge(row, bench.args.slack, bench.args.too_low > 0))
    took = later(row.outcome, "step_seconds")
    if took and not 1 / TIME_FACTOR <= planned["step_seconds"] / took <= TIME_FACTOR:
        row.notes.append("seconds off")
    return row


def judge(row: Row, slack: float, too_low: bool) -> list[str]:
    """Which promises are broken; with ``too_low`` what was predicted is not one."""
    why, peak = failure(row.outcome), row.planned.get("peak")
    broken = [why] if why else []
    if too_low:
        return broken + ["measured above budget"] * (row.outcome.anonymous_bytes > row.budget_bytes)
    if peak is not None and peak > row.budget_bytes:
        broken.append("predicted above budget")
    if peak is not None and not why:
        if row.outcome.anonymous_bytes > peak:
            broken.append("measured above predicted")
        if row.planned["needed"] > slack * row.outcome.anonymous_bytes:
            broken.append(f"predicted above {slack:g} x measured")
    return broken


HEADS = (
    "model", "budget MiB", "predicted peak", "measured peak", "pred/meas", "OOM kills", "predicted s/step",
    "measured s/step", "pred/meas s", "read GB planned", "read GB", "written GB planned", "written GB",
    "promise",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; memory in MiB, spill traffic of a step in GB."""
    planned, took = row.planned, later(row.outcome, "step_seconds")
    peak, anonymous = planned.get("peak"), row.outcome.anonymous_bytes
    verdict = "; ".join([*(f"BROKEN: {what}" for what in row.broken), *row.notes])

    def moved(number: float | None) -> str:
        return "-" if number is None else gb(number)

    return (
        row.model, mib(row.budget_bytes), mib(peak) if peak else "-", mib(anonymous),
        f"{peak / anonymous:.2f}" if peak and anonymous else "-", f"{row.outcome.oom_kills}",
        f"{planned['step_seconds']:.2f}" if planned else "-", f"{took:.2f}" if took else "-",
        f"{planned['step_seconds'] / took:.2f}" if took else "-",
        moved(planned.get("spill_read")), moved(later(row.outcome, "spill_read")),
        moved(planned.get("spill_written")), moved(later(row.outcome, "spill_written")), verdict or "kept",
    )  # fmt: skip


def networks(args: argparse.Namespace) -> dict[str, Case]:
    """Those that the command line asks for, by name."""
    return TOYS if args.toy else FAMILIES if args.families else SMALL if args.small else MODELS


def parse() -> argparse.Namespace:
    """The command line; ``--toy`` replaces the networks."""
    made = parser(__doc__)
    made.add_argument("--small", action="store_true", help="networks of which a step takes seconds")
    made.add_argument("--families", action="store_true", help="one network of each kind")
    made.add_argument("--model", help=f"some of {','.join(MODELS)}; default: all (in a toy the first)")
    made.add_argument("--count", type=int, help="budgets of each network; default: 8 (in a toy 2)")
    made.add_argument("--budgets", help="these instead, such as 600MiB,1GiB")
    made.add_argument("--steps", type=int, help="of each run, the first not counted; default: 3 (in a toy 2)")
    made.add_argument(
        "--slack", type=float, help=f"predicted to measured, at most; default: {SLACK} (in a toy any)"
    )
    made.add_argument(
        "--too-low", type=float, default=0, help="plan with so many percent less than is predicted"
    )
    made.add_argument("--unguarded", action="store_true", help="without the memory guard")
    args = made.parse_args()
    args.model = args.model or (next(iter(TOYS)) if args.toy else ",".join(networks(args)))
    args.count = args.count or (2 if args.toy else 8)
    args.steps = args.steps or (2 if args.toy else 3)
    # What a process keeps for itself is most of a toy.
    args.slack = args.slack or (float("inf") if args.toy else SLACK)
    unknown = [name for name in args.model.split(",") if name not in networks(args)]
    if unknown:
        made.error(f"--model {','.join(unknown)} is not one of {', '.join(networks(args))}")
    return args


def main() -> None:
    """All networks, all budgets; rows as they come."""
    args = parse()
    measure_rates(args)
    rows: list[Row] = []
    complaints: list[str] = []
    print_top(HEADS)
    for name in args.model.split(","):
        with folder(args) as place:
            bench = Bench(name, networks(args)[name], place, args)
            bench.case.write(place / "model.onnx")
            write_data(bench.case, place / "data.zarr")
            try:
                sizes, refused = budgets(bench)
            except NoBudget as error:
                sizes, refused = [], [str(error)]
            complaints += refused
            for budget in sizes:
                rows.append(measure(bench, budget))
                print_row(HEADS, cells(rows[-1]))
                write_json(args, rows)
    for text in complaints:
        print(f"BROKEN: {text}")
    if complaints or any(row.broken for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
