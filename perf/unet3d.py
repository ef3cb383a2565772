"""Seconds a step of a 3D U-Net: oocdl at a budget, inside a memory cgroup, beside PyTorch in memory.

Every measurement is a process of its own, in turn: oocdl with each engine inside a cgroup of
``--limit``, PyTorch outside (with the allocator as it comes, and tuned), and once PyTorch inside,
which is killed where the network does not fit. The first step of a process is not counted.

    python perf/unet3d.py [--toy] [--size 128] [--base 16] [--memory 900MiB] [--limit 1200MiB]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import zarr
from cage import NoCage, Outcome, cage, watch
from table import markdown

from oocdl.config import parse_bytes
from oocdl.zoo import write_unet3d

TUNED = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
"""glibc keeps what is freed: PyTorch's memory is touched for the first time only once."""


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    how: str
    caged: bool
    env: Mapping[str, str]


VARIANTS = {
    "oocdl, torch": Variant("torch", True, {}),
    "oocdl, onnxruntime": Variant("onnxruntime", True, {}),
    "PyTorch": Variant("pytorch", False, {}),
    "PyTorch, tuned malloc": Variant("pytorch", False, TUNED),
    "PyTorch in the cgroup": Variant("pytorch", True, {}),
}


def write_case(folder: Path, size: int, base: int, depth: int, classes: int) -> None:
    """A model, and one volume: a noisy ball in shells, one label a shell."""
    write_unet3d(folder / "unet.onnx", base=base, depth=depth, classes=classes)
    group = zarr.open_group(str(folder / "data.zarr"), mode="w")
    group.attrs.update({"base": base, "depth": depth, "classes": classes})
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    radius = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
    labels = np.clip((radius * classes).astype(np.uint8), 0, classes - 1)
    noise = np.random.default_rng(0).normal(0, 0.3, radius.shape).astype(np.float32)
    slab = (max(size // 8, 1), size, size)
    with zarr.config.set({"array.write_empty_chunks": True}):
        group.create_array("image", data=(noise + labels)[None, None], chunks=(1, 1, *slab))
        group.create_array("labels", data=labels[None], chunks=(1, *slab))


def measure(variant: Variant, folder: Path, args: argparse.Namespace) -> Outcome:
    """One process."""
    script = Path(__file__).with_name("train_one.py")
    command = [sys.executable, str(script), variant.how, str(folder), "--steps", str(args.steps)]
    command += ["--memory", args.memory]
    limit = args.limit if variant.caged else None
    with cage(parse_bytes(limit)) if limit else nullcontext() as place:
        return watch(command, place, variant.env, args.timeout)


HEADS = ("", "s/step", "vs PyTorch", "peak MiB", "anonymous MiB", "spill GB/step", "last loss")


def line(name: str, outcomes: Sequence[Outcome], baseline: float | None) -> tuple[str, ...]:
    """One line of the table."""
    peaks = [
        f"{max(getattr(o, k) for o in outcomes) / 2**20:.0f}" for k in ("resident_bytes", "anonymous_bytes")
    ]
    good = [outcome.result for outcome in outcomes if outcome.result]
    if len(good) < len(outcomes):
        bad = next(outcome for outcome in outcomes if not outcome.result)
        why = "killed" if bad.oom_kills else f"failed ({bad.code})"
        return (name, f"{why}, {len(good)} of {len(outcomes)} runs done", "", *peaks, "", "")
    took = step_seconds(outcomes)
    spilled = [r + w for found in good if "spill_read" in found for r, w in
               zip(found["spill_read"][1:], found["spill_written"][1:], strict=True)]  # fmt: skip
    times = f"{took / baseline:.2f}" if baseline else ""
    moved = f"{median(spilled) / 1e9:.2f}" if spilled else ""
    return (name, f"{took:.2f}", times, *peaks, moved, f"{good[-1]['losses'][-1]:.5f}")


def step_seconds(outcomes: Sequence[Outcome]) -> float:
    """Median over all runs, the first step of each left out."""
    return float(median(second for outcome in outcomes for second in outcome.result["seconds"][1:]))


def check(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """What oocdl planned beside what it moved."""
    lines = []
    for name, found in outcomes.items():
        for result in [outcome.result for outcome in found if "planned" in outcome.result][:1]:
            planned = result["planned"]
            same = all(n == planned["unit_read"] for n in result["unit_read"])
            same &= all(n == planned["unit_written"] for n in result["unit_written"])
            lines.append(
                f"{name}: {planned['tasks']} tasks; planned {planned['unit_read'] / 1e9:.3f} GB read and "
                f"{planned['unit_written'] / 1e9:.3f} GB written a step, measured "
                + ("the same to the byte" if same else f"{result['unit_read']} and {result['unit_written']}")
                + f"; from the spill {result['spill_read'][-1] / 1e9:.3f} GB read, to it "
                f"{result['spill_written'][-1] / 1e9:.3f} GB written in the last step; "
                f"counted peak {result['counted_peak'] / 2**20:.0f} MiB"
            )
    return lines


def parse() -> argparse.Namespace:
    """The command line; ``--toy`` replaces the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="a tiny network without cgroup, for tests")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--base", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--memory", default="1150MiB", help="oocdl's budget")
    parser.add_argument("--limit", default="1200MiB", help="of the cgroup; '' for none")
    parser.add_argument("--steps", type=int, default=4, help="of each process, the first not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one process")
    numbers = ",".join(str(number) for number in range(len(VARIANTS)))
    meaning = "; ".join(f"{number} {name}" for number, name in enumerate(VARIANTS))
    parser.add_argument("--variants", default=numbers, help=f"numbers: {meaning}")
    parser.add_argument("--workdir", help="folder on a disk for data, runs and spill; default: the system's")
    parser.add_argument("--json", type=Path, help="also write everything here")
    args = parser.parse_args()
    if args.toy:
        args.size, args.base, args.depth, args.steps, args.rounds = 16, 2, 2, 2, 1
        args.memory, args.limit, args.variants = "2GiB", "", "0,1,2"
    return args


def main() -> None:
    """All rounds, then the table."""
    args = parse()
    names = [list(VARIANTS)[int(number)] for number in args.variants.split(",")]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    with TemporaryDirectory(dir=args.workdir) as folder:
        write_case(Path(folder), args.size, args.base, args.depth, args.classes)
        for number in range(args.rounds):
            for name in names:
                if number and name == "PyTorch in the cgroup":
                    continue  # once is enough
                try:
                    outcomes[name].append(measure(VARIANTS[name], Path(folder), args))
                except NoCage as error:
                    raise SystemExit(f"{error}, or pass --limit ''") from error
                found = outcomes[name][-1]
                if not found.result and not found.oom_kills:
                    print(f"{name}: {found.message}", file=sys.stderr)
    base = outcomes.get("PyTorch", [])
    baseline = step_seconds(base) if base and all(o.result for o in base) else None
    print(markdown(HEADS, [line(name, found, baseline) for name, found in outcomes.items()]))
    print(*check(outcomes), sep="\n")
    if args.json:
        data = {name: [asdict(outcome) for outcome in found] for name, found in outcomes.items()}
        args.json.write_text(json.dumps({"arguments": {**vars(args), "json": None}, "runs": data}, indent=1))


if __name__ == "__main__":
    main()
