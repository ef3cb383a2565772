"""Train a perceptron by DeepSpeed ZeRO-3 on CPUs, parameters and optimizer in memory or in files.

    python perf/deepspeed_one.py '{"model": "mlp.onnx", "dataset": "data.zarr", "twin": ["Mlp", [[64, 64]]],
                                   "offload": "nvme", "steps": 3}'

One rank, AdamW by DeepSpeed's own kernel, float32. Weights are made partitioned (``zero.Init``) and taken
from the file one by one. Where DeepSpeed cannot be imported, or its kernels cannot be built, the line that
is printed is ``{"refused": MESSAGE}``. It is no dependency of oocdl: give it an environment of its own, with
libaio and its headers, a C++ compiler, ninja, onnx and zarr.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

LEAST_BUFFERS = 8
"""Of parameters on their way, beyond one for every two layers."""


def settings(offload: str, folder: Path, elements: int, buffers: int, lr: float) -> dict[str, Any]:
    """What DeepSpeed is told; ``elements`` of the largest parameter."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 4 * elements,
        "stage3_max_reuse_distance": 0,
        "sub_group_size": 4 * elements,
    }
    if offload == "nvme":
        place = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
        zero["offload_optimizer"] = {**place, "buffer_count": 4}
        zero["offload_param"] = {**place, "buffer_count": buffers, "buffer_size": elements}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 2, "single_submit": False,
                "overlap_events": True},
    }  # fmt: skip


def one_rank() -> None:
    """The group that DeepSpeed wants: this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**told, "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"})


def fill(network: Any, model: Path) -> None:
    """Take the weights of the file, one at a time."""
    import deepspeed
    import onnx
    import torch
    from onnx import numpy_helper

    wanted = dict(network.named_parameters())
    for weight in onnx.load(str(model), load_external_data=False).graph.initializer:
        parameter = wanted.pop(weight.name)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(torch.from_numpy(numpy_helper.to_array(weight, str(model.parent)).copy()))
    assert not wanted


def train(
    model: Path,
    dataset: Path,
    made: tuple[str, list[Any]],
    offload: str = "nvme",
    lr: float = 1e-4,
    steps: int = 3,
    threads: int | None = None,
    **unused: Any,
) -> dict[str, Any]:
    """Seconds and losses, one number a step. ImportError, or what DeepSpeed raises where it cannot build."""
    one_rank()
    import deepspeed
    import models
    import torch
    from twins import batch, loss_of

    if threads:
        torch.set_num_threads(threads)
    name, arguments = made
    widths = arguments[0]
    elements = max(a * b for a, b in zip(widths[:-1], widths[1:], strict=True))
    told = settings(offload, dataset.parent / "nvme", elements, len(widths) // 2 + LEAST_BUFFERS, lr)
    (dataset.parent / "nvme").mkdir(exist_ok=True)
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=told):
        network = getattr(models, name)(*arguments)
    fill(network, model)
    engine = deepspeed.initialize(model=network, config=told)[0]
    inputs, labels = batch(dataset)
    seconds, losses = [], []
    for _ in range(steps):
        begun = time.monotonic()
        loss = loss_of(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.monotonic() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "losses": losses, "max_rss": peak}


def main() -> None:
    """Parse, train, print; DeepSpeed's own words go to stderr."""
    words = json.loads(sys.argv[1])
    model, dataset = Path(words.pop("model")), Path(words.pop("dataset"))
    try:
        with redirect_stdout(sys.stderr):
            found = train(model, dataset, words.pop("twin"), **words)
    except ImportError as error:
        found = {"refused": f"DeepSpeed is not installed for {sys.executable} ({error}); see --deepspeed"}
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
