"""Larger than memory, for real: what is planned, and what a run in a cgroup of exactly the budget takes.

    python perf/larger.py [volume] [cube --size 512] [params] [stream] [--toy] [--json FILE]

- ``volume``: one step of a U-Net on the whole ``ch2better`` of mricron-data, padded to 304x384x320,
  within 2 GiB (needs nibabel and ``apt-get install mricron-data``; else a made-up head of that size).
- ``cube``: one step on a cube of noise, within 4 GiB. If the disk has no room for it, that is told;
  ``--spill-dtype bfloat16`` halves what it needs.
- ``params``: a perceptron of 1 G parameters with Adam, 12 GB of weights and state, within 1 GiB.
- ``stream``: 200 steps on a dataset of 100 GB whose chunks are missing, and read as zeros.

Needs root. Disk in use is that of the whole file system: nobody else should write to it meanwhile.
Exit code 1 if a case is refused, fails, or takes more memory than planned.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from cage import Outcome
from cases import Case, mlp, unet, write_data
from measure import (
    failure,
    folder,
    gb,
    later,
    limit_of,
    markdown,
    measure_rates,
    mib,
    one_run,
    parser,
    write_json,
)

from oocdl.config import parse_bytes

Array = npt.NDArray[Any]

SCAN = Path("/usr/share/mricron/templates/ch2better.nii.gz")
HEAD = (301, 370, 316)
"""Voxels of that scan."""
MULTIPLE = 16
PADDED = (304, 384, 320)
LEVELS = (0.1, 0.4, 0.7)
"""Labels are made of the scan itself: below the first, up to the second, .."""
STREAM_BYTES = 100e9


@dataclass(frozen=True)
class Large:
    """A case with its budget."""

    case: Case
    memory: str
    steps: int
    write: Callable[[Case, Path], Path]
    """Writes the dataset."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``fit``, beside those of the case."""


@dataclass(frozen=True)
class Found:
    """What became of it."""

    name: str
    budget_bytes: int
    planned: dict[str, Any]
    outcome: Outcome | None
    why: str
    """Empty if all is well."""


def load_scan() -> Array:
    """The scan between 0 and 1, or a made-up head of that size."""
    if SCAN.is_file() and importlib.util.find_spec("nibabel"):
        import nibabel

        scan: Array = np.asarray(nibabel.load(SCAN).dataobj, np.float32)  # type: ignore[attr-defined]
        scan /= scan.max()
        return scan
    print(f"{SCAN} or nibabel is missing: a made-up head instead", file=sys.stderr)
    x, y, z = (np.linspace(-1.2, 1.2, extent, dtype=np.float32) for extent in HEAD)
    radius = np.sqrt(x[:, None, None] ** 2 + y[:, None] ** 2 + z**2)
    head: Array = np.clip(1 - radius, 0, 1)
    return head


def write_scan(case: Case, path: Path) -> Path:
    """The scan in the middle of the case's volume, in slabs along the first axis."""
    scan, shape = load_scan(), case.inputs[0][2:]
    missing = [extent - have for extent, have in zip(shape, scan.shape, strict=True)]
    image = np.pad(scan, [(gap // 2, gap - gap // 2) for gap in missing])
    labels = np.digitize(image, LEVELS).astype(np.uint8)
    group = zarr.open_group(str(path), mode="w")
    # By default Zarr leaves out chunks that are all zero, which oocdl takes for lost ones.
    with zarr.config.set({"array.write_empty_chunks": True}):
        group.create_array("inputs", data=image[None, None], chunks=(1, 1, MULTIPLE, *shape[1:]))
        group.create_array("labels", data=labels[None], chunks=(1, MULTIPLE, *shape[1:]))
    return path


def write_shapes(case: Case, path: Path) -> Path:
    """A dataset without any chunk."""
    return write_data(case, path, empty=True)


def streamed(base: int, size: int, nbytes: float) -> Case:
    """A U-Net with as many volumes as ``nbytes`` of float32 and int64 labels are."""
    return unet(base, size, 2, samples=int(nbytes / (size**3 * (4 + 8))))


def cases(args: argparse.Namespace) -> dict[str, Large]:
    """All of them, by name."""
    one_by_one = {"batch_size": 1, "allow_missing_chunks": True}
    if args.toy:
        return {
            "volume": Large(unet(2, 16, 2), "2GiB", 1, write_data),
            "cube": Large(unet(2, args.size, 2), "2GiB", 1, write_data),
            "params": Large(mlp(2, 256, 4), "2GiB", 2, write_data),
            "stream": Large(streamed(2, 16, 1e9), "2GiB", 3, write_shapes, one_by_one),
        }
    return {
        "volume": Large(unet(16, PADDED), "2GiB", 1, write_scan),
        "cube": Large(unet(16, args.size), "4GiB", 1, write_data),
        "params": Large(mlp(16, 8192, 64), "1GiB", 3, write_data),
        "stream": Large(streamed(4, 64, STREAM_BYTES), "1GiB", 200, write_shapes, one_by_one),
    }


def measure(name: str, large: Large, args: argparse.Namespace) -> Found:
    """Plan, tell, train."""
    budget = parse_bytes(args.memory or large.memory)
    with folder(args) as place:
        model, data = large.case.write(place / "model.onnx"), place / "data.zarr"
        large.write(large.case, data)
        options = {"engine": args.engine, "optimizer": "adam", **large.case.options(), **large.options}
        options |= {"spill_dtype": args.spill_dtype} if args.spill_dtype else {}
        planned = one_run(model, data, None, args.timeout, plan=True, memory=budget, **options)
        why, facts = failure(planned), planned.result.get("planned", {})
        if why:
            print(f"{name}: not planned: {why}\n", flush=True)
            return Found(name, budget, {}, None, why)
        print(markdown(PLAN_HEADS, [plan_cells(name, large.case, budget, facts)]) + "\n", flush=True)
        if args.plan:
            return Found(name, budget, facts, None, "")
        run = str(place / "model.run")
        steps = args.steps or large.steps
        outcome = one_run(
            model, data, limit_of(args, budget), args.timeout,
            memory=budget, steps=steps, workdir=run, **options,
        )  # fmt: skip
        shutil.rmtree(run, ignore_errors=True)  # it is not there if the run was refused
    found = Found(name, budget, facts, outcome, judge(outcome, facts, budget))
    print(markdown(RUN_HEADS, [run_cells(found)]) + "\n", flush=True)
    return found


def judge(outcome: Outcome, planned: Mapping[str, Any], budget_bytes: int) -> str:
    """What is wrong; empty if nothing is."""
    if why := failure(outcome):
        return why
    if outcome.anonymous_bytes > outcome.result["planned"]["peak"]:
        return "measured above predicted"
    return "predicted above budget" if planned["peak"] > budget_bytes else ""


PLAN_HEADS = (
    "plan", "network", "budget MiB", "peak MiB", "disk GB", "tasks", "s/step", "read GB/step",
    "written GB/step",
)  # fmt: skip
RUN_HEADS = (
    "run", "steps", "s/step", "first step s", "peak anonymous MiB", "OOM kills", "disk GB", "read GB/step",
    "written GB/step", "anonymous MiB after first, last step, most", "loss first, last", "verdict",
)  # fmt: skip


def plan_cells(name: str, case: Case, budget_bytes: int, planned: Mapping[str, Any]) -> tuple[str, ...]:
    """The line of a plan."""
    return (
        name, case.name, mib(budget_bytes), mib(planned["peak"]), gb(planned["disk"]), f"{planned['tasks']}",
        f"{planned['step_seconds']:.1f}", gb(planned["spill_read"]), gb(planned["spill_written"]),
    )  # fmt: skip


def run_cells(found: Found) -> tuple[str, ...]:
    """The line of a run; medians of all steps but the first, if there are more."""
    outcome = found.outcome
    assert outcome is not None
    memory = (mib(outcome.anonymous_bytes), f"{outcome.oom_kills}", gb(outcome.disk_bytes))
    result = outcome.result
    if "step_seconds" not in result:
        return (found.name, "-", "-", "-", *memory, "-", "-", "-", "-", f"BROKEN: {found.why}")
    held, losses, seconds = result["anonymous"], result["losses"], result["step_seconds"]
    return (
        found.name, f"{len(seconds)}", f"{later(outcome, 'step_seconds'):.2f}", f"{seconds[0]:.2f}", *memory,
        gb(later(outcome, "spill_read")), gb(later(outcome, "spill_written")),
        f"{mib(held[0])}, {mib(held[-1])}, {mib(max(held))}", f"{losses[0]:.4f}, {losses[-1]:.4f}",
        f"BROKEN: {found.why}" if found.why else "kept",
    )  # fmt: skip


def main() -> None:
    """The cases that are named; all by default."""
    names = ("volume", "cube", "params", "stream")
    made = parser(__doc__)
    made.add_argument("cases", nargs="*", metavar="case", help=f"some of {', '.join(names)}; default: all")
    made.add_argument("--size", type=int, help="of the cube; default: 512 (in a toy 16)")
    made.add_argument("--memory", help="budget, instead of the case's own")
    made.add_argument("--steps", type=int, help="instead of the case's own")
    made.add_argument("--spill-dtype", help="bfloat16: activations between layers in 16 bits")
    made.add_argument("--plan", action="store_true", help="plan only")
    args = made.parse_args()
    args.size = args.size or (16 if args.toy else 512)
    if unknown := [name for name in args.cases if name not in names]:
        made.error(f"{', '.join(unknown)} is not one of {', '.join(names)}")
    measure_rates(args)
    found: list[Found] = []
    for name, large in cases(args).items():
        if not args.cases or name in args.cases:
            found.append(measure(name, large, args))
            write_json(args, found)
    if any(one.why for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
