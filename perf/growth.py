"""Does a voxel cost the same whatever the volume? Seconds and spill of a U-Net step at a fixed budget.

Each volume is trained on by a process of its own, inside a memory cgroup of exactly the budget.
Needs root; ``--plot`` needs matplotlib (``oocdl[plot]``).

    python perf/growth.py [--toy] [--memory 700MiB] [--sizes 64,96,128] [--plot growth.png] [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cage import Outcome
from cases import unet, write_data
from measure import (
    failure,
    folder,
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

SIZES = "64,96,128,160,192,224,256"


@dataclass(frozen=True)
class Row:
    """One volume. Seconds and bytes are None if the run has failed."""

    size: int
    outcome: Outcome
    seconds: float | None
    """Of a step: the median, the first left out; and so are bytes."""
    read_bytes: float | None
    written_bytes: float | None

    @property
    def voxels(self) -> int:
        """Of the volume."""
        return self.size**3

    def per_voxel(self, number: float | None) -> float | None:
        """A figure of a step, for each voxel."""
        return None if number is None else number / self.voxels

    @property
    def spill_per_voxel(self) -> float | None:
        """Bytes read and written."""
        if self.read_bytes is None or self.written_bytes is None:
            return None
        return (self.read_bytes + self.written_bytes) / self.voxels


def measure(size: int, args: argparse.Namespace) -> Row:
    """Train on one cube."""
    case = unet(2, size, 2) if args.toy else unet(args.base, size)
    budget = parse_bytes(args.memory)
    with folder(args) as place:
        run = place / "model.run"
        outcome = one_run(
            case.write(place / "model.onnx"), write_data(case, place / "data.zarr"), limit_of(args, budget),
            args.timeout, memory=budget, steps=args.steps, engine=args.engine, optimizer="adam",
            workdir=str(run), **case.options(),
        )  # fmt: skip
        shutil.rmtree(run, ignore_errors=True)  # it is not there if the run was refused

    found = (later(outcome, name) for name in ("step_seconds", "spill_read", "spill_written"))
    return Row(size, outcome, *found)


HEADS = (
    "cube", "Mvoxel", "s/step", "µs/voxel", "planned µs/voxel", "read B/voxel", "written B/voxel",
    "planned spill B/voxel", "peak MiB", "remarks",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""

    def cell(number: float | None, digits: int, factor: float = 1) -> str:
        return "-" if number is None else f"{number * factor:.{digits}f}"

    planned: dict[str, Any] = row.outcome.result.get("planned", {})
    spill = planned["spill_read"] + planned["spill_written"] if planned else None
    return (
        f"{row.size}", f"{row.voxels / 1e6:.2f}", cell(row.seconds, 2),
        cell(row.per_voxel(row.seconds), 2, 1e6), cell(row.per_voxel(planned.get("step_seconds")), 2, 1e6),
        cell(row.per_voxel(row.read_bytes), 0),
        cell(row.per_voxel(row.written_bytes), 0), cell(row.per_voxel(spill), 0),
        mib(row.outcome.anonymous_bytes), failure(row.outcome) or "-",
    )  # fmt: skip


def spread(rows: Sequence[Row]) -> str:
    """How flat it is, of the volumes that spill: those that fit have no traffic to begin with."""
    spilled = [row for row in rows if row.seconds is not None and row.spill_per_voxel]
    if len(spilled) < 2:
        return "fewer than two volumes spill: nothing to compare"
    times = [row.per_voxel(row.seconds) or 0.0 for row in spilled]
    traffic = [row.spill_per_voxel or 0.0 for row in spilled]
    return (
        f"volumes that spill ({spilled[0].size} to {spilled[-1].size}): most to least "
        f"{max(times) / min(times):.2f} in seconds, {max(traffic) / min(traffic):.2f} in spill per voxel"
    )


def plot(rows: Sequence[Row], path: Path, memory: str) -> None:
    """Both per voxel, against the volume."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [row for row in rows if row.seconds is not None]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    voxels = [row.voxels for row in done]
    times = [1e6 * (row.per_voxel(row.seconds) or 0.0) for row in done]
    panels[0].plot(voxels, times, "o-")
    panels[0].set_ylabel("seconds a step and Mvoxel")
    for name, way in (("read", "read_bytes"), ("written", "written_bytes")):
        panels[1].plot(voxels, [row.per_voxel(getattr(row, way)) or 0.0 for row in done], "o-", label=name)
    panels[1].set_ylabel("spill bytes a step and voxel")
    panels[1].legend()
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(voxels, [f"{row.size}³" for row in done], minor=False)
        panel.set_xlabel("volume")
        panel.set_ylim(bottom=0)
    figure.suptitle(f"A U-Net step at {memory}")
    figure.savefig(path, dpi=150)


def main() -> None:
    """All volumes; rows as they come."""
    made = parser(__doc__)
    made.add_argument("--sizes", help=f"edges of the cubes; default: {SIZES} (in a toy 8,16)")
    made.add_argument("--base", type=int, default=8, help="channels on top")
    made.add_argument("--memory", help="budget; default: 700MiB (in a toy 2GiB)")
    made.add_argument("--steps", type=int, default=2, help="of each run, the first not counted")
    made.add_argument("--plot", type=Path, help="draw it into this file")
    args = made.parse_args()
    args.sizes = args.sizes or ("8,16" if args.toy else SIZES)
    args.memory = args.memory or ("2GiB" if args.toy else "700MiB")
    measure_rates(args)
    rows: list[Row] = []
    print_top(HEADS)
    for size in args.sizes.split(","):
        rows.append(measure(int(size), args))
        print_row(HEADS, cells(rows[-1]))
        write_json(args, rows)
    print(spread(rows))
    if args.plot:
        plot(rows, args.plot, args.memory)
    if any(row.seconds is None for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
