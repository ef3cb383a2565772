"""InstanceCut (Kirillov et al. 2017, arXiv:1611.08272): instances from two heads and a MultiCut.

    pip install 'oocdl[torch]'
    python examples/instance_cut.py

One network tells of each pixel its class, and whether an instance ends below or to the right of it; both
heads train at once, each with a loss and a weight. Nobody tells how many instances there are: a scene is
cut into small regions along the ridges of the edges, the borders of regions get a cost by both heads, and
the MultiCut of the region graph (`multicut.py`) joins regions to instances. Unlike in the paper, edges are
between pixels, not on them, and an instance gets its class after the cut, not with it.

Scenes are made here: discs, rectangles and triangles in noise that touch and hide each other. Average
precision is that of scenes which the network has not seen.

Takes about a minute and a half of processor time within 500 MiB: average precision is 0.70 at an overlap of
0.5, and 0.44 as the mean of 0.5 to 0.95. Found at 0.5 are all 55 shapes that stand alone, 72 of 87 that touch
other classes only, and 31 of 72 that touch one of their own.

Writes into --workdir: ``train.zarr``, ``test.zarr``, ``found.zarr`` (what the heads say), the run
``TwoHeads.run`` and ``instance_cut.png``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr
from multicut import multicut
from PIL import Image, ImageDraw

import oocdl

Array = npt.NDArray[Any]
CLASSES = ("background", "disc", "rectangle", "triangle")
SHADES: dict[str, Callable[[Array], Array]] = {
    "disc": lambda distance: 1 - 0.7 * distance**2,
    "rectangle": lambda distance: 0.3 + 0.7 * distance**2,
    "triangle": lambda distance: np.where(distance < 0.55, 0.9, 0.4),
}
"""How bright a shape is, by the distance from its centre (0) towards its border (1)."""
LOSS = {"classes": ("cross_entropy", 1.0), "edges": ("bce", 2.0)}
"""Output -> (loss, weight); the arrays of the dataset have the same names."""
IOUS = tuple(np.arange(50, 100, 5) / 100)
"""Overlaps from which an instance counts as found: the mean over them is COCO's and Cityscapes' AP."""
NEIGHBOURS = (
    ((slice(None, -1), slice(None)), (slice(1, None), slice(None))),
    ((slice(None), slice(None, -1)), (slice(None), slice(1, None))),
)
"""Where one and where the other pixel of a pair lies: side by side on the first axis, then on the second."""
SURE = 1e-3
"""Probabilities are kept this far from 0 and 1, so that no pixel alone decides."""
EDGE_BIAS = 1.25
"""Added to the logits of edges, which are rare, so that the head is slow to call one. It is the best of seven
from 0 to 2 on 40 more scenes, which are neither trained nor scored on."""
LEAST_PIXELS = 12
"""What is smaller is noise, and no instance."""
COLOURS = (
    *((0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115)),
    *((240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)),
)
"""Okabe and Ito's, which are told apart with any colour vision; black is the background."""


@dataclass(frozen=True)
class Instance:
    """An instance of a scene, of the truth (score 1) or found."""

    scene: int
    kind: int
    """Its number in ``CLASSES``."""
    score: float
    mask: Array


def gauge(random: np.random.Generator, kind: int, size: int) -> Array:
    """Return a random shape of a class as its gauge, (size, size): 0 in its centre, 1 on its border."""
    y, x = np.mgrid[:size, :size] - random.uniform(0.12, 0.88, (2, 1, 1)) * size
    radius = random.uniform(0.1, 0.18) * size
    if CLASSES[kind] == "disc":
        return np.asarray(np.hypot(y, x) / radius)
    sides = 4 if CLASSES[kind] == "rectangle" else 3
    widths = radius * (random.uniform(0.6, 1.2, 2) if sides == 4 else np.full(2, 0.7))
    angles = random.uniform(0, 2 * np.pi) + np.arange(sides) * 2 * np.pi / sides
    planes = [(y * np.sin(angle) + x * np.cos(angle)) / widths[side % 2] for side, angle in enumerate(angles)]
    return np.asarray(np.max(planes, axis=0))


def scene(random: np.random.Generator, size: int, shapes: int) -> tuple[Array, Array, Array]:
    """Return an image, its classes and its instances (0: background), each (size, size).

    A shape hides those before it, of none more than half.
    """
    image, classes, instances = np.zeros((3, size, size))
    areas = np.zeros(shapes + 1)
    for number in range(1, shapes + 1):
        while True:
            kind = int(random.integers(1, len(CLASSES)))
            distance = gauge(random, kind, size)
            inside = distance < 1
            seen = np.bincount(instances[~inside].astype(int), minlength=shapes + 1)
            if np.all(seen[1:number] >= areas[1:number] / 2):
                break
        areas[number] = inside.sum()
        image[inside] = random.uniform(0.6, 1) * SHADES[CLASSES[kind]](distance[inside])
        classes[inside], instances[inside] = kind, number
    return image + random.normal(0, 0.15, image.shape), classes, instances


def edges_of(instances: Array) -> Array:
    """Return 1 where a pixel and its neighbour below, then to the right, differ: (2, size, size)."""
    edges = np.zeros((2, *instances.shape), np.uint8)
    for edge, (one, other) in zip(edges, NEIGHBOURS, strict=True):
        edge[one] = instances[one] != instances[other]
    return edges


def write_scenes(path: Path, scenes: int, size: int, seed: int) -> None:
    """Write ``image``, ``classes``, ``instances``, (scenes, size, size), and ``edges`` with an axis of 2."""
    random = np.random.default_rng(seed)
    made = [scene(random, size, int(random.integers(4, 8))) for _ in range(scenes)]
    image, classes, instances = (np.stack(arrays) for arrays in zip(*made, strict=True))
    group = zarr.open_group(path, mode="w")
    group.create_array("image", data=image.astype("f4"))
    group.create_array("classes", data=classes.astype("u1"))
    group.create_array("edges", data=np.stack([edges_of(one) for one in instances]))
    group.create_array("instances", data=instances.astype("u1"))


class TwoHeads(torch.nn.Module):
    """A U-Net of three levels whose last features go to two heads: logits of classes and of edges."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.down = torch.nn.ModuleList([block(1, base), block(base, 2 * base), block(2 * base, 4 * base)])
        self.up = torch.nn.ModuleList([block(6 * base, 2 * base), block(3 * base, base)])
        self.classes = torch.nn.Conv2d(base, len(CLASSES), 1)
        self.edges = torch.nn.Conv2d(base, 2, 1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """(N, 1, H, W) -> logits (N, 4, H, W) and (N, 2, H, W); H and W are multiples of 4."""
        fine = self.down[0](image)
        middle = self.down[1](torch.nn.functional.max_pool2d(fine, 2))
        coarse = self.down[2](torch.nn.functional.max_pool2d(middle, 2))
        for skip, join in zip((middle, fine), self.up, strict=True):
            larger = torch.nn.functional.interpolate(coarse, scale_factor=2.0)
            coarse = join(torch.cat((larger, skip), dim=1))
        return {"classes": self.classes(coarse), "edges": self.edges(coarse)}


def block(channels: int, features: int) -> torch.nn.Sequential:
    """Two convolutions, each with a norm."""
    layers: list[torch.nn.Module] = []
    for taken in (channels, features):
        layers += [torch.nn.Conv2d(taken, features, 3, padding=1, bias=False), torch.nn.BatchNorm2d(features)]
        layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers)


def watershed(edges: Array) -> Array:
    """Return regions numbered from 0, (H, W): pixels from which steepest descent ends in the same minimum.

    The height of a pixel is the mean of the logits ``edges`` (2, H, W) around it; no way leads over an edge.
    """
    total, count = np.zeros((2, *edges.shape[1:]))
    for logits, pair in zip(edges, NEIGHBOURS, strict=True):
        for here in pair:
            total[here] += logits[pair[0]]
            count[here] += 1
    heights = smooth(total / count)
    lowest, places = heights.copy(), np.arange(heights.size).reshape(heights.shape)
    down = places.copy()
    for logits, pair in zip(edges, NEIGHBOURS, strict=True):
        for here, there in (pair, pair[::-1]):
            lower = (heights[there] < lowest[here]) & (logits[pair[0]] < 0)
            lowest[here] = np.where(lower, heights[there], lowest[here])
            down[here] = np.where(lower, places[there], down[here])
    end = down.ravel()
    while np.any(end[end] != end):
        end = end[end]
    return np.unique(end, return_inverse=True)[1].reshape(heights.shape)


def smooth(values: Array) -> Array:
    """Return means over 3 x 3 pixels: fewer minima, so fewer regions."""
    padded = np.pad(values, 1, mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3)).mean(axis=(2, 3))


def region_graph(regions: Array, classes: Array, edges: Array) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the pairs of regions that touch, and what cutting each costs: log-odds summed along the border.

    Two pixels side by side are of one instance if no edge is between them, and their regions are of one
    class. ``classes`` are probabilities (C, H, W), ``edges`` logits (2, H, W).
    """
    sizes = np.bincount(regions.ravel())
    likely = np.stack([np.bincount(regions.ravel(), weights=each.ravel()) / sizes for each in classes])
    pairs, odds = [], []
    for logits, (one, other) in zip(edges, NEIGHBOURS, strict=True):
        border = regions[one] != regions[other]
        low, high = np.sort((regions[one][border], regions[other][border]), axis=0)
        same = (likely[:, low] * likely[:, high]).sum(axis=0)
        joined = np.clip(same / (1 + np.exp(logits[one][border])), SURE, 1 - SURE)
        pairs.append(low * len(sizes) + high)
        odds.append(np.log(joined / (1 - joined)))
    found, which = np.unique(np.concatenate(pairs), return_inverse=True)
    costs = np.bincount(which, weights=np.concatenate(odds), minlength=len(found))
    return [(int(pair) // len(sizes), int(pair) % len(sizes)) for pair in found], costs.tolist()


def instances_of(number: int, classes: Array, edges: Array) -> list[Instance]:
    """Return the instances of a scene by the logits of both heads, (C, H, W) and (2, H, W)."""
    likely = np.exp(classes - classes.max(axis=0))
    likely /= likely.sum(axis=0)
    regions = watershed(edges + EDGE_BIAS)
    graph, costs = region_graph(regions, likely, edges + EDGE_BIAS)
    parts = np.asarray(multicut(int(regions.max()) + 1, graph, costs))[regions]
    found = []
    for part in range(parts.max() + 1):
        mask = parts == part
        share = likely[:, mask].mean(axis=1)
        kind = int(share.argmax())
        if kind and mask.sum() >= LEAST_PIXELS:
            found.append(Instance(number, kind, float(share[kind]), mask))
    return found


def true_instances(classes: Array, instances: Array) -> list[Instance]:
    """Return the instances of all scenes, (scenes, H, W) each."""
    return [
        Instance(number, int(classes[number][ids == one][0]), 1.0, ids == one)
        for number, ids in enumerate(instances)
        for one in np.unique(ids[ids > 0])
    ]


def overlap(one: Instance, other: Instance) -> float:
    """Return the intersection over the union."""
    return float((one.mask & other.mask).sum() / (one.mask | other.mask).sum())


def average_precision(found: Sequence[Instance], truth: Sequence[Instance], least: float) -> float:
    """Return the mean over classes of the area below precision by recall, as of COCO at one overlap.

    The surest instance chooses first, of the true ones of its scene and class that are free, the one which it
    overlaps most, by ``least`` or more. The precision at a recall is the best at this recall or a higher one.
    """
    areas = []
    for kind in sorted({one.kind for one in truth}):
        free = [one for one in truth if one.kind == kind]
        wanted, right = len(free), []
        for guess in sorted((one for one in found if one.kind == kind), key=lambda one: -one.score):
            near = [
                (overlap(guess, one), place) for place, one in enumerate(free) if one.scene == guess.scene
            ]
            best, place = max(near, default=(0.0, 0))
            right.append(best >= least)
            if right[-1]:
                del free[place]
        hits = np.cumsum(right)
        precision = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
        areas.append(float(precision[np.asarray(right, bool)].sum()) / wanted)
    return float(np.mean(areas))


def paint(shown: Sequence[Instance], like: Sequence[Instance], size: int) -> Array:
    """Return instances in colours, (size, size, 3): each in that of the one of ``like`` it overlaps most."""
    picture = np.zeros((size, size, 3), np.uint8)
    for one in shown:
        best = max(range(len(like)), key=lambda place: overlap(one, like[place]))
        picture[one.mask] = COLOURS[1 + best % (len(COLOURS) - 1)]
    return picture


def draw(path: Path, test: zarr.Group, heads: zarr.Group, found: Sequence[Instance], scenes: int) -> None:
    """Draw a row for each of the first scenes: input, what the heads say, instances found, true instances."""
    truth = true_instances(np.asarray(test["classes"][:scenes]), np.asarray(test["instances"][:scenes]))
    size, grow, head = test["image"].shape[-1], 3, 18
    rows = []
    for number in range(scenes):
        image = np.clip(np.asarray(test["image"][number]) / 1.2, 0, 1)
        likely = 1 / (1 + np.exp(-EDGE_BIAS - np.asarray(heads["edges"][number]).max(axis=0)))
        there = [one for one in truth if one.scene == number]
        cells = [
            (image * 255).astype(np.uint8)[..., None].repeat(3, axis=-1),
            np.array(COLOURS, np.uint8)[np.asarray(heads["classes"][number]).argmax(axis=0)],
            (likely * 255).astype(np.uint8)[..., None].repeat(3, axis=-1),
            paint([one for one in found if one.scene == number], there, size),
            paint(there, there, size),
        ]
        rows.append(
            np.concatenate(
                [np.pad(cell, ((1, 1), (1, 1), (0, 0)), constant_values=255) for cell in cells], axis=1
            )
        )
    body = np.concatenate(rows).repeat(grow, axis=0).repeat(grow, axis=1)
    picture = Image.fromarray(np.pad(body, ((head, 0), (0, 0), (0, 0)), constant_values=255))
    for place, title in enumerate(("input", "classes", "edges", "instances found", "true instances")):
        ImageDraw.Draw(picture).text((place * grow * (size + 2) + 4, 3), title, fill=(0, 0, 0))
    picture.save(path, optimize=True)


def main() -> None:
    """Make scenes, train both heads, cut, score, draw."""
    parser = argparse.ArgumentParser(description="Instances by two heads and a MultiCut.")
    parser.add_argument("--scenes", type=int, default=160, help="to train on")
    parser.add_argument("--unseen", type=int, default=40, help="scenes to be scored on")
    parser.add_argument("--size", type=int, default=64, help="edge of the scenes, a multiple of 4")
    parser.add_argument("--base", type=int, default=12, help="channels on top of the U-Net")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--memory", default="500MiB", help="budget of the process")
    parser.add_argument("--workdir", type=Path, default=Path("instance-cut"))
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    os.chdir(args.workdir)
    write_scenes(Path("train.zarr"), args.scenes, args.size, seed=0)
    write_scenes(Path("test.zarr"), args.unseen, args.size, seed=1)

    torch.manual_seed(0)
    rate = oocdl.optim.Cosine(lr=0.01, steps=args.steps)
    start = time.perf_counter()
    run = oocdl.fit(
        TwoHeads(args.base), "train.zarr", loss=LOSS, optimizer=oocdl.optim.Adam(lr=rate), batch_size=8,
        steps=args.steps, memory=args.memory,
    )  # fmt: skip
    trained = time.perf_counter()
    for name in ("loss", *(f"loss/{head}" for head in LOSS)):
        values = [row[name] for row in run.history]
        print(f"{name} {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")

    heads = run.predict("test.zarr", "found.zarr", memory=args.memory)
    test = zarr.open_group("test.zarr", mode="r")
    cutting = time.perf_counter()
    found = [
        one
        for number in range(args.unseen)
        for one in instances_of(
            number, np.asarray(heads["classes"][number]), np.asarray(heads["edges"][number])
        )
    ]
    done = time.perf_counter()
    truth = true_instances(np.asarray(test["classes"]), np.asarray(test["instances"]))
    scores = [average_precision(found, truth, least) for least in IOUS]
    print(
        f"{len(found)} instances found, {len(truth)} are there, in {args.unseen} scenes that it has not seen"
    )
    print(f"average precision {scores[0]:.3f} at an overlap of 0.5, {np.mean(scores):.3f} from 0.5 to 0.95")
    print(f"seconds: {trained - start:.0f} to train, {done - cutting:.1f} to cut {args.unseen} scenes")
    draw(Path("instance_cut.png"), test, heads, found, min(4, args.unseen))
    print(f"see {args.workdir / 'instance_cut.png'}")


if __name__ == "__main__":
    main()
