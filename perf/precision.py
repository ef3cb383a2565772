"""Losses in bfloat16 beside those of PyTorch's autocast, on a real brain; both beside float32.

The volume of ``examples/brain_mri.py``, every second voxel of it, its seven classes and a 3D U-Net. Four
trainings of the same weights: PyTorch and oocdl, in float32 and in bfloat16. How far PyTorch's two are
apart is what 16 bits do to a training; oocdl's should be no further from either.

    apt-get install mricron-data
    python perf/precision.py [--toy] [--steps 30] [--data FOLDER] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import zarr
from measure import folder, one_process, parser, report, result

from oocdl.host.limits import cores
from oocdl.presets.unets import write_unet3d

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from brain_mri import CLASSES, Brain, find, load

RATE = 1e-3
SIDES = ("PyTorch", "oocdl")
PRECISIONS = ("float32", "bfloat16")
PAIRS = (
    ("oocdl float32", "PyTorch float32"),
    ("PyTorch bfloat16", "PyTorch float32"),
    ("oocdl bfloat16", "PyTorch float32"),
    ("oocdl bfloat16", "PyTorch bfloat16"),
)
HEADS = ("losses of", "beside", "largest difference %", "mean %", "last loss", "beside", "s/step", "beside")


@dataclass(frozen=True)
class Found:
    """One training."""

    name: str
    losses: Sequence[float]
    seconds: float
    """Of a step, the median."""


def write(path: Path, brain: Brain) -> None:
    """One sample, by the names that all networks here have."""
    group = zarr.open_group(str(path), mode="w")
    with zarr.config.set({"array.write_empty_chunks": True}):
        group.create_array("inputs", data=brain.image[None, None])
        group.create_array("labels", data=brain.labels[None])


def off(one: Found, other: Found) -> list[float]:
    """Relative differences of the losses, step by step."""
    return [abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True)]


def main() -> None:
    """Train four times, compare. Exit code 1 if a training has failed."""
    made = parser(__doc__)
    made.add_argument("--data", help="folder with the volumes; default: where Debian has them")
    made.add_argument("--steps", type=int, help="default: 30 (in a toy 3)")
    made.add_argument("--base", type=int, help="channels on top; default: 16 (in a toy 8)")
    made.add_argument("--memory", default="4GiB", help="of oocdl")
    args = made.parse_args()
    steps, base = args.steps or (3 if args.toy else 30), args.base or (8 if args.toy else 16)
    every, depth = (4, 1) if args.toy else (2, 3)
    found: dict[str, Found] = {}
    with folder(args) as place:
        model, data = place / "unet.onnx", place / "brain.zarr"
        write(data, load(find(args.data), every, 2**depth))
        write_unet3d(model, classes=len(CLASSES), base=base, depth=depth)
        common = {"model": str(model), "dataset": str(data), "steps": steps, "lr": RATE, "threads": cores()}
        for precision in PRECISIONS:
            words = {**common, "precision": precision, "twin": ["UNet3d", [1, len(CLASSES), base, depth]]}
            ours = {**common, "precision": precision, "loss": "cross_entropy", "engine": "torch"}
            ours |= {"memory": args.memory, "workdir": str(place / precision)}
            ours |= {"inputs": {"image": "inputs"}, "targets": {"logits": "labels"}}
            for side, script, told in zip(SIDES, ("train_one.py", "one_run.py"), (words, ours), strict=True):
                outcome, name = one_process(script, told, None, args.timeout), f"{side} {precision}"
                made_of = result(outcome, f"{name}: ")
                found[name] = Found(name, made_of["losses"], median(made_of["seconds"][1:]))
    rows = []
    for one, other in PAIRS:
        far = off(found[one], found[other])
        each = [f"{100 * max(far):.3f}", f"{100 * fmean(far):.3f}"]
        last = [f"{found[name].losses[-1]:.4f}" for name in (one, other)]
        took = [f"{found[name].seconds:.2f}" for name in (one, other)]
        rows.append((one, other, *each, *last, *took))
    report(args, HEADS, rows, list(found.values()))


if __name__ == "__main__":
    main()
