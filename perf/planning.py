"""CPU seconds and memory that it takes to plan a step of thousands of units.

A U-Net (depth 2) is cut in space, each plan is made in a process of its own, and nothing is trained. What the
process has at most is beside what it had when planning began; plans are not taken from the cache.

    python perf/planning.py [--toy] [--grids 32x16x1,8x8x8,16x16x8] [--json FILE]

To compare two trees: this file of one, with ``PYTHONPATH`` of the other.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cases import unet, write_data
from measure import apart, report, short_parser

from oocdl.config import make_settings
from oocdl.host.limits import anonymous_bytes
from oocdl.training.job import job_of

GRIDS = "32x16x1,8x8x8,16x16x8"


@dataclass(frozen=True)
class Planned:
    """One plan."""

    grid: str
    layers: int
    units: int
    cpu_seconds: float
    peak_bytes: int
    """More than the process had before, at most."""
    grown_bytes: int
    """More than it had before, at the end."""
    numerics: str


def peak_bytes() -> int:
    """The most memory, without pages of files, that this process has had since ``clear_refs``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {
        name: int(text.split()[0])
        for name, _, text in (line.partition(":") for line in lines)
        if "kB" in text
    }
    return (kib["VmHWM"] - kib["RssFile"]) << 10


def plan_one(grid: str, toy: bool) -> Planned:
    """Plan one step in this process."""
    pieces = tuple(map(int, grid.split("x")))
    case = unet(2, 8 if toy else 64, 2)
    with TemporaryDirectory() as name:
        place = Path(name)
        options = {"engine": "onnxruntime", "loss": "dice_ce", "optimizer": "sgd", "lr": 0.1, "threads": 2}
        os.environ["OOCDL_PLAN_CACHE"] = "off"
        options |= {"memory": "16GiB", "parallel": {"space": pieces}, **case.options()}
        job = job_of(
            case.write(place / "model.onnx"), write_data(case, place / "data.zarr"), make_settings(**options)
        )
        before = anonymous_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        begun = time.process_time()
        plan = job.plan()
        taken, peak = time.process_time() - begun, peak_bytes()
    found = plan.compiled.plan
    grown = anonymous_bytes() - before
    return Planned(grid, len(found.layers), found.tasks, taken, peak - before, grown, found.numerics())


def main() -> None:
    """All grids; one table."""
    made = short_parser(__doc__)
    made.add_argument("--grids", help=f"pieces along the axes of space; default: {GRIDS} (in a toy 2x2x2)")
    args = made.parse_args()
    grids = (args.grids or ("2x2x2" if args.toy else GRIDS)).split(",")
    rows = [apart(plan_one, grid, args.toy) for grid in grids]
    cells = [
        [row.grid, str(row.layers), str(row.units), f"{row.cpu_seconds:.2f}"]
        + [f"{nbytes / 2**20:.0f}" for nbytes in (row.peak_bytes, row.grown_bytes)]
        for row in rows
    ]
    report(args, ["cuts", "layers", "units", "CPU s", "peak MiB", "grown MiB"], cells, rows)


if __name__ == "__main__":
    main()
