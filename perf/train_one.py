"""Train a U-Net for some steps in this process, by oocdl or by PyTorch; print one line of JSON.

    python perf/train_one.py {torch,onnxruntime,pytorch} FOLDER --steps 4 --memory 1150MiB

``FOLDER`` holds ``unet.onnx`` and ``data.zarr``, as ``unet3d.py`` writes them. Both sides start
from the weights of the file and take the same Adam steps, so their losses have to agree.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import zarr

LEARNING_RATE = 1e-3


def by_oocdl(folder: Path, steps: int, memory: str, engine: str) -> dict[str, Any]:
    """Seconds and losses of oocdl, with bytes as planned and as moved."""
    from one_run import train

    return train(
        folder / "unet.onnx", folder / "data.zarr", workdir=folder / f"{engine}-{os.getpid()}.run",
        memory=memory, engine=engine, steps=steps, lr=LEARNING_RATE,
    )  # fmt: skip


def by_pytorch(folder: Path, steps: int) -> dict[str, Any]:
    """Seconds and losses of eager PyTorch, everything in memory."""
    import torch
    from models import UNet3d
    from torch.nn import functional

    group = zarr.open_group(str(folder / "data.zarr"), mode="r")
    image = torch.from_numpy(group["image"][...])  # type: ignore[index]
    labels = torch.from_numpy(group["labels"][...]).long()  # type: ignore[index]
    sizes = group.attrs.asdict()
    model = UNet3d(1, int(sizes["classes"]), int(sizes["base"]), int(sizes["depth"]))  # type: ignore[arg-type]
    model.load_onnx(folder / "unet.onnx")
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    seconds, losses = [], []
    for _ in range(steps):
        begun = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(image), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        del loss
        seconds.append(time.monotonic() - begun)
    return {"seconds": seconds, "losses": losses}


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("how", choices=("torch", "onnxruntime", "pytorch"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", default="1150MiB")
    args = parser.parse_args()
    if args.how == "pytorch":
        found = by_pytorch(args.folder, args.steps)
    else:
        found = by_oocdl(args.folder, args.steps, args.memory, args.how)
    found["max_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
