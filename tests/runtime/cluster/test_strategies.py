"""A pipeline and a mixture over two processes of a Dask client, relays over four: the bits of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import oocdl
from oocdl.planning.calls import UnitCall
from oocdl.planning.choice import host_search
from oocdl.planning.hosts import relays
from oocdl.planning.hosts.exchange import exchange, homes_of
from oocdl.planning.hosts.placement import place
from oocdl.transforms import RandSpatialCrop
from tests.kit import nets
from tests.kit.placed import worker_of
from tests.kit.runs import same
from tests.kit.searches import workers_in
from tests.kit.settings import QUICK

Train = Callable[..., oocdl.Run]
OPTIONS: dict[str, Any] = {**QUICK, "memory": "3GiB", "engine": "torch", "steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two workers, a process and a thread each."""
    with workers_in(tmp_path_factory.mktemp("workers")) as client:
        yield client


@pytest.fixture
def train(client: Client, tmp_path: Path) -> Train:
    """Train on the workers, and in this process by the same plan, which makes the same bits."""

    def trained(job: tuple[Path, Path], workers: Client = client, **options: Any) -> oocdl.Run:
        how = {**OPTIONS, **options}
        there = oocdl.fit(*job, workdir=tmp_path / "there", client=workers, **how)
        here = oocdl.fit(*job, workdir=tmp_path / "here", plan=there.plan, **how)
        same(there, here)
        names = ("val_loss", "val_dice")
        rows = [[[row.get(name) for name in names] for row in run.history] for run in (there, here)]
        assert rows[0] == rows[1]
        return there

    return trained


@pytest.mark.parametrize("kind", ["mixture", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_two_processes_make_the_bits_of_one(train: Train, tmp_path: Path, kind: str) -> None:
    """Layers that are cut in nothing, and layers in batch and channels; units are on both workers."""
    if kind == "pipeline":
        model = nets.write_conv(tmp_path / "conv.onnx", channels=64, layers=5)
        job = model, nets.write_data(tmp_path / "data.zarr", nets.volumes(2, 6))
        there = train(job, parallel={"batch": 1}, batch_size=1)
    else:
        job = nets.write_conv_and_dense(tmp_path, samples=16, size=32, width=256)
        there = train(job, parallel={"batch": 2, "channels": 2}, batch_size=8)
    compiled = there.plan.compiled
    maker = worker_of(place(compiled.graph, 2, 1))
    units = [call for call in compiled.graph.calls if isinstance(call, UnitCall)]
    assert {maker[call.key] for call in units} == {0, 1}
    if kind == "pipeline":
        stages = [maker[call.key] for call in units if call.key.layer.startswith("conv")]
        assert stages == sorted(stages) and set(stages) == {0, 1}
        assert len(stages) == sum(one.layer.name.startswith("conv") for one in compiled.plan.layers)
    else:
        names = compiled.plan.classes.names
        cut = {names[n] for one in compiled.plan.layers for n, count in one.grid.items() if count > 1}
        assert {name.rstrip("0123456789") for name in cut} == {"batch", "channels"}


@pytest.mark.slow
def test_weights_that_are_cut_make_the_bits_of_one(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide perceptron, without asking for cuts: both workers have a part of each matrix, in all passes."""
    monkeypatch.setattr(host_search, "MIN_HOST_SECONDS", 0)
    model = nets.write_mlp(tmp_path / "mlp.onnx", (2048, 2048, 2048))
    rng = np.random.default_rng(5)
    arrays = {"x": rng.standard_normal((320, 2048), np.float32), "y": rng.integers(0, 2048, 320)}
    job = model, nets.write_data(tmp_path / "data.zarr", arrays, chunks=320)
    there = train(job, batch_size=128, accumulate=2)
    compiled = there.plan.compiled
    homes = homes_of([place(compiled.graph, 2, 1)])
    for name in ("w1", "w2"):
        assert {home for key, home in homes.items() if key.value == name} == {0, 1}
    plans = [one.plan for one in there.plan.kinds.values()]
    cut = {tuple(plan.classes.names[number] for number in plan.cuts) for plan in plans}
    assert len(plans) > 2 and cut == {("channels1",)}


def test_a_worker_that_gets_no_work_changes_no_bits(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What travels between two would take longer than all the work: one of them does it, and commits."""
    monkeypatch.setattr(host_search, "MIN_HOST_SECONDS", 0)
    model = nets.write_conv(tmp_path / "conv.onnx", channels=8, layers=3)
    job = model, nets.write_data(tmp_path / "data.zarr", nets.volumes(5, 12))
    there = train(job, batch_size=2, steps=3, accumulate=2)
    assert {one.plan.hosts for one in there.plan.kinds.values()} == {1}


@pytest.mark.slow
def test_what_goes_by_way_of_others_makes_the_bits_of_one(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of one branch, so that four workers have relays: weights are passed on, gradients collected."""
    monkeypatch.setattr(relays, "FAN", 1)
    job = nets.write_conv_and_dense(tmp_path, samples=16, size=16, width=64)
    with workers_in(tmp_path / "workers", count=4) as four:
        there = train(job, four, parallel={"batch": 4}, batch_size=8)
    placed = place(there.plan.compiled.graph, 4)
    made = exchange(placed, homes_of([placed]), 4)
    where = {**made.homes, **worker_of(placed)}
    passed_on = [item for one in made.bundles for item in one.items if where[item] != one.sender]
    assert {item in made.homes for item in passed_on} == {True, False}


@pytest.mark.parametrize("augment", [None, (RandSpatialCrop((6, 6, 4), 0.5), "nnunet")], ids=type)
def test_samples_of_different_sizes_make_the_same_bits(train: Train, tmp_path: Path, augment: Any) -> None:
    """Volumes of three sizes, accumulated, with validations: plans of several sizes on two processes."""
    model = nets.write_conv(tmp_path / "conv.onnx", channels=8, layers=2)
    data = nets.write_samples(tmp_path / "data.zarr", [(8, 6, 6), (10, 6, 6), (8, 6, 6), (6, 6, 6)])
    options = {"accumulate": 2, "epochs": 2, "steps": None, "validation": [3], "metrics": "dice"}
    there = train((model, data), augment=augment, **options)
    assert ("first@8x6x6" in there.plan.kinds) == (augment is None)
    assert list(there.plan.validation) == ["validation@6x6x6"]
