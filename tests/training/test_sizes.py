"""Samples of different sizes train, validate, predict and go on as PyTorch does, each at its own size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor

import oocdl
from oocdl.optim import SGD
from oocdl.storage.dataset.sampling import permutation
from tests.kit import settings
from tests.kit.models import UNet3d

SHAPES = [(9, 8, 10), (16, 12, 8), (7, 5, 6), (12, 8, 8), (16, 12, 8), (5, 6, 7)]
"""Padded to multiples of 4: five sizes of which one is there twice, and the third and the last are one."""
EXACT: dict[str, Any] = {**settings.EXACT, "optimizer": SGD(lr=0.05, momentum=0.9)}
Samples = list[tuple[np.ndarray, np.ndarray]]


def write(path: Path, shapes: Sequence[tuple[int, ...]], seed: int = 0, classes: int = 3) -> Samples:
    """A dataset with a group a sample; returns its content."""
    random = np.random.default_rng(seed)
    group = zarr.open_group(str(path), mode="w")
    names, found = [f"case_{number:03}" for number in range(len(shapes))], []
    for name, shape in zip(names, shapes, strict=True):
        x = random.normal(size=(1, *shape)).astype("float32")
        y = ((x[0] > 0.3) + (random.uniform(size=shape) > 0.8)).astype("uint8")
        for key, data in (("x", x), ("y", np.minimum(y, classes - 1))):
            group.create_array(f"{name}/{key}", data=data, chunks=(4,) * data.ndim)
        found.append((x, y))
    group.attrs["oocdl"] = {"samples": names}
    return found


def padded(samples: Samples, row: int, step: int = 4) -> tuple[Tensor, Tensor]:
    x, y = samples[row]
    pads = [(-extent % step // 2, -extent % step - -extent % step // 2) for extent in y.shape]
    image = torch.from_numpy(np.pad(x, [(0, 0), *pads])).double()
    return image, torch.from_numpy(np.pad(y.astype("int64"), pads, constant_values=-100))


def order(rows: Sequence[int], samples: Samples, epoch: int, batch: int, shuffle: bool) -> list[list[int]]:
    """Batches of one padded size, as they fill; the rest at the end."""
    places = permutation(0, epoch, len(rows)) if shuffle else range(len(rows))
    waiting: dict[Any, list[int]] = {}
    found = []
    for row in (rows[int(place)] for place in places):
        mine = waiting.setdefault(tuple(padded(samples, row)[1].shape), [])
        mine.append(row)
        if len(mine) == batch:
            found.append(list(mine))
            mine.clear()
    return found + [mine for mine in waiting.values() if mine]


def by_torch(
    net: torch.nn.Module, samples: Samples, batches: Sequence[Sequence[int]], accumulate: int
) -> list[float]:
    """Train on batches by PyTorch; returns the losses of steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in itertools.batched(batches, accumulate) if hasattr(itertools, "batched") else _batched(
        batches, accumulate
    ):
        optimizer.zero_grad()
        total = 0.0
        for rows in step:
            x, y = (torch.stack(found) for found in zip(*(padded(samples, row) for row in rows), strict=True))
            loss = F.cross_entropy(net(x), y) / len(step)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def _batched(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def unet(depth: int = 2) -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(base=2, depth=depth, norm="instance", down="maxpool", up="transpose").double().train()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Samples]:
    path = tmp_path_factory.mktemp("data") / "data.zarr"
    return path, write(path, SHAPES)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"shuffle": True, "batch_size": 2, "epochs": 2},
        {"batch_size": 2, "accumulate": 3, "epochs": 2},
        {"parallel": {"space": 2}},
    ],
    ids=str,
)
def test_a_run_is_pytorchs_loop(data: tuple[Path, Samples], tmp_path: Path, how: dict[str, Any]) -> None:
    path, samples = data
    batch, epochs = how.get("batch_size", 1), how.get("epochs", 1)
    net, rows = unet(), range(len(samples))
    run = oocdl.fit(net, path, workdir=tmp_path / "run", **{**EXACT, **how})
    batches = [order(rows, samples, epoch, batch, how.get("shuffle", False)) for epoch in range(epochs)]
    assert [len(found) for found in batches] == [run.plan.course.passes_per_epoch] * epochs
    twin, losses = unet(), []
    optimizer_steps = how.get("accumulate", 1)
    twin_batches = [found for epoch in batches for found in _batched(epoch, optimizer_steps)]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for step in twin_batches:
        optimizer.zero_grad()
        total = 0.0
        for chosen in step:
            x, y = (torch.stack(list(f)) for f in zip(*(padded(samples, r) for r in chosen), strict=True))
            loss = F.cross_entropy(twin(x), y) / len(step)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    np.testing.assert_allclose([row["loss"] for row in run.history], losses, rtol=1e-10)
    run.load_into(net)
    for name, tensor in twin.state_dict().items():
        np.testing.assert_allclose(net.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)
