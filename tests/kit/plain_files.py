"""Modules that plain ONNX files say too little of, exported in each way, trained by PyTorch and as read."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.reader import Imported
from tests.kit.interpret import evaluate
from tests.kit.runs import in_torch
from tests.kit.torch_modules import encoder, in_evaluation, running

STEPS, RATE = 3, 0.1
WAYS = ("torchscript", "dynamo", "plain")
"""TorchScript as the module is; dynamo as it comes; dynamo with ``optimize=False``."""


class AddedBuffer(nn.Module):
    """A buffer, added to activations, of a name that does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("offset", torch.randn(8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(F.relu(self.fc(x) + self.get_buffer("offset")))
        return result


class Detached(nn.Module):
    """A layer whose output is detached, beside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(F.relu(self.a(x)).detach()) + self.b(x)
        return result


def zero_biases() -> nn.Module:
    """Four linear layers; every second has a bias of zeros."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for layer in layers[1::2]:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(8, 3))


def zero_convolution() -> nn.Module:
    """Two convolutions; the bias of the first is of zeros."""
    first = nn.Conv2d(1, 4, 3, padding=1)
    assert first.bias is not None
    nn.init.zeros_(first.bias)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 3, 1))


def norms_asleep() -> nn.Module:
    """Two convolutions, each with a norm in evaluation mode."""
    parts = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    return in_evaluation(running(nn.Sequential(*parts, nn.Conv2d(4, 3, 1))), "1", "4")


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "odd-buffer": (AddedBuffer, lambda: torch.randn(4, 8)),
    "detach": (Detached, lambda: torch.randn(4, 8)),
    "norms-asleep": (norms_asleep, lambda: torch.randn(2, 1, 6, 6)),
    "zero-biases": (zero_biases, lambda: torch.randn(4, 8)),
    "zero-convolution": (zero_convolution, lambda: torch.randn(2, 1, 6, 6)),
    "copied-layers": (  # they start equal
        lambda: nn.Sequential(encoder(2), nn.Linear(8, 3, bias=False)),
        lambda: torch.randn(2, 3, 8),
    ),
}
"""As they are made: ``torch_modules`` has further ones, which are no longer fresh."""


def export_as(module: nn.Module, inputs: Sequence[Tensor], path: Path, way: str) -> Path:
    """Write a module as it is: its modes are kept. ``way``: one of ``WAYS``."""
    options: dict[str, Any] = {"dynamo": True, "optimize": way == "dynamo", "verbose": False}
    options |= {"external_data": False}
    if way == "torchscript":
        mode = torch.onnx.TrainingMode.PRESERVE
        options = {"dynamo": False, "opset_version": 17, "training": mode, "do_constant_folding": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        names = [f"x{number}" for number in range(len(inputs))]
        torch.onnx.export(module, tuple(inputs), str(path), input_names=names, **options)
    return path


def _doubled(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


def losses_of_module(module: nn.Module, inputs: Sequence[Tensor]) -> list[float]:
    """Mean squares of the outputs, summed, in three steps of SGD by PyTorch in float64."""
    module = copy.deepcopy(module).double()
    weights = [weight for weight in module.parameters() if weight.requires_grad]

    def loss() -> Tensor:
        made = tree_leaves(module(*_doubled(inputs)))
        return torch.stack([output.square().mean() for output in made]).sum()

    return in_torch(torch.optim.SGD(weights, lr=RATE), [[loss]] * STEPS)


def losses_of_file(imported: Imported, inputs: Sequence[Tensor]) -> list[float]:
    """The same of what was read, with its own word on what is trained and on running statistics."""
    graph = imported.graph
    values: dict[str, Tensor] = {
        name: torch.as_tensor(np.array(item.read())) for name, item in imported.weights.items()
    }
    trained = [value.name for value in graph.of_role(Role.WEIGHT) if value.name not in imported.frozen]
    losses = []
    for _ in range(STEPS):
        for name in trained:
            values[name] = values[name].detach().requires_grad_()
        found = evaluate(graph, {**values, **dict(zip(imported.inputs, _doubled(inputs), strict=True))})
        loss = torch.stack([found[value].square().mean() for _, value in imported.outputs]).sum()
        gradients = torch.autograd.grad(loss, [values[name] for name in trained], allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            values[name] = values[name] - RATE * (0 if gradient is None else gradient)
        for old, new in graph.updates.items():
            values[old] = found[new].detach()
        losses.append(loss.item())
    return losses


def far(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest difference of losses, relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
