"""What a task costs beside its arithmetic: Dask, Python and copying; tasks a second.

Two U-Nets in memory: a tiny one in many units, where a step is hardly anything else, and one of units as
large as they usually are. One thread with a clock around everything tells where the time goes; then the
same steps by oocdl's scheduler on all threads, and by Dask's.

    python perf/overhead.py [--toy] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench import NO_COMMIT, options, settle
from cage import Outcome
from cases import Case, unet, write_data
from measure import failure, folder, markdown, measure_rates, one_process, write_json

WAYS = {"serial": "one thread, timed", "own": "oocdl's scheduler", "dask": "dask.threaded"}
PARTS = ("arithmetic", "copying", "Python in tasks", "Dask", "Python between passes")
MEMORY = 6 << 30


@dataclass(frozen=True)
class Cut:
    """A network, and in how many units."""

    case: Case
    options: Mapping[str, Any]
    """Of ``fit``."""


@dataclass
class Found:
    """A network, one way. Seconds of a step and of its parts are medians; None if a process has failed."""

    network: str
    way: str
    outcomes: list[Outcome] = field(default_factory=list)
    tasks: int = 0
    """Of a step, as Dask has them."""
    seconds: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def settle(self) -> None:
        """Take medians."""
        if any(failure(outcome) for outcome in self.outcomes):
            return
        self.tasks = self.outcomes[0].result["planned"]["calls"]
        self.seconds = median(s for o in self.outcomes for s in o.result["step_seconds"][1:])
        steps = [parts_of(step) for o in self.outcomes for step in o.result.get("clock", [])[1:]]
        self.parts = {name: median(step[name] for step in steps) for name in PARTS if steps}


def parts_of(step: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one timed step, each counted once."""
    kernels, gather, task, get = (step.get(name, 0.0) for name in ("kernels", "gather", "task", "get"))
    return dict(
        zip(PARTS, (kernels, gather, task - kernels - gather, get - task, step["step"] - get), strict=True)
    )


def networks(toy: bool) -> list[Cut]:
    """Both."""
    tiny: dict[str, Any] = {"parallel": {"space": (4, 2, 2)}}
    if toy:
        return [Cut(unet(2, 16, 0), {"parallel": {"space": (4,)}})]
    return [Cut(unet(2, 32, 2), tiny), Cut(unet(16, 96), {})]


def measure(cut: Cut, args: argparse.Namespace) -> list[Found]:
    """All ways, in rounds."""
    found = [Found(cut.case.name, way) for way in WAYS]
    with folder(args) as place:
        cut.case.write(place / "model.onnx")
        write_data(cut.case, place / "data.zarr")
        words = {
            "model": str(place / "model.onnx"), "dataset": str(place / "data.zarr"), "steps": args.steps,
            "engine": args.engine, "memory": MEMORY, "shuffle": False, "commit_seconds": NO_COMMIT,
            "workdir": str(place / "model.run"), **cut.case.options(), **cut.options,
        }  # fmt: skip
        for _ in range(args.rounds):
            for one in found:
                # As many cuts by all of them: threads say how many cores the plan is for.
                told = {**words, "how": one.way, "threads": args.threads}
                one.outcomes.append(one_process("overhead_one.py", told, None, args.timeout))
                shutil.rmtree(place / "model.run", ignore_errors=True)  # it is not there if it has failed
    for one in found:
        one.settle()
    return found


def micro(seconds: float, tasks: int) -> str:
    """Microseconds a task, for a cell."""
    return f"{1e6 * seconds / tasks:.0f}"


def show(found: Sequence[Found]) -> None:
    """Both tables."""
    heads = ("network", "way", "tasks", "s/step", "tasks/s", "µs/task")
    rows = []
    for one in found:
        name = WAYS[one.way]
        if one.seconds is None:
            why = next(text for o in one.outcomes if (text := failure(o)))
            rows.append((one.network, name, "-", why, "-", "-"))
            continue
        rate = f"{one.tasks / one.seconds:.0f}"
        took = f"{one.seconds:.3f}"
        rows.append((one.network, name, f"{one.tasks}", took, rate, micro(one.seconds, one.tasks)))
    print(markdown(heads, rows), "\n")
    timed = [one for one in found if one.parts]
    cells = []
    for one in timed:
        rest = 100 * (1 - one.parts[PARTS[0]] / sum(one.parts.values()))
        cells.append((one.network, *(micro(one.parts[name], one.tasks) for name in PARTS), f"{rest:.1f}"))
    print("one thread, microseconds a task:\n")
    print(markdown(("network", *PARTS, "beside arithmetic %"), cells))


def main() -> None:
    """Parse, measure, tell. Exit code 1 if a process has failed."""
    args = settle(options(__doc__))
    measure_rates(args)
    found = [one for cut in networks(args.toy) for one in measure(cut, args)]
    show(found)
    write_json(args, found)
    if any(one.seconds is None for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
