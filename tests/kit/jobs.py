"""Whole networks on disk with their data, trained by ``oocdl.fit`` and by PyTorch on the same batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

import oocdl
from oocdl.optim import SGD, Adam
from tests.kit.machine import THIS, Small, fit
from tests.kit.models import GPT, MLP, Grouped, ResNet, TwoHeads, UNet3d, export
from tests.kit.nets import write_data
from tests.kit.runs import in_torch, losses_of
from tests.kit.settings import EXACT

STEPS, SAMPLES, BATCH = 3, 3, 2
"""Of a run: the second batch is ragged, the third is whole again."""
# Adam divides the gradients of biases before a norm, truly zero, by 1e-8: their rounding becomes visible.
TOLERANCE = {"sgd": 1e-11, "adam": 1e-7}
OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.05, momentum=0.9), lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9)),
    "adam": (Adam(lr=0.01), lambda w: torch.optim.Adam(w, lr=0.01)),
}


Unet = tuple[Any, ...]
EVEN: tuple[Unet, ...] = (
    # norm, down, up, extents, depth: halved, the middle level of the first is odd
    ("instance", "maxpool", "transpose", (18, 14, 10), 1),
    ("batch", "stride", "trilinear", (12, 8, 16), 2),
    ("group", "maxpool", "nearest", (10, 14, 6), 1),
    ("batch", "maxpool", "transpose", (8, 12, 8), 2),
)


class OddUNet3d(UNet3d):
    """The U-Net on extents that halving does not divide: every level goes back to its skip's size."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.pool and options["up"] == "transpose":
            # The inverse of a strided convolution; the inverse of pooling is there already.
            for up in self.up:
                old = up.conv
                up.conv = nn.ConvTranspose3d(old.in_channels, old.out_channels, 3, stride=2, padding=1)

    def size_of(self, skip: Tensor) -> list[int]:
        return [int(extent) for extent in skip.shape[2:]]


@dataclass(frozen=True, eq=False)
class Net:
    """A network, what it is fed, and its loss in oocdl and in PyTorch."""

    make: Callable[[], nn.Module]
    arrays: Callable[[np.random.Generator], dict[str, np.ndarray]]
    loss: Any
    truth: Callable[[Any, Mapping[str, Tensor]], Tensor]
    outputs: tuple[str, ...] = ("y",)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the exporter."""


def unet(norm: str, down: str, up: str, shape: Sequence[int], depth: int = 1, odd: bool = False) -> Net:
    """A 3D U-Net on volumes of ``shape`` with three classes."""
    kind = OddUNet3d if odd else UNet3d

    def arrays(random: np.random.Generator) -> dict[str, np.ndarray]:
        x = random.normal(size=(SAMPLES, 1, *shape)).astype("float32")
        y = (x[:, 0] > 0.3).astype("uint8") + (random.uniform(size=x[:, 0].shape) > 0.8)
        return {"x": x, "y": y.astype("uint8")}

    return Net(
        lambda: kind(base=2, depth=depth, norm=norm, down=down, up=up),
        arrays,
        "cross_entropy",
        lambda y, data: F.cross_entropy(y, data["y"].long()),
    )


def _images(random: np.random.Generator) -> dict[str, np.ndarray]:
    x = random.normal(size=(SAMPLES, 3, 13, 11)).astype("float32")
    return {"x": x, "y": random.integers(10, size=SAMPLES)}


def _tokens(random: np.random.Generator) -> dict[str, np.ndarray]:
    ids = random.integers(37, size=(SAMPLES, 13))
    return {"x": ids[:, :-1].copy(), "y": ids[:, 1:].copy()}


def _vectors(random: np.random.Generator) -> dict[str, np.ndarray]:
    x = random.normal(size=(SAMPLES, 7)).astype("float32")
    return {"x": x, "y": (x[:, :3] ** 2).astype("float32")}


def _heads(random: np.random.Generator) -> dict[str, np.ndarray]:
    x = random.normal(size=(SAMPLES, 1, 9, 7)).astype("float32")
    return {"x": x, "map": (x > 0).astype("float32"), "class": random.integers(3, size=SAMPLES)}


NETS: dict[str, Net] = {
    "resnet": Net(ResNet, _images, "cross_entropy", lambda y, data: F.cross_entropy(y, data["y"])),
    "grouped": Net(
        lambda: Grouped(2), _images, "cross_entropy", lambda y, data: F.cross_entropy(y, data["y"])
    ),
    "gpt": Net(
        # Heads of width 4: their scale 1/2 is exact in float32, as is what opset 20 needs for Gelu.
        lambda: GPT(vocabulary=37, context=12, width=8, heads=2),
        _tokens,
        "cross_entropy",
        lambda y, data: F.cross_entropy(y.transpose(1, 2), data["y"]),
        options={"opset": 20},
    ),
    "mlp": Net(lambda: MLP((7, 11, 3)), _vectors, "mse", lambda y, data: F.mse_loss(y, data["y"])),
    "two-heads": Net(
        TwoHeads,
        _heads,
        {"map": ("bce", 0.7), "class": ("cross_entropy", 1.3)},
        lambda y, data: (
            0.7 * F.binary_cross_entropy_with_logits(y[0], data["map"])
            + 1.3 * F.cross_entropy(y[1], data["class"])
        ),
        outputs=("map", "class"),
    ),
}


@dataclass(frozen=True)
class Job:
    """A network on disk."""

    net: Net
    model: Path
    data: Path
    module: nn.Module
    arrays: Mapping[str, np.ndarray]

    def settings(self, **options: Any) -> dict[str, Any]:
        """Options of ``fit``: all steps, in dataset order."""
        return {**EXACT, "loss": self.net.loss, "steps": STEPS, "batch_size": BATCH, **options}

    def fit(self, workdir: Path, machine: Small = THIS, **options: Any) -> oocdl.Run:
        """Train on ``machine``."""
        return fit(self.model, self.data, machine=machine, workdir=workdir, **self.settings(**options))


def prepare(net: Net, folder: Path, seed: int = 0) -> Job:
    """Export the network, write its dataset, and keep a copy with the weights that are in the file."""
    torch.manual_seed(seed)
    arrays = net.arrays(np.random.default_rng(seed))
    folder.mkdir(parents=True, exist_ok=True)
    data = write_data(folder / "data.zarr", arrays)
    module = net.make()
    example = torch.as_tensor(arrays["x"][:BATCH])
    path = export(module, (example,), folder / "net.onnx", dynamic=(0,), outputs=net.outputs, **net.options)
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    module.load_state_dict(
        {k: torch.as_tensor(stored[k].copy()) if k in stored else v for k, v in module.state_dict().items()}
    )
    return Job(net, path, data, module.double().train(), arrays)


def train(
    job: Job, optimizer: str, dtype: torch.dtype = torch.float64
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final weights of PyTorch."""
    module = copy.deepcopy(job.module).to(dtype)
    data = {
        k: torch.as_tensor(a).to(dtype) if a.dtype.kind == "f" else torch.as_tensor(a)
        for k, a in job.arrays.items()
    }

    def loss(step: int) -> Tensor:
        first = step % -(-SAMPLES // BATCH) * BATCH
        batch = {name: array[first : first + BATCH] for name, array in data.items()}
        return job.net.truth(module(batch["x"]), batch)

    optim = OPTIMIZERS[optimizer][1](module.parameters())
    losses = in_torch(optim, [[partial(loss, step)] for step in range(STEPS)])
    return losses, {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}


def sized(expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What an error is relative to: the largest element, or 1e-3 of the network's largest."""
    floating = {name: array for name, array in expected.items() if array.dtype.kind == "f"}
    scale = max(np.abs(array).max() for array in floating.values())
    return {name: max(float(np.abs(array).max()), 1e-3 * scale) for name, array in floating.items()}


def errors_of(found: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Relative error of every weight and running statistic, by name; all have to be there."""
    return {
        name: float(np.abs(found[name][...] - expected[name]).max() / size)
        for name, size in sized(expected).items()
    }


def check(
    run: oocdl.Run, losses: Sequence[float], weights: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Losses within 1e-9, weights and running statistics within ``tolerance``."""
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-9, atol=0)
    errors = errors_of(dict(run.weights), weights)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, (worst, errors[worst])
