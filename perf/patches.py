"""Whole volumes against patches: one network, the same seconds, Dice on whole volumes that were held out.

The brains of ``examples/nnunet_folder.py``, of different sizes: eight to train on, two to test. Each way
trains from the same weights for so many seconds, counted from the first step;
``oocdl.transforms.RandSpatialCrop`` with a foreground of 0.33 makes the patches. What is read and planned
before the first step does not count.

    apt-get install mricron-data
    python perf/patches.py [--toy] [--seconds 600] [--seeds 0,1,2] [--memory 2GiB] [--roi 64] [--json FILE]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import folder, parser, report

import oocdl
from oocdl.events import Event, RunStarted, StepDone
from oocdl.presets.unets import write_unet3d
from oocdl.transforms import RandSpatialCrop

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from nnunet_folder import CLASSES, FOLDER, load, write_folder

FOREGROUND = [name for name, number in CLASSES.items() if number]
HEADS = ("trained on", "seed", "steps", "seconds", "s/step", "Dice", *FOREGROUND)


@dataclass(frozen=True)
class Row:
    """One training."""

    way: str
    seed: int
    steps: int
    seconds: float
    dice: float
    """The mean of the classes."""
    classes: dict[str, float]
    """Of each class but the background, by ``Run.evaluate``."""


@dataclass
class Clock:
    """Ends a run after so many seconds of steps."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0

    def __call__(self, event: Event) -> None:
        """Begin with the run; stop it after the step that is over the time."""
        if isinstance(event, RunStarted):
            self.began = time.monotonic()
        if isinstance(event, StepDone):
            self.spent = time.monotonic() - self.began
            if self.spent > self.seconds:
                raise oocdl.Stop(f"{self.seconds:g} seconds are over")


def trained(place: Path, way: str, augment: Any, seed: int, seconds: float, options: dict[str, Any]) -> Row:
    """Train for so many seconds, and look at the volumes that were held out."""
    clock = Clock(seconds)
    run = oocdl.fit(
        place / "unet.onnx", place / "brain.zarr", loss="dice_ce", lr=0.01, steps=10**6, seed=seed,
        normalize="zscore", augment=augment, callbacks=[clock], workdir=place / f"{way}{seed}", **options,
    )  # fmt: skip
    found = run.evaluate(place / "test.zarr", metrics=["dice"])
    classes = {name: found[f"dice/{CLASSES[name]}"] for name in FOREGROUND}
    return Row(way, seed, run.steps, clock.spent, fmean(classes.values()), classes)


def main() -> None:
    """Train each way with each seed, one after the other; print a row each."""
    made = parser(__doc__)
    made.add_argument("--data", type=Path, default=Path(FOLDER), help="folder with ch2 and ch2bet")
    made.add_argument("--seconds", type=float, help="of each training; default: 600 (in a toy 1)")
    made.add_argument("--seeds", default="0,1,2")
    made.add_argument("--memory", default="2GiB", help="budget of each training")
    made.add_argument("--step", type=int, help="keep every n-th voxel; default: 1 (in a toy 4)")
    made.add_argument("--roi", type=int, help="extent of the patches; default: 64 (in a toy 8)")
    args = made.parse_args()
    roi, seconds = args.roi or (8 if args.toy else 64), args.seconds or (1 if args.toy else 600)
    ways = {"whole volumes": None, f"patches of {roi}³": [RandSpatialCrop(roi, foreground=0.33)]}
    options, rows = {"memory": args.memory, "engine": args.engine, "progress": False}, list[Row]()
    with folder(args) as place:
        brains = load(args.data, args.step or (4 if args.toy else 1))
        write_folder(place / "Dataset001_Brain", brains, *((2, 1) if args.toy else (8, 2)))
        base, depth = (4, 1) if args.toy else (8, 3)
        write_unet3d(place / "unet.onnx", classes=len(CLASSES), base=base, depth=depth)
        for name, split in (("brain.zarr", "train"), ("test.zarr", "test")):
            oocdl.data.convert(place / "Dataset001_Brain", place / name, split=split, progress=False)
        for seed in map(int, args.seeds.split(",")):
            rows += [trained(place, way, augment, seed, seconds, options) for way, augment in ways.items()]
            print(f"seed {seed}: " + ", ".join(f"{row.way} {row.dice:.3f}" for row in rows[-2:]), flush=True)
    report(args, HEADS, [cells(row) for row in rows], rows)


def cells(row: Row) -> list[str]:
    """The texts of a row."""
    times = [str(row.seed), str(row.steps), f"{row.seconds:.0f}", f"{row.seconds / row.steps:.3f}"]
    return [row.way, *times, *(f"{dice:.3f}" for dice in (row.dice, *row.classes.values()))]


if __name__ == "__main__":
    main()
