"""A loss of your own: the Cauchy loss, as a mean of nodes, of which gradients and cuts follow.

    pip install 'oocdl[torch]'
    python examples/own_loss.py

Writes ``line.zarr`` and the run into the working directory.
"""

from __future__ import annotations

import numpy as np
import torch
import zarr

import oocdl


@oocdl.losses.register("cauchy")
def cauchy(build: oocdl.losses.Builder, prediction: str, target: str) -> str:
    """The mean of ``log(1 + error^2 / 2)``, which grows slowly where a point is far off."""
    error = build("Sub", prediction, oocdl.losses.aligned(build, prediction, target))
    half = build("Mul", build("Mul", error, error), build.like(0.5, error))
    return oocdl.losses.mean(build, build("Log", build("Add", half, build.like(1.0, half))))


def main() -> None:
    """Fit a line through points of which some are far off."""
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    y = x @ np.array([[1.0], [2.0], [-1.0]], "f4")
    y[::16] += 50
    group = zarr.open_group("line.zarr", mode="w")
    group.create_array("input", data=x)
    group.create_array("output", data=y)
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    run = oocdl.fit(net, "line.zarr", loss="cauchy", lr=0.05, epochs=20, batch_size=16, memory="2GiB")
    losses = [row["loss"] for row in run.history]
    print(f"loss {np.mean(losses[:4]):.3f} -> {np.mean(losses[-4:]):.3f}")


if __name__ == "__main__":
    main()
