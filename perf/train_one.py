"""Train any of the networks by PyTorch in this process; print one line of JSON.

    python perf/train_one.py '{"model": "unet.onnx", "dataset": "data.zarr", "mode": "incore", "steps": 4,
                               "twin": ["UNet3d", [1, 4, 16, 3]]}'

``mode``: ``incore``; ``last``, the same with the channels of images and volumes last; ``ckpt``, activation
checkpointing of each block; ``disk``, ``saved_tensors_hooks`` to files beside the dataset. ``precision``
"bfloat16" is PyTorch's autocast. It starts from the weights of the file and takes the steps that oocdl takes,
so the losses have to agree.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from disk_hooks import DiskHooks
from twins import batch, checkpoint_blocks, loss_of, twin

ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Axes of a batch -> the order in memory that has its channels last."""
LEAST_BYTES = 1 << 20
"""Of a tensor that is worth a file."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train(
    model: Path,
    dataset: Path,
    made: Sequence[Any],
    mode: str = "incore",
    precision: str = "float32",
    optimizer: str = "adam",
    lr: float = 1e-4,
    steps: int = 4,
    threads: int | None = None,
    least_bytes: int = LEAST_BYTES,
) -> dict[str, Any]:
    """Seconds, losses and bytes moved, one number a step."""
    if threads:
        torch.set_num_threads(threads)
    network, (inputs, labels) = twin(made, model), batch(dataset)
    if mode == "last" and inputs.ndim in ORDERS:
        network, inputs = (
            network.to(memory_format=ORDERS[inputs.ndim]),
            inputs.to(memory_format=ORDERS[inputs.ndim]),
        )
    if mode == "ckpt":
        checkpoint_blocks(network)
    stay = [*network.parameters(), inputs]
    hooks = DiskHooks(dataset.parent / "hooks", stay, least_bytes) if mode == "disk" else None
    update = OPTIMIZERS[optimizer](network.parameters(), lr=lr)
    found: dict[str, list[float]] = {"seconds": [], "losses": [], "spill_read": [], "spill_written": []}
    for _ in range(steps):
        begun = time.monotonic()
        before = (hooks.read_bytes, hooks.written_bytes) if hooks else (0, 0)
        update.zero_grad(set_to_none=True)
        cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")
        with hooks.hooks() if hooks else nullcontext(), cast:
            loss = loss_of(network(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        found["losses"].append(loss.item())
        del loss
        found["seconds"].append(time.monotonic() - begun)
        now = (hooks.read_bytes, hooks.written_bytes) if hooks else (0, 0)
        found["spill_read"].append(now[0] - before[0])
        found["spill_written"].append(now[1] - before[1])
    return found


def main() -> None:
    """Parse, train, print."""
    words = json.loads(sys.argv[1])
    model, dataset = Path(words.pop("model")), Path(words.pop("dataset"))
    print(json.dumps(train(model, dataset, words.pop("twin"), **words)))


if __name__ == "__main__":
    main()
