"""A network of PyTorch goes in and comes out trained: no file of it is ever seen.

    pip install 'oocdl[torch]'
    python examples/from_pytorch.py

The network learns to find a ball in noise. Takes some ten seconds. Writes into --workdir: ``train.zarr``,
``test.zarr``, and the run ``Sequential.run``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import zarr

import oocdl


def write_volumes(path: Path, samples: int, size: int, seed: int) -> None:
    """Write ``image`` (float32) and ``labels`` (uint8, 1 in the ball), both (samples, size, size, size)."""
    random = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, size)] * 3, indexing="ij"))
    centres = random.uniform(-0.4, 0.4, (samples, 3, 1, 1, 1))
    labels = (((grid - centres) ** 2).sum(axis=1) < random.uniform(0.1, 0.3, (samples, 1, 1, 1))).astype("u1")
    group = zarr.open_group(path, mode="w")
    group.create_array("image", data=random.normal(0, 0.3, labels.shape).astype("f4") + labels)
    group.create_array("labels", data=labels)


def main() -> None:
    """Train, load back, predict with PyTorch."""
    parser = argparse.ArgumentParser(description="A network of PyTorch, trained out of core.")
    parser.add_argument("--size", type=int, default=48, help="edge of the volumes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--memory", default="2GiB", help="budget of the process")
    parser.add_argument("--workdir", type=Path, default=Path("from-pytorch"))
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    os.chdir(args.workdir)
    write_volumes(Path("train.zarr"), 4, args.size, seed=0)
    write_volumes(Path("test.zarr"), 1, args.size, seed=1)

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 16, 3, padding=1),
        torch.nn.BatchNorm3d(16),
        torch.nn.ReLU(),
        torch.nn.Conv3d(16, 2, 3, padding=1),
    )
    run = oocdl.fit(net, "train.zarr", loss="dice_ce", lr=0.01, epochs=args.epochs, memory=args.memory)
    losses = [row["loss"] for row in run.history]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")

    run.load_into(net)
    test = zarr.open_group("test.zarr", mode="r")
    with torch.no_grad():
        guess = net.eval()(torch.as_tensor(np.asarray(test["image"]))[:, None]).argmax(1).numpy()
    labels = np.asarray(test["labels"])
    overlap = 2 * np.sum((guess == 1) & (labels == 1)) / (np.sum(guess == 1) + np.sum(labels == 1))
    print(f"Dice of a volume that it has not seen: {overlap:.3f}")


if __name__ == "__main__":
    main()
