"""Seconds a step on a GPU: oocdl, at parts of what PyTorch takes of it, beside PyTorch on the same GPU.

PyTorch runs as it comes, with convolutions in TF32, and in exact float32, which is what oocdl computes in.
A part of the GPU is PyTorch's own limit (``set_per_process_memory_fraction``); what CUDA takes comes on top.

    python perf/gpu.py [--toy] [--base 16] [--size 128] [--parts 1,2,4] [--memory 16GiB] [--json FILE]

A toy plays the GPU on the processor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from cases import Case, unet, write_data
from measure import folder, parser, report
from twins import batch, loss_of, twin

import oocdl

LEARNING_RATE = 1e-4
HEADS = ("case", "s/step", "practicality", "loss", "tasks", "GPU MiB", "spilled MiB")


@dataclass(frozen=True)
class Found:
    """One training."""

    name: str
    seconds: float
    """Of a step, the median without the first."""
    losses: Sequence[float]
    device_bytes: int
    """Most of the GPU's memory that PyTorch's allocator had in use."""
    tasks: int = 0
    written_bytes: int = 0
    """To the disk, in the last step."""


def peak_bytes(device: str) -> int:
    """Most bytes in use since the last call."""
    if device == "cpu":
        return 0
    nbytes = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return nbytes


def in_core(case: Case, place: Path, device: str, steps: int, exact: bool) -> Found:
    """Train by PyTorch with everything on the device."""
    torch.backends.cudnn.allow_tf32 = not exact
    network = twin(case.twin, place / "model.onnx").to(device)
    inputs, labels = (tensor.to(device) for tensor in batch(place / "data.zarr"))
    update = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    seconds, losses = [], []
    for _ in range(steps):
        begun = time.monotonic()
        update.zero_grad(set_to_none=True)
        loss = loss_of(network(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        losses.append(loss.item())
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - begun)
    name = f"PyTorch, {'exact float32' if exact else 'as it comes'}"
    return Found(name, median(seconds[1:]), losses, peak_bytes(device))


def out_of_core(case: Case, place: Path, device: str, steps: int, name: str, memory: str) -> Found:
    """Train by oocdl."""
    run = oocdl.fit(
        place / "model.onnx", place / "data.zarr", engine=f"torch:{device}", memory=memory, steps=steps,
        lr=LEARNING_RATE, optimizer="adam", shuffle=False, commit_seconds=1e9, progress=False,
        workdir=place / name, **case.options(),
    )  # fmt: skip
    rows, tasks = run.history, run.plan.tasks
    del run
    seconds, losses = [row["seconds"] for row in rows], [row["loss"] for row in rows]
    written_bytes = rows[-1]["written_bytes"]
    return Found(name, median(seconds[1:]), losses, peak_bytes(device), tasks, written_bytes)


def main() -> None:
    """Parse, train, tell."""
    made = parser(__doc__)
    made.add_argument("--base", type=int, default=16, help="channels on top")
    made.add_argument("--size", type=int, default=128, help="edge of the cube")
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--parts", default="1,2,4", help="of what PyTorch takes; 1: all of the GPU")
    made.add_argument("--memory", default="16GiB", help="of the host")
    args = made.parse_args()
    device, case = ("cpu", unet(2, 16)) if args.toy else ("cuda", unet(args.base, args.size))
    with folder(args) as place:
        case.write(place / "model.onnx")
        write_data(case, place / "data.zarr")
        found = [in_core(case, place, device, args.steps, exact) for exact in (False, True)]
        for part in [1] if args.toy else map(int, args.parts.split(",")):
            if part > 1:
                whole = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(found[1].device_bytes / part / whole)
            found.append(out_of_core(case, place, device, args.steps, f"oocdl 1 of {part}", args.memory))
    rows = [
        (
            one.name, f"{one.seconds:.3f}", f"{found[1].seconds / one.seconds:.2f}", f"{one.losses[-1]:.5f}",
            str(one.tasks), str(one.device_bytes >> 20), str(one.written_bytes >> 20),
        )
        for one in found
    ]  # fmt: skip
    report(args, HEADS, rows, found)


if __name__ == "__main__":
    main()
