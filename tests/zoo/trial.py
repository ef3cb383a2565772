"""One network, exported in each way and trained in three steps beside PyTorch.

``python -m tests.zoo.trial NAME [WAY ...]`` prints one line of JSON for each way.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oocdl
from oocdl.errors import OocdlError
from oocdl.optim import SGD
from tests.kit.nets import write_data
from tests.kit.plain_files import export_as
from tests.kit.runs import in_torch, losses_of
from tests.zoo.networks import BATCH, NETWORKS, Picked, calm

STEPS, RATE = 3, 0.0002
WAYS = {
    "from_torch": None,
    "TorchScript": "torchscript",
    "dynamo optimize=False": "plain",
    "dynamo": "dynamo",
}
"""Ways into oocdl, by their names among the kit's exports."""
OPTIONS: dict[str, Any] = {
    "loss": "mse", "optimizer": SGD(lr=RATE), "steps": STEPS, "batch_size": BATCH, "shuffle": False,
    "memory": "4GiB",
}  # fmt: skip
NOISE = 20
"""How many times PyTorch's own error of float32 a loss may be off."""
MOVES = 8
MOVED_BY = {torch.float32: 1e-7, torch.float64: 1e-15}
"""Repetitions of PyTorch's training, with weights moved by as much of themselves: some bits."""
FLOOR64, FLOOR32 = 1e-7, 1e-5
"""What is off by less is equal: PyTorch's own error may happen to be none."""


def reference(module: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> list[float]:
    """PyTorch's losses, in the dtype of ``target``."""
    module = copy.deepcopy(module).to(target.dtype)
    given = [x.to(target.dtype) if x.is_floating_point() else x for x in inputs]
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return in_torch(torch.optim.SGD(weights, lr=RATE), STEPS * [[lambda: F.mse_loss(module(*given), target)]])


def off_by_step(found: Sequence[float], wanted: Sequence[float]) -> list[float]:
    """The relative differences."""
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, wanted, strict=True)]


def off(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(off_by_step(found, wanted))


def noise(module: nn.Module, inputs: Sequence[Tensor], target: Tensor, exact: Sequence[float]) -> list[float]:
    """By step, the most that PyTorch's losses are off in the dtype of ``target`` if weights move by bits.

    Some networks amplify rounding by orders of magnitude a step, at kinks of Relu and in norms of few
    elements: what they lose to it once is by chance.
    """
    found = []
    for seed in range(MOVES):
        moved, random = copy.deepcopy(module).to(target.dtype), torch.Generator().manual_seed(seed)
        for weight in moved.parameters():
            weight.data *= 1 + MOVED_BY[target.dtype] * torch.randn(weight.shape, generator=random)
        found.append(off_by_step(reference(moved, inputs, target), exact))
    return [max(step) for step in zip(*found, strict=True)]


def within_noise(errors: Sequence[float], moved: Sequence[float], floor: float) -> bool:
    """Whether the losses of all steps are off by no more than noise explains."""
    return all(error <= max(floor, NOISE * most) for error, most in zip(errors, moved, strict=True))


def fit(model: Any, folder: Path, names: dict[str, str], run: str, **options: Any) -> list[float]:
    """Train by oocdl; returns the losses."""
    made = oocdl.fit(
        model, folder / "data.zarr", workdir=folder / run, inputs=names, progress=False, **OPTIONS, **options
    )
    return losses_of(made)


def attempt(
    way: str, module: nn.Module, given: dict[str, Tensor], folder: Path, found: dict[str, Any]
) -> None:
    """Export, plan and train in one way; ``found`` says how far that came."""
    inputs = list(given.values())
    target = torch.randn(copy.deepcopy(module)(*inputs).shape)
    arrays = {name: tensor.numpy() for name, tensor in {**given, "target": target}.items()}
    write_data(folder / "data.zarr", arrays)
    exact = reference(module, inputs, target.double())
    found["own_error"] = off(reference(module, inputs, target), exact)
    names, model = dict(zip(("x", "other"), given, strict=False)), module
    if WAYS[way] is not None:
        file = export_as(copy.deepcopy(module), inputs, folder / "net.onnx", str(WAYS[way]))
        model = file  # type: ignore[assignment]
        names = dict(zip(("x0", "x1"), given, strict=False))
    found["stage"] = "plan"
    begun = time.process_time()
    oocdl.plan(model, folder / "data.zarr", inputs=names, **OPTIONS)
    found["plan_seconds"] = time.process_time() - begun
    found["stage"] = "train"
    errors = off_by_step(fit(model, folder, names, "exact.run", precision="float64"), exact)
    found["error64"], equal = max(errors), True
    if found["error64"] > max(FLOOR64, 1e-6 * NOISE * found["own_error"]):
        moved = noise(module, inputs, target.double(), exact)
        found |= {"errors64": errors, "noise64": moved}
        equal = within_noise(errors, moved, FLOOR64)
    cut = {"parallel": {"batch": BATCH}}
    errors = off_by_step(fit(model, folder, names, "cut.run", **cut), exact)
    found["error32"] = max(errors)
    if equal and found["error32"] > max(FLOOR32, NOISE * found["own_error"]):
        moved = noise(module, inputs, target, exact)
        found |= {"errors32": errors, "noise": moved}
        equal = within_noise(errors, moved, FLOOR32)
    found["stage"] = "equal" if equal else "different"


def network(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A module in training mode, whose output is one tensor, and its inputs by the names of arrays."""
    torch.manual_seed(0)
    given = dict(NETWORKS[name].inputs())
    module = Picked(calm(NETWORKS[name].make().train()), tuple(given))
    return module, {f"in_{key}": value for key, value in given.items()}


def main(name: str, ways: Sequence[str]) -> None:
    """Print what came of each way."""
    warnings.simplefilter("ignore")
    np.random.seed(0)
    for way in ways:
        with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", oocdl.errors.ModelWarning)
            found: dict[str, Any] = {"stage": "export"}
            try:
                attempt(way, *network(name), Path(folder), found)
            except OocdlError as error:
                found |= {"stage": f"refused in {found['stage']}", "why": str(error)[:1000]}
            except Exception as error:  # whatever an exporter or a library raises is a row
                found |= {
                    "stage": f"failed in {found['stage']}",
                    "why": f"{type(error).__name__}: {error}"[:400],
                }
            announced = [str(one.message)[:200] for one in told if one.category is oocdl.errors.ModelWarning]
            print(json.dumps({"network": name, "way": way, **found, "announced": announced[:1]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(WAYS))
