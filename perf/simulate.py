"""Steps on one and two workers as `oocdl.simulate` predicts them, beside what they take.

A U-Net, cut in space and in batch, ResNets so cut, a perceptron and a GPT, on processes of a Dask cluster,
each on a core of its own. Rates are measured with as many busy threads as there are workers: cores of one
machine slow each other down. They come right before the steps, as virtual machines change their speed.

    python perf/simulate.py [--toy] [--cases rows,tokens] [--rounds 2] [--steps 8] [--json FILE]

Exit code 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import NO_COMMIT
from cases import Case, gpt, mlp, resnet, unet, write_data
from measure import folder, one_run, parser, print_row, print_top, result, write_json

import oocdl
from oocdl.planning.calibrate import measure_rates
from oocdl.planning.cost_model import NOMINAL

COUNTS = (1, 2)
WARM = 2
"""Steps in which programs are compiled, and pages first touched."""
MOST_OFF = 0.15
HEADS = ("case", "workers", "simulated s", "measured s", "least s", "most s", "off %", "limited by")


@dataclass(frozen=True)
class Row:
    """One case on a number of workers. Seconds of a step; ``measured`` is a median."""

    case: str
    workers: int
    simulated: float
    measured: float
    seconds: list[float]
    limit: str

    @property
    def off(self) -> float:
        """How much more is predicted than measured, as a share of the latter."""
        return self.simulated / self.measured - 1

    def cells(self) -> list[str]:
        """A row of the table."""
        times = (self.simulated, self.measured, min(self.seconds), max(self.seconds))
        told = [f"{seconds:.3f}" for seconds in times]
        return [self.case, f"{self.workers}", *told, f"{100 * self.off:+.0f}", self.limit]


def cases(toy: bool) -> dict[str, tuple[Case, Mapping[str, Any]]]:
    """By name a network with its data, and how it is cut."""
    base, size, depth = (2, 16, 1) if toy else (16, 96, 3)
    blocks, edge = ((1,), 16) if toy else ((3, 4, 6, 3), 128)
    layers, width, rows = (2, 16, 4) if toy else (6, 2048, 256)
    text = (1, 32, 2, 2, 16, 64) if toy else (4, 512, 8, 8, 256, 8192)
    return {
        "space": (unet(base, size, depth), {"space": [2, 2, 2]}),
        "batch": (unet(base, size, depth, 2), {"batch": 2}),
        "images": (resnet(blocks, 64, 8, edge, 100), {"batch": 2}),
        "pieces": (resnet((2,) * len(blocks), 32, 4, edge * 3 // 2, 100), {"space": [2, 2]}),
        "rows": (mlp(layers, width, rows), {"batch": 2}),
        "tokens": (gpt(*text), {"batch": 2}),
    }


def measured(
    name: str, place: Path, options: Mapping[str, Any], args: argparse.Namespace
) -> dict[int, list[float]]:
    """Seconds of steps by number of workers, which take turns."""
    found: dict[int, list[float]] = {count: [] for count in COUNTS}
    for turn in range(args.rounds):
        for count in COUNTS:
            words = {"workers": count, "pinned": True, "threads": 1, "steps": WARM + args.steps, **options}
            run = place / f"{name}-{count}-{turn}.run"
            outcome = one_run(
                place / "model.onnx", place / "data.zarr", None, args.timeout,
                workdir=str(run), commit_seconds=NO_COMMIT, **words,
            )  # fmt: skip
            found[count] += result(outcome)["step_seconds"][WARM:]
    return found


def main() -> None:
    """Parse, measure rates, predict, measure steps, tell."""
    made = parser(__doc__)
    made.add_argument("--cases", help="default: space,batch,images,pieces,rows,tokens")
    made.add_argument("--rounds", type=int, help="processes for each; default: 2 (in a toy 1)")
    made.add_argument("--steps", type=int, help="that count, of each; default: 8 (in a toy 2)")
    args = made.parse_args()
    args.rounds, args.steps = args.rounds or (1 if args.toy else 2), args.steps or (2 if args.toy else 8)
    known, rows = cases(args.toy), list[Row]()
    names = args.cases.split(",") if args.cases else list(known)
    print_top(HEADS)
    with folder(args) as place:
        rates = {
            count: NOMINAL if args.toy else measure_rates(args.engine, place, threads=count)
            for count in COUNTS
        }
        for name in names:
            case, cuts = known[name]
            where = place / name
            where.mkdir()
            files = case.write(where / "model.onnx"), where / "data.zarr"
            write_data(case, files[1])
            options = {"engine": args.engine, "memory": 4 << 30, "parallel": cuts, **case.options()}
            steps = measured(name, where, options, args)
            for count, seconds in steps.items():
                known_rates = {"cores": 1, "rates": rates[count]}
                scaling = oocdl.simulate(*files, hosts=[count], **known_rates, **options)
                row = scaling.rows[0]
                rows.append(Row(name, count, row.seconds, median(seconds), seconds, row.limit))
                print_row(HEADS, rows[-1].cells())
    write_json(args, rows)
    if not args.toy and any(abs(row.off) > MOST_OFF for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
