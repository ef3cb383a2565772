"""How was this brain cut? ResNet-50 tells sagittal, coronal and axial slices of real volumes apart.

    apt-get install mricron-data        # the volumes, from Debian (or pass --data FOLDER)
    pip install 'oocdl[mri,torch]' && pip install --no-deps torchvision
    python examples/slices.py

torchvision's ResNet-50 (He et al. 2016, arXiv:1512.03385) as it is, from random weights: its batch norms
count their statistics, and predict with them. It is trained on every second slice of a human brain
(``ch2bet``) and a monkey's (``inia19-t1-brain``), and asked about the others: after 72 steps of 16 slices,
three minutes on two cores within 1200 MiB, it tells 85 % of them. Writes into --workdir: ``slices.zarr``,
``unseen.zarr``, the run ``slices.run`` and ``guess.zarr``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import torch
import zarr
from torch.nn import functional
from torchvision.models import resnet50

import oocdl
from oocdl.errors import ResourceError
from oocdl.optim import Adam

FOLDER = Path("/usr/share/mricron/templates")
FILES = ("ch2bet.nii.gz", "inia19-t1-brain.nii.gz")
CUTS = ("sagittal", "coronal", "axial")
Array = npt.NDArray[Any]


def slices(folder: Path, size: int) -> tuple[Array, Array]:
    """Images [slices, 3, size, size] from the middle half of each axis, and how each was cut."""
    images, labels = [], []
    for name in FILES:
        if not (folder / name).is_file():
            raise ResourceError(
                f"{folder / name} is not there: apt-get install mricron-data, or pass --data FOLDER"
            )
        volume = np.squeeze(np.asarray(nib.load(folder / name).dataobj, "f4"))
        for axis in range(3):
            extent = volume.shape[axis]
            for place in range(extent // 4, 3 * extent // 4, 2):
                image = torch.from_numpy(np.take(volume, place, axis) / volume.max())[None, None]
                shown = functional.interpolate(image, (size, size), mode="bilinear", antialias=True)
                images.append(shown[0].expand(3, -1, -1).numpy())
                labels.append(axis)
    return np.stack(images), np.array(labels)


def write_dataset(path: Path, images: Array, labels: Array) -> None:
    """One chunk for each image."""
    group = zarr.open_group(path, mode="w")
    group.create_array("image", data=images, chunks=(1, *images.shape[1:]))
    group.create_array("cut", data=labels.astype("i1"), chunks=(len(labels),))


def main() -> None:
    """Cut, train, guess."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=FOLDER, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--size", type=int, default=112, help="edge of an image")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--memory", default="1200MiB", help="budget of the process")
    parser.add_argument("--workdir", type=Path, default=Path("slices"))
    args = parser.parse_args()
    folder: Path = args.workdir
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = slices(args.data, args.size)
    for name, first in (("slices", 0), ("unseen", 1)):
        if not (
            folder / f"{name}.zarr"
        ).exists():  # a run goes on only with the very dataset that it began with
            write_dataset(folder / f"{name}.zarr", images[first::2], labels[first::2])
    torch.manual_seed(0)
    run = oocdl.fit(
        resnet50(num_classes=len(CUTS)), folder / "slices.zarr", loss="cross_entropy",
        optimizer=Adam(lr=3e-4), epochs=args.epochs, batch_size=16, memory=args.memory,
        workdir=folder / "slices.run",
    )  # fmt: skip
    losses = [row["loss"] for row in run.history]
    epoch = len(losses) // args.epochs
    first, last = np.mean(losses[:epoch]), np.mean(losses[-epoch:])
    print(f"loss {first:.2f} -> {last:.3f}, means of the first epoch and of the last; {len(losses)} steps")
    made = run.predict(folder / "unseen.zarr", folder / "guess.zarr", memory=args.memory)
    guessed = np.asarray(made["output"]).argmax(1)
    wanted = labels[1::2]
    for number, name in enumerate(CUTS):
        mine = wanted == number
        print(f"  {name}: {np.count_nonzero(guessed[mine] == number)} of {np.count_nonzero(mine)} told")
    print(f"{np.mean(guessed == wanted):.1%} of slices never seen are told apart")


if __name__ == "__main__":
    main()
