"""The first path from end to end: a network from PyTorch, volumes made here, training, prediction.

    pip install 'oocdl[torch]'
    python examples/first_steps.py

Each volume is noise with a brighter ball somewhere in it, which the network learns to find. Takes some
ten seconds. Writes into --workdir: ``net.onnx``, ``train.zarr``, ``test.zarr``, the run ``net.run``,
``found.zarr`` (the prediction) and ``trained.onnx``.
"""

from __future__ import annotations

import argparse
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
    image = random.normal(0, 0.3, labels.shape).astype("f4") + labels
    group = zarr.open_group(path, mode="w")
    # By default Zarr leaves out chunks that are all zero, which oocdl takes for lost ones.
    with zarr.config.set({"array.write_empty_chunks": True}):
        group.create_array("image", data=image, chunks=(1, 8, size, size))
        group.create_array("labels", data=labels, chunks=(1, 8, size, size))


def export_network(path: Path) -> None:
    """Write a small network as ONNX, traced at 16³, with batch and space left open."""
    net = torch.nn.Sequential(
        torch.nn.Conv3d(1, 16, 3, padding=1),
        torch.nn.BatchNorm3d(16),
        torch.nn.ReLU(),
        torch.nn.Conv3d(16, 2, 3, padding=1),
    )
    axes = {0: "batch", 2: "depth", 3: "height", 4: "width"}
    torch.onnx.export(
        net, (torch.zeros(1, 1, 16, 16, 16),), path, input_names=["image"], output_names=["logits"],
        dynamic_axes={"image": axes, "logits": axes}, training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False, dynamo=False,
    )  # fmt: skip


def main() -> None:
    """Make, plan, train, predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=48, help="edge of the volumes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--memory", default="2GiB", help="budget of the process")
    parser.add_argument("--workdir", type=Path, default=Path("first-steps"))
    args = parser.parse_args()
    folder: Path = args.workdir
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    export_network(folder / "net.onnx")
    write_volumes(folder / "train.zarr", 4, args.size, seed=0)
    write_volumes(folder / "test.zarr", 1, args.size, seed=1)

    options = {"loss": "dice_ce", "lr": 0.01, "epochs": args.epochs, "memory": args.memory}
    print(oocdl.plan(folder / "net.onnx", folder / "train.zarr", **options))
    # Started again, this goes on with the run; one that is finished is returned.
    run = oocdl.fit(folder / "net.onnx", folder / "train.zarr", **options)
    losses = [row["loss"] for row in run.history]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")

    found = run.predict(folder / "test.zarr", folder / "found.zarr", memory=args.memory)
    labels = np.asarray(zarr.open_group(folder / "test.zarr", mode="r")["labels"])
    guess = np.asarray(found["logits"]).argmax(axis=1)
    overlap = 2 * np.sum((guess == 1) & (labels == 1)) / (np.sum(guess == 1) + np.sum(labels == 1))
    print(f"Dice of a volume that it has not seen: {overlap:.3f}")
    print(f"trained network: {run.export(folder / 'trained.onnx')}")


if __name__ == "__main__":
    main()
