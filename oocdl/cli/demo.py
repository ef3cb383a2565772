"""The demo: makes volumes of nested ellipsoids in noise, and trains a 3D U-Net on them, cut in space."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

from oocdl.config import parse_bytes
from oocdl.errors import InputError
from oocdl.ops.optimizers import Adam
from oocdl.ops.schedules import Polynomial
from oocdl.presets.unets import write_unet3d
from oocdl.report.progress import Progress
from oocdl.training.trainer import fit, plan

Array = npt.NDArray[Any]
Ellipsoid = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Centre, and the matrix that maps what lies inside to the unit ball."""

CLASSES = ("background", "body", "shell", "core")
BRIGHTNESS = np.array([0.0, 1.0, 0.5, 1.5], np.float32)
NOISE = 0.25
"""Standard deviation of the noise; body and shell differ by 0.5."""
COLORS = np.array([[0, 0, 0], [0, 114, 178], [240, 228, 66], [213, 94, 0]], np.float32)
"""Colours of the classes in the picture, as RGB: of the palette of Okabe and Ito, for colour-blind eyes."""
TRAINING_VOLUMES, UNSEEN_VOLUMES, LEVELS = 4, 2, 2
MARK = ".oocdl-demo"
"""File in a folder that the demo has made: what is there is the demo's, and is made anew."""


def run_demo(folder: Path, size: int, steps: int, memory: str, engine: str) -> None:
    """Make data and model in ``folder``, plan, train, predict unseen volumes of this edge, draw them."""
    console, started = Console(highlight=False), time.monotonic()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if size < 16 or size % 2**LEVELS:
        raise InputError(f"size has to be a multiple of {2**LEVELS} and at least 16, got {size}")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise InputError(f"{folder} is not empty, and no folder of a demo; choose another with --folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    training, unseen = folder / "training.zarr", folder / "unseen.zarr"
    write_volumes(training, TRAINING_VOLUMES, size, seed=1)
    volumes: Any = write_volumes(unseen, UNSEEN_VOLUMES, size, seed=2)
    model = write_unet3d(folder / "unet.onnx", classes=len(CLASSES), base=8, depth=LEVELS)
    say(f"{TRAINING_VOLUMES} volumes of {size}³ voxels and a 3D U-Net are in {folder}")
    options: dict[str, Any] = {"loss": "dice_ce", "optimizer": Adam(Polynomial(0.02, max(steps, 1)))}
    options |= {"steps": steps, "memory": memory, "engine": engine, "parallel": {"space": (2, 1, 1)}}
    say(str(plan(model, training, **options)).rstrip())
    with Progress(parse_bytes(memory), console) as shown:
        options |= {"workdir": folder / "unet.run", "resume": "restart", "progress": False}
        run = fit(model, training, callbacks=[shown], **options)
    losses = [row["loss"] for row in run.history]
    trend = np.array_split(losses, min(len(losses), 10))
    say("loss  " + " → ".join(f"{part.mean():.2f}" for part in trend))
    predicted: Any = run.predict(unseen, folder / "predicted.zarr", argmax=True, memory=memory)
    found = run.evaluate(unseen, metrics="f1", memory=memory)  # Dice of all volumes together
    scores = [found[f"f1/{kind}"] for kind in range(len(CLASSES))]
    named = ", ".join(f"{name} {score:.2f}" for name, score in zip(CLASSES, scores, strict=True))
    say(f"Dice of unseen volumes  {named}")
    arrays = volumes["image"], volumes["labels"], predicted["logits"]
    image, labels, classes = (np.asarray(array[:, size // 2]) for array in arrays)
    picture = draw(folder / "demo.png", image, labels, classes, scores)
    budget = f"budget {parse_bytes(memory) / 2**20:.0f} MiB"
    say(f"peak memory of training {run.peak_bytes / 2**20:.0f} MiB, {budget}")
    say(f"{time.monotonic() - started:.0f} s in all; look at {picture}")


def write_volumes(path: Path, samples: int, size: int, seed: int) -> zarr.Group:
    """Write a Zarr group of ``image`` (float32) and ``labels`` (uint8), [samples, D, H, W], by slabs."""
    group = zarr.open_group(path, mode="w")
    shape, chunks = (samples, size, size, size), (1, max(size // 4, 1), size, size)
    # A chunk of nothing but background is data too: written, so that none is missing.
    config: Any = {"write_empty_chunks": True}
    image = group.create_array("image", shape=shape, chunks=chunks, dtype="float32", config=config)
    labels = group.create_array("labels", shape=shape, chunks=chunks, dtype="uint8", config=config)
    for sample in range(samples):
        shapes = _ellipsoids(np.random.default_rng([seed, sample]))
        for start in range(0, size, chunks[1]):
            stop = min(start + chunks[1], size)
            kinds = _label(shapes, size, start, stop)
            noise = np.random.default_rng([seed, sample, start]).normal(0, NOISE, kinds.shape)
            labels[sample, start:stop] = kinds
            image[sample, start:stop] = BRIGHTNESS[kinds] + noise.astype(np.float32)
    return group


def _ellipsoids(random: np.random.Generator) -> list[Ellipsoid]:
    found = list[Ellipsoid]()
    centre, radii = random.uniform(-0.15, 0.15, 3), random.uniform(0.65, 0.85, 3)
    for _ in CLASSES[1:]:
        turn, _ = np.linalg.qr(random.normal(size=(3, 3)))
        found.append((centre, turn / radii))
        centre = centre + random.uniform(-0.06, 0.06, 3)
        radii = radii * random.uniform(0.65, 0.8, 3)
    return found


def _label(shapes: list[Ellipsoid], size: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    points = np.stack(np.meshgrid(axis[start:stop], axis, axis, indexing="ij"), axis=-1)
    kinds = np.zeros(points.shape[:-1], np.uint8)
    inside = np.ones(kinds.shape, bool)
    for kind, (centre, to_ball) in enumerate(shapes, start=1):
        inside &= (((points - centre) @ to_ball) ** 2).sum(-1) < 1
        kinds[inside] = kind
    return kinds


def draw(path: Path, images: Array, labels: Array, predicted: Array, scores: Sequence[float]) -> Path:
    """Draw slices [volumes, y, x]: input, truth and prediction of each, and the Dice of classes below."""
    tile, gap, head, foot = 240, 12, 34, 36
    titles = ("input", "truth", "prediction")
    width, height = gap + len(titles) * (tile + gap), head + len(images) * (tile + gap) + foot
    sheet = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=18)
    for column, title in enumerate(titles):
        left = gap + column * (tile + gap)
        pen.text((left + tile // 2, head // 2), title, fill="black", font=font, anchor="mm")
    pen.text((gap, height - foot // 2 - 4), "Dice", fill="black", font=font, anchor="lm")
    for kind in range(1, len(CLASSES)):
        left = gap + kind * (width - gap) // len(CLASSES)
        middle_y = height - foot // 2 - 4
        color = tuple(int(part) for part in COLORS[kind])
        pen.rectangle((left, middle_y - 9, left + 18, middle_y + 9), fill=color)
        text = f"{CLASSES[kind]} {scores[kind]:.2f}"
        pen.text((left + 26, middle_y), text, fill="black", font=font, anchor="lm")
    for row, (image, truth, guess) in enumerate(zip(images, labels, predicted, strict=True)):
        level = np.clip((image + 2 * NOISE) / (BRIGHTNESS.max() + 4 * NOISE), 0, 1) * 255
        grey = np.stack([level] * 3, axis=-1).astype(np.float32)
        tinted = [np.where(of[..., None] > 0, 0.35 * grey + 0.65 * COLORS[of], grey) for of in (truth, guess)]
        for column, pixels in enumerate((grey, *tinted)):
            panel = Image.fromarray(pixels.astype(np.uint8)).resize((tile, tile), Image.Resampling.NEAREST)
            sheet.paste(panel, (gap + column * (tile + gap), head + row * (tile + gap)))
    sheet.save(path)
    return path
