"""Segment a whole human brain at once: a 3D U-Net on a T1 MRI that is never cut into patches.

    apt-get install mricron-data        # the volumes, from Debian (or pass --data FOLDER)
    pip install 'oocdl[mri,torch]'
    python examples/brain_mri.py

With ``--network resenc`` the network is nnU-Net's residual encoder U-Net, as its library makes it
(``pip install --no-deps dynamic-network-architectures``). Its 30 steps within 1500 MiB take the loss from 2.9
to 1.6, and find the brain (Dice 0.82) and the cerebellum (0.63), none of the small structures yet.

``ch2`` (Holmes et al. 1998: one person, scanned 27 times) is the input, 181 x 217 x 181 voxels of
1 mm. The labels are its brain mask, and structures of the AAL atlas (Tzourio-Mazoyer et al. 2002),
which was drawn on this very volume. One volume is not a study: training and Dice are on the same
brain. What is shown is that the whole volume trains at once, in a fraction of the memory.

Writes into --workdir: ``brain.zarr``, the network, the run, ``brain.png`` and ``prediction.nii.gz``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import zarr
from PIL import Image, ImageDraw, ImageFont

import oocdl
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.presets.unets import write_unet3d

FOLDERS = ("/usr/share/mricron/templates", "/usr/share/mricron")
FILES = ("ch2.nii.gz", "ch2bet.nii.gz", "aal.nii.gz", "aal.nii.txt")
STRUCTURES = {
    "thalamus": "Thalamus",
    "caudate": "Caudate",
    "putamen": "Putamen|Pallidum",
    "hippocampus": "Hippocampus|Amygdala",
    "cerebellum": "Cerebelum|Vermis",
}
"""Label -> the AAL names that it takes together, left and right. Spelt as the atlas does."""
CLASSES = ("background", "brain", *STRUCTURES)
COLOURS = (
    (0, 0, 0),
    (110, 110, 110),
    (213, 94, 0),
    (0, 158, 115),
    (86, 180, 233),
    (240, 228, 66),
    (204, 121, 167),
)
"""Of the palette of Okabe and Ito, which colour-blind people can tell apart."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Brain:
    """A volume with its labels, padded so that the U-Net can halve it."""

    image: Array
    labels: Array
    affine: Array
    crop: tuple[slice, ...]
    """Where the scan is in the padded volume."""


def find(folder: str | None) -> Path:
    """The folder with the volumes; ends the program with a hint if there is none."""
    for place in [folder] if folder else FOLDERS:
        if all((Path(place) / name).is_file() for name in FILES):
            return Path(place)
    where = folder or FOLDERS[0]
    raise SystemExit(
        f"{', '.join(FILES)} not found in {where}: apt-get install mricron-data, or pass --data FOLDER"
    )


def atlas_classes(table: Path) -> Array:
    """AAL number -> class number, from the atlas's table of names."""
    found = np.zeros(256, np.uint8)
    for row in table.read_text().splitlines():
        words = row.split()
        if len(words) < 2:
            continue
        for number, pattern in enumerate(STRUCTURES.values(), start=2):
            if re.match(rf"({pattern})_", words[1]):
                found[int(words[0])] = number
    return found


def load(folder: Path, step: int, multiple: int) -> Brain:
    """Read the volumes, keep every ``step``-th voxel, pad to a multiple of ``multiple``."""
    scans: list[Any] = [nib.load(folder / name) for name in FILES[:3]]
    every = (slice(None, None, step),) * 3
    volumes = [np.asarray(scan.dataobj)[every] for scan in scans]
    image, brain, atlas = (volume.reshape(volume.shape[:3]) for volume in volumes)
    if not image.shape == brain.shape == atlas.shape:
        raise SystemExit(
            f"the volumes of {folder} differ in shape: {image.shape}, {brain.shape}, {atlas.shape}"
        )
    labels = np.maximum(brain > 0, atlas_classes(folder / FILES[3])[atlas.astype(np.uint8)])
    image = (image / image.max()).astype(np.float32)
    padding, crop = [], []
    for extent in image.shape:
        missing = -extent % multiple
        padding.append((missing // 2, missing - missing // 2))
        crop.append(slice(missing // 2, missing // 2 + extent))
    affine = scans[0].affine @ np.diag([step, step, step, 1])
    return Brain(np.pad(image, padding), np.pad(labels.astype(np.uint8), padding), affine, tuple(crop))


def write_dataset(path: Path, brain: Brain) -> None:
    """One sample, in slabs along the first axis."""
    group = zarr.open_group(str(path), mode="w")
    slab = (16, *brain.image.shape[1:])
    # By default Zarr leaves out chunks that are all zero, which oocdl takes for lost ones.
    with zarr.config.set({"array.write_empty_chunks": True}):
        group.create_array("image", data=brain.image[None, None], chunks=(1, 1, *slab))
        group.create_array("labels", data=brain.labels[None], chunks=(1, *slab))


def write_res_enc(path: Path, base: int, depth: int) -> None:
    """nnU-Net's residual encoder U-Net, which halves the volume ``depth`` times."""
    try:
        import torch
        from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
    except ImportError as error:
        raise SystemExit(
            f"--network resenc: {error}; pip install 'oocdl[torch]', "
            "then pip install --no-deps dynamic-network-architectures"
        ) from error
    torch.manual_seed(0)
    widths = [base * 2**stage for stage in range(depth + 1)]
    network = ResidualEncoderUNet(
        input_channels=1, n_stages=len(widths), features_per_stage=widths,
        conv_op=torch.nn.Conv3d, kernel_sizes=3, strides=[1, *[2] * depth], num_classes=len(CLASSES),
        n_blocks_per_stage=[1, 3, 4, 6, 6][: depth + 1], n_conv_per_stage_decoder=1, conv_bias=True,
        norm_op=torch.nn.InstanceNorm3d, norm_op_kwargs={"affine": True}, nonlin=torch.nn.LeakyReLU,
    )  # fmt: skip
    example = torch.zeros(1, 1, *[2 ** (depth + 1)] * 3)
    oocdl.from_torch(network, example, path, dynamic=(0, 2, 3, 4), outputs=["logits"])


def balance(labels: Array) -> tuple[float, ...]:
    """Class weights: the rarer a class, the more a voxel of it counts, by the square root."""
    counts = np.bincount(labels.ravel(), minlength=len(CLASSES))
    weights = (counts.sum() / np.maximum(counts, 1)) ** 0.5
    return tuple(float(weight) for weight in weights / weights.mean())


def classify(logits: Any) -> Array:
    """The likeliest class of each voxel, a slab at a time."""
    _, _, depth, *plane = logits.shape
    found = np.empty((depth, *plane), np.uint8)
    for start in range(0, depth, 16):
        found[start : start + 16] = logits[0, :, start : start + 16].argmax(axis=0)
    return found


def dice(truth: Array, found: Array) -> list[float]:
    """Overlap of each class: 1 is perfect."""
    scores = []
    for number in range(len(CLASSES)):
        both = np.count_nonzero((truth == number) & (found == number))
        either = np.count_nonzero(truth == number) + np.count_nonzero(found == number)
        scores.append(2 * both / either if either else 1.0)
    return scores


def draw(path: Path, brain: Brain, found: Array, scores: Sequence[float]) -> None:
    """Three slices through the thalamus: input, truth, prediction; and the Dice of classes below."""
    colours = np.array(COLOURS, np.uint8)
    grey = (brain.image * 255).astype(np.uint8)[..., None].repeat(3, axis=-1)
    pictures = (grey, colours[brain.labels], colours[found])
    middle = np.argwhere(brain.labels == 2).mean(axis=0).astype(int)
    side = max(brain.image.shape)
    rows = []
    for axis in (2, 1, 0):
        cells = []
        for picture in pictures:
            cut = np.rot90(np.take(picture, middle[axis], axis=axis))
            cell = np.zeros((side, side, 3), np.uint8)
            top, left = ((side - extent) // 2 for extent in cut.shape[:2])
            cell[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
            cells.append(cell)
        rows.append(np.concatenate(cells, axis=1))
    grow = max(1, 240 // side)
    slices = Image.fromarray(np.concatenate(rows).repeat(grow, axis=0).repeat(grow, axis=1))
    framed(slices, scores).save(path)


def framed(slices: Image.Image, scores: Sequence[float]) -> Image.Image:
    """Put titles above three columns of slices, and what the colours mean, with the Dice of each, below."""
    head, line, across = 32, 28, 4
    lines = -(-len(CLASSES) // across)
    sheet = Image.new("RGB", (slices.width, head + slices.height + lines * line + 12), "white")
    sheet.paste(slices, (0, head))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=16)
    for column, title in enumerate(("input", "truth", "prediction")):
        place = ((2 * column + 1) * slices.width // 6, head // 2)
        pen.text(place, title, fill="black", font=font, anchor="mm")
    entries = [
        (None, "Dice:"),
        *((COLOURS[n], f"{CLASSES[n]} {scores[n]:.2f}") for n in range(1, len(CLASSES))),
    ]
    for number, (colour, text) in enumerate(entries):
        left = 8 + number % across * slices.width // across
        top = head + slices.height + 10 + number // across * line
        if colour is not None:
            pen.rectangle((left, top, left + 16, top + 16), fill=colour)
            left += 22
        pen.text((left, top + 8), text, fill="black", font=font, anchor="lm")
    return sheet


def report(losses: Sequence[float], scores: Sequence[float]) -> None:
    """Losses, about ten of them, and the Dice of each class."""
    some = sorted({*range(0, len(losses), max(1, len(losses) // 10)), len(losses) - 1})
    print("loss  " + "  ".join(f"{step + 1}: {losses[step]:.3f}" for step in some))
    print("Dice  " + "  ".join(f"{name}: {score:.3f}" for name, score in zip(CLASSES, scores, strict=True)))


def main() -> None:
    """Load, plan, train, look."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder with ch2.nii.gz, ch2bet.nii.gz, aal.nii.gz and aal.nii.txt")
    parser.add_argument("--memory", default="1500MiB", help="budget of the process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: every 4th voxel")
    parser.add_argument("--network", choices=("unet", "resenc"), default="unet")
    parser.add_argument("--base", type=int, default=8, help="channels on top of the network")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default="float32", help="bfloat16: products of 16 bits")
    parser.add_argument("--workdir", type=Path, default=Path("brain-mri"))
    args = parser.parse_args()
    depth, step = (4, 1) if args.size == "full" else (2, 4)
    brain = load(find(args.data), step, 2**depth)
    args.workdir.mkdir(parents=True, exist_ok=True)
    dataset, model = args.workdir / "brain.zarr", args.workdir / f"{args.network}.onnx"
    write_dataset(dataset, brain)
    if args.network == "resenc":
        write_res_enc(model, args.base, depth)
    else:
        write_unet3d(model, classes=len(CLASSES), base=args.base, depth=depth)
    options: dict[str, Any] = {
        "loss": DiceCE(cross_entropy=CrossEntropy(class_weights=balance(brain.labels))),
        "optimizer": oocdl.optim.Adam(lr=args.lr),
        "steps": args.steps,
        "memory": args.memory,
        "engine": args.engine,
        "precision": args.precision,
    }
    print(oocdl.plan(model, dataset, **options))
    run = oocdl.fit(model, dataset, workdir=args.workdir / f"{args.network}.run", **options)
    group = run.predict(dataset, args.workdir / "logits.zarr", memory=args.memory)
    found = classify(group["logits"])
    scores = dice(brain.labels, found)
    report([row["loss"] for row in run.history], scores)
    draw(args.workdir / "brain.png", brain, found, scores)
    volume: Any = nib.Nifti1Image(found[brain.crop], brain.affine)  # type: ignore[no-untyped-call]
    nib.save(volume, args.workdir / "prediction.nii.gz")
    print(f"see {args.workdir / 'brain.png'} and {args.workdir / 'prediction.nii.gz'}")


if __name__ == "__main__":
    main()
