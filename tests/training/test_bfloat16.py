"""precision="bfloat16": products of 16 bits, everything else in 32; losses as PyTorch's autocast has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import oocdl
from oocdl.engines.engine import get_engine
from oocdl.errors import InputError
from oocdl.ops import RULES
from tests.kit.models import UNet3d, export
from tests.kit.nets import write_data
from tests.kit.runs import in_torch, losses_of

if not get_engine("torch").has_bfloat16:
    pytest.skip("no bfloat16 arithmetic on this processor", allow_module_level=True)

STEPS, RATE = 6, 1e-2
Job = tuple[Path, Path]


def network() -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(base=8, depth=2)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray[Any, Any]]:
    x = np.random.default_rng(0).normal(size=(2, 1, 24, 16, 16)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("uint8")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray[Any, Any]]) -> Job:
    folder = tmp_path_factory.mktemp("bfloat16")
    model = export(network(), (torch.as_tensor(arrays["x"][:1]),), folder / "net.onnx", dynamic=(0,))
    return model, write_data(folder / "data.zarr", arrays)


def fit(job: Job, workdir: Path, **options: Any) -> oocdl.Run:
    settings = {"engine": "torch", "memory": "6GiB", "progress": False, "threads": 2, "shuffle": False}
    settings |= {
        "precision": "bfloat16",
        "steps": STEPS,
        "batch_size": 2,
        "lr": RATE,
        "loss": "cross_entropy",
    }
    return oocdl.fit(*job, workdir=workdir, **{**settings, **options})


def by_pytorch(arrays: dict[str, np.ndarray[Any, Any]], low: bool) -> list[float]:
    """Losses of eager PyTorch on the same batches, in float32 or under autocast."""
    model = network().train()
    x, y = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["y"]).long()

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            return functional.cross_entropy(model(x).float(), y)

    return in_torch(torch.optim.Adam(model.parameters(), lr=RATE), STEPS * [[loss]])


def test_losses_follow_pytorchs_autocast(
    job: Job, tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]]
) -> None:
    ours = losses_of(fit(job, tmp_path / "run"))
    autocast, wide = by_pytorch(arrays, True), by_pytorch(arrays, False)
    assert ours != wide and ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, autocast, rtol=2e-2)
    np.testing.assert_allclose(ours, wide, rtol=2e-2)


def test_products_take_16_bits_and_sums_are_of_32(job: Job) -> None:
    plan = oocdl.plan(
        *job, engine="torch", memory="6GiB", precision="bfloat16", parallel={"space": (3, 1, 1)}
    )
    factored = plan.compiled.plan.factored
    values = factored.graph.values
    products = [(node, RULES[node.op].product) for node in factored.graph.nodes]
    low = [(node, fact) for node, fact in products if fact and values[node.inputs[0]].dtype == "bfloat16"]
    assert len(low) > 20
    for node, fact in low:
        assert {values[name].dtype for name in node.inputs} == {"bfloat16"}
        assert values[node.outputs[0]].dtype == ("bfloat16" if fact.makes_data else "float32")
    stored = [(name, layer.layer) for layer in plan.compiled.plan.layers for name in layer.layer.stores]
    assert all(values[name].dtype != "bfloat16" for name, layer in stored if name in layer.partials)
    large = {name: values[name].dtype for name, _ in stored if values[name].shape[-2:] == (16, 16)}
    assert large and not [name for name, dtype in large.items() if dtype != "bfloat16"]
    assert {values[name].dtype for name in plan.compiled.pieces} == {"float32"}


@pytest.mark.slow
def test_cuts_change_little_and_schedules_nothing(job: Job, tmp_path: Path) -> None:
    cut: dict[str, Any] = {"parallel": {"space": (3, 2, 1)}}
    whole, first = fit(job, tmp_path / "a"), fit(job, tmp_path / "b", **cut)
    np.testing.assert_allclose(losses_of(whole), losses_of(first), rtol=2e-2)
    fit(job, tmp_path / "c", steps=2, **cut)
    again = fit(job, tmp_path / "c", **cut)
    for name, array in first.weights.items():
        assert array.dtype == np.float32
        assert np.array_equal(array, again.weights[name]), name


def test_a_run_predicts_as_it_trains(
    job: Job, tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]]
) -> None:
    run = fit(job, tmp_path / "run", steps=2)
    found = run.evaluate(job[1], memory="6GiB")
    after = fit(job, tmp_path / "run", steps=3).history[-1]["loss"]
    assert found["loss"] == pytest.approx(after, rel=1e-2)


def test_refusals(job: Job) -> None:
    with pytest.raises(InputError, match="engine 'onnxruntime' has no precision 'bfloat16'"):
        oocdl.plan(*job, engine="onnxruntime", precision="bfloat16")
    with pytest.raises(InputError, match="precision must be"):
        oocdl.plan(*job, precision="float16")
