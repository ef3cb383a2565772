"""Many steps on a Dask cluster: nothing grows, no step becomes slower, and what a task costs there.

A U-Net whose pass is about a hundred tasks, on one and on two processes of a Dask cluster, of one thread
each; the scheduler is in the process of the client. Before and after, the same steps in one process of as
many threads: what a task costs on the cluster is the difference of medians.

    python perf/cluster_steps.py [--toy] [--steps 1000] [--processes 1,2] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import NO_COMMIT
from cases import Case, unet, write_data
from measure import (
    folder,
    measure_rates,
    mib,
    one_run,
    parser,
    print_row,
    print_top,
    result,
    write_json,
)

MEMORY = 3 << 30
WARM = 2
"""Steps in which programs are compiled."""
MOST_GROWTH, MOST_SLOWER = 0.05, 0.05
MOST_SECONDS_A_TASK = 2.5e-3
HEADS = (
    "processes", "tasks", "one process s", "cluster s", "first s", "last s", "ms/task above", "scheduler MiB",
    "workers MiB", "broken",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Steps of one cluster. Seconds are medians."""

    processes: int
    tasks: int
    """Of a pass."""
    own_seconds: float
    """Of a step in one process of as many threads."""
    seconds: float
    window_seconds: list[float]
    """Of the steps from look to look."""
    sizes: list[list[int]]
    """Anonymous bytes of scheduler and workers, look by look."""

    @property
    def seconds_a_task(self) -> float:
        """What the cluster takes longer."""
        return (self.seconds - self.own_seconds) / self.tasks

    def broken(self) -> list[str]:
        """Promises that were not kept."""
        growth = [max(sizes) / sizes[0] - 1 for sizes in zip(*self.sizes, strict=True)]
        checks = {
            f"memory +{100 * max(growth):.1f} %": max(growth) > MOST_GROWTH,
            "slower": self.window_seconds[-1] > (1 + MOST_SLOWER) * self.window_seconds[0],
            "ms/task": self.seconds_a_task > MOST_SECONDS_A_TASK,
        }
        return [name for name, is_broken in checks.items() if is_broken]

    def cells(self) -> list[str]:
        """A row."""
        scheduler, *workers = ([mib(size) for size in sizes] for sizes in zip(*self.sizes, strict=True))
        times = (self.own_seconds, self.seconds, self.window_seconds[0], self.window_seconds[-1])
        return [
            f"{self.processes}", f"{self.tasks}", *(f"{seconds:.3f}" for seconds in times),
            f"{1e3 * self.seconds_a_task:.2f}", f"{scheduler[0]} → {scheduler[-1]}",
            ", ".join(f"{sizes[0]} → {sizes[-1]}" for sizes in workers), ", ".join(self.broken()) or "-",
        ]  # fmt: skip


def measure(case: Case, place: Path, processes: int, args: argparse.Namespace) -> Found:
    """One cluster, between two runs in one process."""
    options = {
        "engine": args.engine, "memory": MEMORY, "commit_seconds": NO_COMMIT, "parallel": {"space": [2]},
        "optimizer": "sgd", **case.options(),
    }  # fmt: skip

    def trained(name: str, steps: int, **how: int) -> Mapping[str, Any]:
        words = {"workdir": str(place / f"{processes}-{name}.run"), "steps": steps, **options, **how}
        run = result(one_run(place / "model.onnx", place / "data.zarr", None, args.timeout, **words))
        return {**run, "step_seconds": run["step_seconds"][WARM:]}

    before = trained("before", WARM + args.window, threads=processes)["step_seconds"]
    found = trained("cluster", args.steps, threads=1, workers=processes, every=args.window)
    after = trained("after", WARM + args.window, threads=processes)["step_seconds"]
    seconds = found["step_seconds"]
    windows = [median(seconds[at : at + args.window]) for at in range(0, len(seconds), args.window)]
    tasks, both = found["planned"]["calls"], median(before + after)
    return Found(processes, tasks, both, median(seconds), windows, found["sizes"])


def main() -> None:
    """Parse, measure, tell. Exit code 1 if a promise is broken; a toy is too short to tell."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, help="of each cluster; default: 1000 (in a toy 12)")
    made.add_argument("--window", type=int, help="steps from look to look, and of a median; default: 50 (4)")
    made.add_argument("--processes", default="1,2", help="numbers of processes; default: %(default)s")
    args = made.parse_args()
    args.steps, args.window = args.steps or (12 if args.toy else 1000), args.window or (4 if args.toy else 50)
    case = unet(2, 16, 0) if args.toy else unet(8, 64, 0)
    measure_rates(args)
    found = []
    print_top(HEADS)
    with folder(args) as place:
        case.write(place / "model.onnx")
        write_data(case, place / "data.zarr")
        for processes in map(int, args.processes.split(",")):
            found.append(measure(case, place, processes, args))
            print_row(HEADS, found[-1].cells())
    write_json(args, found)
    if not args.toy and any(one.broken() for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
