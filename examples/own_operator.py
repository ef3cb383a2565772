"""An operator of your own: Snake, a periodic activation (arXiv:2006.08195) that ONNX does not have.

    pip install 'oocdl[torch]'
    python examples/own_operator.py

Writes ``wave.onnx``, ``wave.zarr`` and the run into the working directory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import zarr

import oocdl


class SnakeFunction(torch.autograd.Function):
    """x + sin²(αx)/α in PyTorch, which exports it as one node of the domain "audio"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, alpha)
        return x + torch.sin(alpha * x) ** 2 / alpha

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (slope,), (x, alpha) = slopes, ctx.saved_tensors
        wave = torch.sin(2 * alpha * x)
        of_alpha = slope * (x * wave / alpha - (torch.sin(alpha * x) / alpha) ** 2)
        return slope * (1 + wave), of_alpha.sum(0)

    @staticmethod
    def symbolic(graph: Any, x: Any, alpha: Any) -> Any:
        return graph.op("audio::Snake", x, alpha, power_i=2).setType(x.type())


@oocdl.ops.register("audio::Snake")
def snake(build: oocdl.ops.Builder, x: str, alpha: str, *, power: int) -> str:
    """The same as nodes, of which the gradients of x and alpha follow."""
    wave = build("Pow", build("Sin", build("Mul", x, alpha)), build.like(power, x))
    return build("Add", x, build("Div", wave, alpha))


class Snake(torch.nn.Module):
    """The layer, with a frequency for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = SnakeFunction.apply(x, self.alpha)
        return made


def trained_by_pytorch(net: torch.nn.Module, x: np.ndarray, y: np.ndarray) -> list[float]:
    """Losses of the same steps in PyTorch."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    for start in [*range(0, 64, 16)] * 20:
        given, wanted = (torch.from_numpy(array[start : start + 16]) for array in (x, y))
        loss = torch.nn.functional.mse_loss(net(given), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Learn a wave on a slope, and compare with PyTorch."""
    x = np.random.default_rng(0).uniform(-3, 3, size=(64, 1)).astype("f4")
    y = np.sin(2 * x) + 0.5 * x
    group = zarr.open_group("wave.zarr", mode="w")
    group.create_array("input", data=x)
    group.create_array("output", data=y)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), Snake(16), torch.nn.Linear(16, 1))
    torch.onnx.export(
        net, (torch.zeros(2, 1),), "wave.onnx", input_names=["input"], output_names=["output"],
        dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}}, custom_opsets={"audio": 1},
        training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False, dynamo=False,
    )  # fmt: skip
    run = oocdl.fit(
        "wave.onnx", "wave.zarr", loss="mse", optimizer="sgd", lr=0.05, epochs=20, batch_size=16,
        shuffle=False, memory="2GiB",
    )  # fmt: skip
    losses, truth = [row["loss"] for row in run.history], trained_by_pytorch(net, x, y)
    print(f"loss {np.mean(losses[:4]):.4f} -> {np.mean(losses[-4:]):.4f}")
    print(f"farthest from PyTorch's: {np.abs(np.subtract(losses, truth)).max():.1e}")


if __name__ == "__main__":
    main()
