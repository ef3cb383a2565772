"""A search whose workers are processes, of what a user has made: a loss, a PyTorch module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import pytest
import torch
from distributed import Client

import oocdl
from oocdl.errors import InputError
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import KNOWN, OPTIMIZERS
from oocdl.ops.own_loss import FORMULAS
from oocdl.space import LogUniform
from tests.kit import nets
from tests.kit.searches import OPTIONS, made_of, workers_in

SHORT = {**OPTIONS, "trials": 2}
LOSS, OPTIMIZER = "tests.half_squares", "tests.plain"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with workers_in(tmp_path_factory.mktemp("workers")) as client:
        yield client


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test registers is gone after it."""
    held = [(known, dict(known)) for known in (LOSSES, FORMULAS, OPTIMIZERS, KNOWN)]
    yield
    for known, before in held:
        known.clear()
        known.update(before)


def half_squares(build: oocdl.losses.Builder, prediction: str, target: str) -> str:
    """Half the mean squared error."""
    error = build("Sub", prediction, oocdl.losses.aligned(build, prediction, target))
    return oocdl.losses.mean(build, build("Mul", error, build("Mul", error, build.like(0.5, error))))


def doubling(build: oocdl.ops.Builder, x: str) -> str:
    """x + x."""
    return build("Add", x, x)


def plain(
    build: oocdl.optim.Builder,
    weight: str,
    gradient: str,
    state: Mapping[str, str],
    scalars: Mapping[str, str],
) -> tuple[str, Mapping[str, str]]:
    """The weight less the gradient, times the learning rate."""
    return build("Sub", weight, build("Mul", gradient, scalars["lr"])), {}


@pytest.mark.usefixtures("own_operators")
def test_what_is_registered_is_sent_to_workers(client: Client, tmp_path: Path) -> None:
    """They make the plans of their trials, and know nothing of it by themselves, nor its module."""
    oocdl.losses.register(LOSS)(half_squares)
    oocdl.optim.register(OPTIMIZER)(plain)
    oocdl.ops.register("tests::Doubling")(doubling)
    text = """<ir_version: 8, opset_import: ["" : 18, "tests" : 1]>
        g (float[N,6] x) => (float[N,3] y) <float[6,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}>
        { a = tests.Doubling(x)  y = MatMul(a, w) }"""
    model, x = tmp_path / "net.onnx", nets.vectors(10)["x"]
    onnx.save(onnx.parser.parse_model(text), str(model))
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": x[:, :3].copy()})
    options = {**SHORT, "loss": LOSS, "optimizer": OPTIMIZER, "space": {"lr": LogUniform(1e-4, 1e-2)}}
    there = oocdl.search(model, data, **options, client=client, workdir=tmp_path / "there")
    assert not any(client.run(lambda name: name in sys.modules, __name__).values())
    here = oocdl.search(model, data, **options, workdir=tmp_path / "here")
    assert [row["error"] for row in there.table] == [None, None] and made_of(there) == made_of(here)


def test_what_cannot_be_sent_is_refused_before_the_first_trial(client: Client, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(build: oocdl.losses.Builder, prediction: str, target: str) -> str:
        with lock:
            return half_squares(build, prediction, target)

    oocdl.losses.register(LOSS)(locked)
    with pytest.raises(InputError, match=f"{LOSS}.* cannot be sent to workers .*lock"):
        oocdl.search(*nets.write_job(tmp_path), **SHORT, client=client, workdir=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_module_is_the_model(client: Client, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    _, data = nets.write_job(tmp_path)
    here = oocdl.search(module, data, **SHORT, workdir=tmp_path / "here")
    there = oocdl.search(module, data, **SHORT, client=client, workdir=tmp_path / "there")
    assert [row["error"] for row in there.table] == [None, None] and made_of(there) == made_of(here)
