"""A search whose workers are processes, of what a user has made: a loss, a PyTorch module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from distributed import Client

import oocdl
from tests.kit import nets
from tests.kit.searches import OPTIONS, made_of, workers_in, write_job

SHORT = {**OPTIONS, "trials": 2}
LOSS = "tests.half_squares"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with workers_in(tmp_path_factory.mktemp("workers")) as client:
        yield client


def half_squares(build: oocdl.losses.Builder, prediction: str, target: str) -> str:
    """Half the mean squared error."""
    error = build("Sub", prediction, oocdl.losses.aligned(build, prediction, target))
    return oocdl.losses.mean(build, build("Mul", error, build("Mul", error, build.like(0.5, error))))


def register() -> None:
    oocdl.losses.register(LOSS)(half_squares)


def test_a_loss_of_the_users_has_to_be_registered_on_workers(client: Client, tmp_path: Path) -> None:
    """They make the plans of their trials; without it trials end with an error that names the loss."""
    register()
    model, x = nets.write_mlp(tmp_path / "net.onnx"), nets.vectors(10)["x"]
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": x[:, :3].copy()})
    options = {**SHORT, "loss": LOSS}
    without = oocdl.search(model, data, **options, client=client, workdir=tmp_path / "without")
    assert all(f"InputError: there is no loss '{LOSS}'" in row["error"] for row in without.table)
    client.run(register)
    there = oocdl.search(model, data, **options, client=client, workdir=tmp_path / "there")
    here = oocdl.search(model, data, **options, workdir=tmp_path / "here")
    assert [row["error"] for row in there.table] == [None, None] and made_of(there) == made_of(here)


def test_a_module_is_the_model(client: Client, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    _, data = write_job(tmp_path)
    here = oocdl.search(module, data, **SHORT, workdir=tmp_path / "here")
    there = oocdl.search(module, data, **SHORT, client=client, workdir=tmp_path / "there")
    assert [row["error"] for row in there.table] == [None, None] and made_of(there) == made_of(here)
