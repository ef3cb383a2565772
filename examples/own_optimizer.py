"""An optimizer of your own: Lion, which steps by the sign of what it has gathered (arXiv:2302.06675).

    pip install 'oocdl[torch]'
    python examples/own_optimizer.py

Writes ``line.zarr`` and the run into the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import zarr

import oocdl
from oocdl.optim import Builder, Cosine, Own

Names = Mapping[str, str]


@oocdl.optim.register("lion", state={"momentum": 0.0})
def lion(build: Builder, weight: str, gradient: str, state: Names, scalars: Names) -> tuple[str, Names]:
    """Mix gradient and momentum, step by the sign of that, and keep the momentum for the next step."""

    def mixed(share: float) -> str:
        kept = build("Mul", state["momentum"], build.like(share, weight))
        return build("Add", kept, build("Mul", gradient, build.like(1 - share, weight)))

    mix, zero = mixed(0.9), build.like(0.0, weight)
    up, down = (build("Cast", build(op, mix, zero), to=build.dtype(mix)) for op in ("Greater", "Less"))
    sign = build("Sub", up, down)
    return build("Sub", weight, build("Mul", sign, scalars["lr"])), {"momentum": mixed(0.99)}


def main() -> None:
    """Fit a line through points, with a learning rate that falls to zero."""
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    group = zarr.open_group("line.zarr", mode="w")
    group.create_array("input", data=x)
    group.create_array("output", data=x @ np.array([[1.0], [2.0], [-1.0]], "f4"))
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = Own("lion", lr=Cosine(0.1, 80))  # with the rate as it is, optimizer="lion", lr=0.1
    run = oocdl.fit(
        net, "line.zarr", loss="mse", optimizer=optimizer, epochs=20, batch_size=16, memory="2GiB"
    )
    losses = [row["loss"] for row in run.history]
    print(f"loss {np.mean(losses[:4]):.4f} -> {np.mean(losses[-4:]):.4f}")


if __name__ == "__main__":
    main()
