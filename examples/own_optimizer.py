"""An optimizer of your own: Signum, which steps by the sign of the momentum (arXiv:1802.04434).

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


@oocdl.optim.register("signum", state={"momentum": 0.0})
def signum(build: Builder, weight: str, gradient: str, state: Names, scalars: Names) -> tuple[str, Names]:
    """Add the gradient to the momentum, step by the sign of that, and keep it for the next step."""
    kept = build("Mul", state["momentum"], build.like(0.9, weight))
    momentum = build("Add", kept, build("Mul", gradient, build.like(0.1, weight)))
    zero = build.like(0.0, weight)
    up, down = (build("Cast", build(op, momentum, zero), to=build.dtype(zero)) for op in ("Greater", "Less"))
    sign = build("Sub", up, down)
    return build("Sub", weight, build("Mul", sign, scalars["lr"])), {"momentum": momentum}


def main() -> None:
    """Fit a line through points, with a learning rate that falls to zero."""
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    group = zarr.open_group("line.zarr", mode="w")
    group.create_array("input", data=x)
    group.create_array("output", data=x @ np.array([[1.0], [2.0], [-1.0]], "f4"))
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = Own("signum", lr=Cosine(0.1, 80))  # with the rate as it is, optimizer="signum", lr=0.1
    run = oocdl.fit(
        net, "line.zarr", loss="mse", optimizer=optimizer, epochs=20, batch_size=16, memory="2GiB"
    )
    losses = [row["loss"] for row in run.history]
    print(f"loss {np.mean(losses[:4]):.4f} -> {np.mean(losses[-4:]):.4f}")


if __name__ == "__main__":
    main()
