"""precision="bfloat16": products of 16 bits, everything else in 32; spill_dtype: 16 bits stored."""

from __future__ import annotations

from dataclasses import replace
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
from oocdl.planning.calibrate import store_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.runtime import scheduler
from tests.kit import machine
from tests.kit.machine import Small
from tests.kit.models import UNet3d, export
from tests.kit.nets import write_data
from tests.kit.runs import in_torch, losses_of, refused, same

multiplies = pytest.mark.skipif(
    not get_engine("torch").has_bfloat16, reason="no bfloat16 arithmetic on this processor"
)
STEPS, RATE = 6, 1e-2
Job = tuple[Path, Path]
Arrays = dict[str, np.ndarray[Any, Any]]
QUICK: dict[str, Any] = {"engine": "torch", "memory": "6GiB", "progress": False, "threads": 2}


def network(depth: int) -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(base=8, depth=depth)


def written(folder: Path, depth: int, shape: tuple[int, ...]) -> tuple[Job, Arrays]:
    """A U-Net and its data."""
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    arrays = {"x": x, "y": (x[:, 0] > 0).astype("uint8")}
    model = export(network(depth), (torch.as_tensor(x[:1]),), folder / "net.onnx", dynamic=(0,))
    return (model, write_data(folder / "data.zarr", arrays)), arrays


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Arrays]:
    return written(tmp_path_factory.mktemp("products"), 2, (2, 1, 24, 16, 16))


@pytest.fixture(scope="module")
def job(made: tuple[Job, Arrays]) -> Job:
    return made[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Of what most is spilled in little memory."""
    return written(tmp_path_factory.mktemp("spilled"), 1, (4, 1, 40, 24, 24))[0]


def fit(job: Job, workdir: Path, **options: Any) -> oocdl.Run:
    how = {"precision": "bfloat16", "steps": STEPS, "batch_size": 2, "lr": RATE, "shuffle": False}
    return oocdl.fit(*job, workdir=workdir, **{**QUICK, **how, "loss": "cross_entropy", **options})


def by_pytorch(arrays: Arrays, low: bool) -> list[float]:
    """Losses of eager PyTorch on the same batches, in float32 or under autocast."""
    model = network(2).train()
    x, y = torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["y"]).long()

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            return functional.cross_entropy(model(x).float(), y)

    return in_torch(torch.optim.Adam(model.parameters(), lr=RATE), STEPS * [[loss]])


@multiplies
def test_losses_follow_pytorchs_autocast(made: tuple[Job, Arrays], tmp_path: Path) -> None:
    job, arrays = made
    ours = losses_of(fit(job, tmp_path / "run"))
    autocast, wide = by_pytorch(arrays, True), by_pytorch(arrays, False)
    assert ours != wide and ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, autocast, rtol=2e-2)
    np.testing.assert_allclose(ours, wide, rtol=2e-2)


@multiplies
def test_products_take_16_bits_and_sums_are_of_32(job: Job) -> None:
    how = {"engine": "torch", "memory": "6GiB", "parallel": {"space": (3, 1, 1)}}
    plan = oocdl.plan(*job, precision="bfloat16", **how)
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


@multiplies
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


@multiplies
def test_a_run_predicts_as_it_trains(job: Job, tmp_path: Path) -> None:
    run = fit(job, tmp_path / "run", steps=2)
    found = run.evaluate(job[1], memory="6GiB")
    after = fit(job, tmp_path / "run", steps=3).history[-1]["loss"]
    assert found["loss"] == pytest.approx(after, rel=1e-2)


@pytest.fixture
def _slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is worth avoiding has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    slow = replace(NOMINAL, disk_read_bytes_per_second=1e6, disk_write_bytes_per_second=1e6)
    store_rates("torch", slow)


def fit_small(job: Job, workdir: Path, **options: Any) -> oocdl.Run:
    """Four steps with little memory."""
    how = {**QUICK, "machine": Small(5 << 19, process_bytes=512 << 20), "steps": 4, "seed": 1, **options}
    return machine.fit(*job, workdir=workdir, **how)


ONE_BY_ONE = {"scheduler": lambda *a, **k: scheduler.get(*a, workers=1)}


@pytest.mark.usefixtures("_slow_disk")
def test_half_the_traffic_and_losses_close_to_float32(large: Job, tmp_path: Path) -> None:
    # Tasks run one by one: of two at a time, the quicker one decides how much a step moves.
    plain = fit_small(large, tmp_path / "a", steps=2, **ONE_BY_ONE)
    halved = fit_small(large, tmp_path / "b", spill_dtype="bfloat16", steps=2, **ONE_BY_ONE)
    assert not plain.plan.compiled.bfloat16_values and len(halved.plan.compiled.bfloat16_values) > 5
    moved = [
        sum(row["read_bytes"] + row["written_bytes"] for row in run.history[1:]) for run in (plain, halved)
    ]
    assert 0 < moved[1] < 0.6 * moved[0], moved
    losses = losses_of(plain), losses_of(halved)
    np.testing.assert_allclose(*losses, rtol=1e-2)
    assert losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_disk")
def test_the_same_bits_with_other_schedules_and_after_a_pause(large: Job, tmp_path: Path) -> None:
    run = fit_small(large, tmp_path / "a", spill_dtype="bfloat16")
    assert run.plan.compiled.bfloat16_values
    same(fit_small(large, tmp_path / "b", spill_dtype="bfloat16", **ONE_BY_ONE), run)
    fit_small(large, tmp_path / "c", spill_dtype="bfloat16", steps=2)
    same(fit_small(large, tmp_path / "c", spill_dtype="bfloat16"), run)
    with pytest.raises(InputError, match="spill_dtype"):
        fit_small(large, tmp_path / "c", steps=6)


def test_what_fits_is_not_rounded_and_refusals(job: Job) -> None:
    plan = oocdl.plan(*job, memory="6GiB", engine="torch", spill_dtype="bfloat16")
    assert not plan.compiled.bfloat16_values
    for options, said in (
        ({"spill_dtype": "float16"}, "spill_dtype must be 'bfloat16', got float16"),
        ({"spill_dtype": "bfloat16", "engine": "onnxruntime"}, "spill_dtype needs engine='torch'"),
        ({"precision": "bfloat16", "engine": "onnxruntime"}, "'onnxruntime' has no precision 'bfloat16'"),
    ):
        refused(InputError, said, lambda given=options: oocdl.plan(*job, **given))
