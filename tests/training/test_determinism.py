"""One plan, the same bits: whatever the number of workers, the scheduler, and how much is spilled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dask.threaded
import numpy as np
import pytest
import torch

import oocdl
from oocdl.runtime import scheduler
from tests.kit.machine import THIS, Small, fit
from tests.kit.models import ResNet, UNet3d, export
from tests.kit.nets import files_of, write_data

pytestmark = pytest.mark.usefixtures("planned_once")

MAKES: Mapping[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet3d(base=4, depth=1, dropout=0.2), (1, 12, 8, 8)),
    "resnet": (lambda: ResNet(classes=3), (3, 12, 16)),
}
Bits = dict[str, bytes]
PLANNED: dict[str, Any] = {
    "batch_size": 2, "memory": "6GiB", "threads": 2, "parallel": {"batch": 2, "space": (2,), "channels": 2},
}  # fmt: skip


class Bench:
    """A network and its dataset; trains two steps in many ways on one plan."""

    def __init__(self, folder: Path, name: str) -> None:
        make, shape = MAKES[name]
        torch.manual_seed(0)
        random = np.random.default_rng(0)
        x = random.normal(size=(6, *shape)).astype("float32")
        y = (x[:, 0] > 0).astype("uint8") if len(shape) == 4 else random.integers(1, 3, size=6)
        self.model = export(make(), (torch.as_tensor(x[:2]),), folder / "net.onnx", dynamic=(0,))
        self.data, self.folder, self.runs = write_data(folder / "data.zarr", {"x": x, "y": y}), folder, 0

    def train(self, engine: str, machine: Small = THIS, **options: Any) -> tuple[Bits, oocdl.Run]:
        """Final weights, state and losses as bytes."""
        self.runs += 1
        settings = {**PLANNED, "engine": engine, "steps": 2, "progress": False, "seed": 3}
        settings |= {"workdir": self.folder / f"run{self.runs}", "optimizer": "adam"}
        run = fit(self.model, self.data, machine=machine, **{**settings, **options})
        bits = files_of(run)
        assert len(bits) > 20 and any(np.frombuffer(b, "float32").any() for b in bits.values())
        return bits | {f"loss {row['step']}": np.float64(row["loss"]).tobytes() for row in run.history}, run


@pytest.fixture(scope="module", params=["unet", pytest.param("resnet", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), request.param)


@functools.cache
def _reference(bench: Bench, engine: str) -> Bits:
    return bench.train(engine, scheduler=functools.partial(scheduler.get, workers=1))[0]


def test_a_process_that_takes_too_much_makes_equal_bits(bench: Bench) -> None:
    """Then units run one after the other and chunks leave memory, the run says so once, and goes on."""
    machine = Small(process_bytes=300 << 20, capacity_bytes=64 << 20, over_bytes=15 << 20)
    with pytest.warns(RuntimeWarning, match="more than was predicted") as told:
        bits, run = bench.train("torch", machine)
    assert bits == _reference(bench, "torch")
    assert len(told) == 1
    assert sum(row["written_bytes"] for row in run.history) > 0


def differing(bits: Bits, other: Bits) -> list[str]:
    assert bits.keys() == other.keys()
    return [name for name in bits if bits[name] != other[name]]


WAYS: dict[str, dict[str, Any]] = {
    "own get": {},  # three workers
    "window of 1": {"scheduler": functools.partial(scheduler.get, workers=4, window=1)},
    "dask.threaded": {"scheduler": functools.partial(dask.threaded.get, num_workers=4)},
}


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        ("torch", "own get"),
        ("torch", "window of 1"),
        pytest.param("torch", "dask.threaded", marks=pytest.mark.slow),
        pytest.param("onnxruntime", "own get", marks=pytest.mark.slow),
    ],
)
def test_the_schedule_does_not_change_a_bit(engine: str, way: str, bench: Bench) -> None:
    assert differing(_reference(bench, engine), bench.train(engine, **WAYS[way])[0]) == []


@pytest.mark.parametrize("engine", ["torch", pytest.param("onnxruntime", marks=pytest.mark.slow)])
def test_spilling_does_not_change_a_bit(engine: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier just large enough for its units, so that most of what a step makes goes through the disk."""
    reference = _reference(bench, engine)
    roomy = oocdl.plan(bench.model, bench.data, engine=engine, **PLANNED)
    unit = roomy.compiled.plan.peak_unit_bytes
    # Nothing is counted of the process, and units are the same however fast smaller ones would be.
    monkeypatch.setattr("oocdl.planning.machine.TASK_BYTES", 1)
    monkeypatch.setattr("oocdl.planning.choice.budget.OTHER_UNITS_TIME_RATIO", 0.0)
    monkeypatch.setattr("oocdl.planning.machine.Machine.unit_bytes", unit)
    bits, run = bench.train(engine, Small(capacity_bytes=2 * unit, process_bytes=300 << 20))
    assert differing(reference, bits) == []
    rows = run.history
    assert any(row["written_bytes"] > 0 for row in rows), "nothing was spilled"
    assert run.plan.machine.capacity_bytes == 2 * unit
    assert rows[-1]["peak_bytes"] - run.plan.machine.base_bytes <= 2 * unit
