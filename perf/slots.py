"""How much faster a step can be on more slots, by its plan alone: nothing runs.

Slots are threads of all processes, 16 a process. Each network is cut for 1, 2, 4, ... slots, and its units
are put on them as soon as they can be, by nominal rates, as if memory and network cost nothing
(``tests/kit/placed``): a bound for any placement. Speed-up is that over the plan
for one slot, so what finer pieces compute twice counts.

    python perf/slots.py [--toy] [--networks unet64,unet256,resnet50,gpt] [--slots 1,2,4,8] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import zarr
from cases import Case, gpt, resnet, unet
from measure import report, short_parser

from oocdl.planning.compiler import Draft
from oocdl.planning.machine import Machine

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit import plans
from tests.kit.placed import ideal_seconds

THREADS = 16
"""Of a process."""
CASES = {
    "unet64": unet(8, 64),
    "unet256": unet(16, 256),
    "resnet50": resnet((3, 4, 6, 3), 64, 64, 224, 1000),
    "gpt": gpt(12, 512, 8, 8, 512, 8192),
}
TOYS = {"unet8": unet(8, 16, 1), "gpt": gpt(1, 16, 2, 2, 8, 16)}


@dataclass(frozen=True)
class Row:
    """One plan."""

    network: str
    slots: int
    units: int
    ideal_seconds: float
    speedup: float
    planning_seconds: float


def drafted(case: Case, place: Path) -> Draft:
    """The pass of a case, which can be cut in many ways; its dataset has shapes and no chunks."""
    group = zarr.open_group(str(place / "data.zarr"), mode="w")
    shape, dtype = case.inputs
    group.create_array("inputs", shape=shape, dtype=dtype, chunks=(1, *shape[1:]))
    group.create_array("labels", shape=case.labels, dtype="int64", chunks=(1, *case.labels[1:]))
    loss = "dice_ce" if len(case.labels) > 3 else "cross_entropy"
    model = case.write(place / "model.onnx")
    return plans.drafted(model, place / "data.zarr", **case.options(), loss=loss, optimizer="adamw")


def rows_of(name: str, case: Case, all_slots: list[int]) -> list[Row]:
    """One network on each number of slots."""
    found: list[Row] = []
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # rates are nominal, whatever this machine has measured
        draft = drafted(case, Path(folder))
        for slots in all_slots:
            threads = min(slots, THREADS)
            workers = slots // threads if slots > threads else 0
            machine = Machine("torch", threads, 256 << 20, 32 << 30, workers=workers)
            begun = time.process_time()
            compiled = draft.cut(machine.limits(draft.request.settings, min(machine.unit_bytes, 1 << 30)))
            taken = time.process_time() - begun
            seconds = ideal_seconds(compiled.graph, slots)
            speedup = found[0].ideal_seconds / seconds if found else 1.0
            found.append(Row(name, slots, compiled.plan.tasks, seconds, speedup, taken))
            print(found[-1], flush=True)
    return found


def main() -> None:
    """All networks; one table."""
    made = short_parser(__doc__)
    made.add_argument("--networks", help="default: all")
    made.add_argument("--slots", help="the first is what the others are compared with")
    args = made.parse_args()
    cases = TOYS if args.toy else CASES
    slots = [int(text) for text in (args.slots or "1,2,4,8,16,32,64,128,256,512,1024").split(",")]
    rows = [
        row
        for name in (args.networks or ",".join(cases)).split(",")
        for row in rows_of(name, cases[name], slots)
    ]
    cells = [
        [row.network, str(row.slots), str(row.units), f"{row.ideal_seconds:.4f}", f"{row.speedup:.1f}",
         f"{row.planning_seconds:.1f}"]
        for row in rows
    ]  # fmt: skip
    report(args, ["network", "slots", "units", "ideal s", "speed-up", "planning s"], cells, rows)


if __name__ == "__main__":
    main()
