"""From an nnU-Net raw folder of MRI volumes of different sizes to NIfTI labels: four commands.

    apt-get install mricron-data        # the volumes, from Debian (or pass --data FOLDER)
    pip install '.[mri,plot]'
    python examples/nnunet_folder.py

makes ``Dataset001_Brain`` and ``unet.onnx``, and then runs what a user would type:

    oocdl convert Dataset001_Brain brain.zarr
    oocdl fit unet.onnx brain.zarr --loss dice_ce --validation 0.25 --metrics dice --keep-best ..
    oocdl convert Dataset001_Brain test.zarr --split test
    oocdl predict brain.run test.zarr --argmax --nifti labels --which best

``ch2`` (Holmes et al. 1998: one person, scanned 27 times) is the one brain. Each case is another crop of it,
some are mirrored, and each has a contrast, a bias field and noise of its own. Labels are fluid, grey and
white matter: the brain mask ``ch2bet``, cut in three by intensity (Otsu 1979). So Dice is on volumes that
the network has not seen, of a brain that it has: what is shown is the way from folder to folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

import oocdl
from oocdl.presets.unets import write_unet3d

FOLDER = "/usr/share/mricron/templates"
FILES = ("ch2.nii.gz", "ch2bet.nii.gz")
CLASSES = {"background": 0, "fluid": 1, "grey": 2, "white": 3}

Array = npt.NDArray[Any]


def load(folder: Path, step: int) -> tuple[Array, Array, Array]:
    """The scan (0 to 1), its labels, and its affine, of every ``step``-th voxel."""
    if not all((folder / name).is_file() for name in FILES):
        raise SystemExit(
            f"{', '.join(FILES)} not found in {folder}: apt-get install mricron-data, or pass --data FOLDER"
        )
    scans: list[Any] = [nib.load(folder / name) for name in FILES]
    every = (slice(None, None, step),) * 3
    image, brain = (np.asarray(scan.dataobj, np.float32)[every] for scan in scans)
    image, inside = image / image.max(), brain > 0
    cuts = otsu(image[inside])
    labels = np.where(inside, 1 + np.digitize(image, cuts), 0).astype(np.uint8)
    return image, labels, scans[0].affine @ np.diag([step, step, step, 1])


def otsu(values: Array, bins: int = 64) -> tuple[float, float]:
    """The two thresholds that leave the least variance within three classes."""
    counts, edges = np.histogram(values, bins)
    middles = (edges[:-1] + edges[1:]) / 2
    number, total = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(counts * middles))

    def between(low: int, high: int) -> float:
        found = 0.0
        for start, stop in ((0, low), (low, high), (high, bins)):
            inside = number[stop] - number[start]
            found += (total[stop] - total[start]) ** 2 / inside if inside else 0.0
        return float(found)

    pairs = [(low, high) for low in range(1, bins - 1) for high in range(low + 1, bins)]
    low, high = max(pairs, key=lambda pair: between(*pair))
    return float(edges[low]), float(edges[high])


def case(image: Array, labels: Array, affine: Array, seed: int) -> tuple[Any, Any]:
    """Another crop and contrast of the brain, as two NIfTI volumes."""
    random = np.random.default_rng(seed)
    box = []
    for extent in image.shape:
        low, high = random.integers(0, max(extent // 8, 1), 2)
        box.append(slice(int(low), extent - int(high)))
    image, labels = image[tuple(box)], labels[tuple(box)]
    affine = affine @ np.block([[np.eye(3), np.array([[s.start] for s in box])], [np.zeros((1, 3)), 1]])
    if random.random() < 0.5:
        image, labels = image[::-1], labels[::-1]
        affine = affine @ np.diag([-1, 1, 1, 1])
        affine[:3, 3] -= affine[:3, 0] * (image.shape[0] - 1)
    image = image ** random.uniform(0.7, 1.4)
    for axis, extent in enumerate(image.shape):
        field = 1 + random.uniform(-0.2, 0.2) * np.linspace(-1, 1, extent)
        image = image * field.reshape([-1 if place == axis else 1 for place in range(3)])
    image = image * random.uniform(0.8, 1.2) + random.normal(0, 0.02, image.shape)
    return tuple(  # type: ignore[return-value]
        nib.Nifti1Image(volume, affine)  # type: ignore[no-untyped-call]
        for volume in (image.astype(np.float32), np.ascontiguousarray(labels))
    )


def write_folder(folder: Path, whole: tuple[Array, Array, Array], train: int, test: int) -> None:
    """An nnU-Net raw folder: ``imagesTr`` with ``labelsTr``, and ``imagesTs`` with ``labelsTs``."""
    for number in range(train + test):
        part = "Tr" if number < train else "Ts"
        image, labels = case(*whole, seed=number)
        for kind, volume, end in (("images", image, "_0000"), ("labels", labels, "")):
            place = folder / f"{kind}{part}"
            place.mkdir(parents=True, exist_ok=True)
            nib.save(volume, place / f"brain_{number:03}{end}.nii.gz")
    facts = {"channel_names": {"0": "T1"}, "labels": CLASSES, "numTraining": train, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(facts, indent=2))


def command(folder: Path, *words: object) -> None:
    """Run ``oocdl`` as in a shell."""
    print("$ oocdl", shlex.join(map(str, words)), flush=True)
    subprocess.run([sys.executable, "-m", "oocdl", *map(str, words)], cwd=folder, check=True)


def dice(truth: Array, found: Array) -> float:
    """Overlap of two masks: 1 is perfect."""
    both, either = np.count_nonzero(truth & found), np.count_nonzero(truth) + np.count_nonzero(found)
    return 2 * both / either if either else 1.0


def scores(folder: Path) -> list[dict[str, float]]:
    """Dice of the brain and of each class, for each volume that was not seen; places have to agree."""
    rows = []
    for path in sorted((folder / "labels").glob("*.nii.gz")):
        found: Any = nib.load(path)
        truth: Any = nib.load(folder / "Dataset001_Brain" / "labelsTs" / path.name)
        assert found.shape == truth.shape and np.allclose(found.affine, truth.affine, atol=1e-4), path
        a, b = np.asarray(truth.dataobj), np.asarray(found.dataobj)
        rows.append(
            {"brain": dice(a > 0, b > 0), **{n: dice(a == k, b == k) for n, k in CLASSES.items() if k}}
        )
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """Make the folder, run the commands, compare labels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path(FOLDER), help="folder with ch2 and ch2bet")
    parser.add_argument("--memory", default="2GiB", help="budget of each command")
    parser.add_argument("--step", type=int, default=1, help="keep every n-th voxel")
    parser.add_argument("--train", type=int, default=8, help="volumes to train and to validate on")
    parser.add_argument("--test", type=int, default=2, help="volumes to predict")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=3, help="how often the network halves a volume")
    parser.add_argument("--base", type=int, default=8, help="channels on top of the network")
    parser.add_argument("--workdir", type=Path, default=Path("nnunet-folder"))
    args = parser.parse_args(given)
    args.workdir.mkdir(parents=True, exist_ok=True)
    write_folder(args.workdir / "Dataset001_Brain", load(args.data, args.step), args.train, args.test)
    write_unet3d(args.workdir / "unet.onnx", classes=len(CLASSES), base=args.base, depth=args.depth)

    memory = ("--memory", args.memory)
    command(args.workdir, "convert", "Dataset001_Brain", "brain.zarr", *memory)
    command(
        args.workdir, "fit", "unet.onnx", "brain.zarr", "--loss", "dice_ce", "--lr", 0.01,
        "--epochs", args.epochs, "--validation", 0.25, "--metrics", "dice", "--keep-best",
        "--monitor", "val_dice", "--workdir", "brain.run", *memory,
    )  # fmt: skip
    command(args.workdir, "convert", "Dataset001_Brain", "test.zarr", "--split", "test", *memory)
    command(
        args.workdir, "predict", "brain.run", "test.zarr", "--argmax", "--nifti", "labels", "--which", "best",
        *memory,
    )  # fmt: skip
    for number, row in enumerate(scores(args.workdir)):
        print(f"volume {number}: Dice " + ", ".join(f"{name} {score:.3f}" for name, score in row.items()))
    run = oocdl.open(args.workdir / "brain.run")
    best = run.best
    assert best is not None
    print(f"best validation: step {best['step']}, Dice {best['val_dice']:.3f}; see labels/ and history.png")
    run.plot(args.workdir / "history.png")


if __name__ == "__main__":
    main()
