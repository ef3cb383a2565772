"""How near does a step that waits for the disk come to the disk's own speed?

The disk alone: direct reads and writes of whole chunks by 1 to 4 threads, before and after the step;
first the one, then the other, and both at once in the step's proportion.
The step: a perceptron at a small budget and batch 4, so that its time is the time of its weights and
their state on their way from and to the spill; in a memory cgroup of exactly the budget (needs root).
The share is the time that the disk alone, at its best number of threads, takes for the bytes that the
step read and wrote, by the time of the step.

    python perf/disk_io.py [--toy] [--workdir FOLDER_ON_THE_DISK] [--chunk 16MiB] [--json FILE]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cases import mlp, write_data
from limits import READS, THREADS, disk
from measure import failure, folder, gb, limit_of, measure_rates, mib, one_run, parser, write_json
from table import markdown

from oocdl.config import parse_bytes

LONG_SECONDS = 1e9
"""Between commits: none falls into the steps that count."""


@dataclass(frozen=True)
class Moved:
    """Of a step: medians, the first step left out."""

    budget_bytes: int
    seconds: float
    read_bytes: float
    written_bytes: float
    apart_seconds: float
    """What the disk alone takes for that, first reading and then writing."""
    both_seconds: float
    """What it takes for it at once, as in the step."""
    share: float
    """Of that speed of the disk."""


def step(place: Path, args: argparse.Namespace) -> tuple[int, float, float, float]:
    """Budget, seconds, and bytes read from and written to the spill. Raises SystemExit if it fails."""
    case = mlp(2, 256, 4) if args.toy else mlp(args.layers, args.width, 4)
    budget = parse_bytes(args.memory)
    outcome = one_run(
        case.write(place / "model.onnx"), write_data(case, place / "data.zarr"), limit_of(args, budget),
        args.timeout, memory=budget, steps=args.steps, engine=args.engine, optimizer="adam",
        commit_seconds=LONG_SECONDS, shuffle=False, workdir=str(place / "model.run"), **case.options(),
    )  # fmt: skip
    if why := failure(outcome):
        raise SystemExit(f"{case.name} at {mib(budget)} MiB: {why}")
    found = outcome.result
    names = ("step_seconds", "spill_read", "spill_written")
    seconds, read, written = (median(found[name][1:] or found[name]) for name in names)
    return budget, seconds, read, written


def parse() -> argparse.Namespace:
    """The command line; ``--toy`` replaces the sizes."""
    made = parser(__doc__)
    made.add_argument("--chunk", help="size of the chunks; default: 16MiB (in a toy 64KiB)")
    made.add_argument("--total", help="bytes of all chunks together; default: 2GiB (in a toy 1MiB)")
    made.add_argument("--memory", help="budget of the step; default: 600MiB (in a toy 2GiB)")
    made.add_argument("--layers", type=int, default=16, help="of the perceptron")
    made.add_argument("--width", type=int, default=4096, help="of its layers")
    made.add_argument("--steps", type=int, help="the first not counted; default: 4 (in a toy 2)")
    args = made.parse_args()
    args.chunk = args.chunk or ("64KiB" if args.toy else "16MiB")
    args.total = args.total or ("1MiB" if args.toy else "2GiB")
    args.memory = args.memory or ("2GiB" if args.toy else "600MiB")
    args.steps = args.steps or (2 if args.toy else 4)
    return args


DISK_HEADS = ("disk alone", "threads", "read GB/s", "written GB/s", "both at once GB/s")
STEP_HEADS = (
    "step at MiB", "s", "read GB", "written GB", "both GB/s", "disk, one after the other s", "at once s",
    "share %",
)  # fmt: skip


def main() -> None:
    """Disk, step, disk again; then the tables."""
    args = parse()
    measure_rates(args)
    chunk = parse_bytes(args.chunk)
    count = max(parse_bytes(args.total) // chunk, max(THREADS))
    with folder(args) as place:
        speeds = disk(place, chunk, count, "before", READS)
        budget, seconds, read, written = step(place, args)
        speeds += disk(place, chunk, count, "after", read / max(read + written, 1))
    rows = [(s.when, f"{s.threads}", gb(s.read), gb(s.written), gb(s.both)) for s in speeds]
    print(markdown(DISK_HEADS, rows), "\n")
    # The mean of both times, by the best number of threads of each.
    best = [
        median(max(getattr(s, way) for s in speeds if s.when == when) for when in ("before", "after"))
        for way in ("read", "written", "both")
    ]
    apart = read / best[0] + written / best[1]
    both = (read + written) / best[2]
    moved = Moved(budget, seconds, read, written, apart, both, both / seconds)
    row = (
        mib(budget), f"{seconds:.2f}", gb(read), gb(written), gb((read + written) / seconds),
        f"{moved.apart_seconds:.2f}", f"{moved.both_seconds:.2f}", f"{100 * moved.share:.0f}",
    )  # fmt: skip
    print(markdown(STEP_HEADS, [row]))
    write_json(args, [*speeds, moved])


if __name__ == "__main__":
    main()
