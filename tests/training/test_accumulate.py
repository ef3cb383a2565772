"""Gradients of several passes make a step: what random courses do not show, beside PyTorch in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oocdl
from oocdl.optim import SGD, Adam
from oocdl.planning.passes import FIRST, MAIN, RAGGED
from oocdl.planning.task_key import TaskKind
from oocdl.presets.unets import write_unet3d
from oocdl.runtime import scheduler
from tests.kit import nets, settings
from tests.kit.machine import Small, fit
from tests.kit.models import export
from tests.kit.runs import in_torch, losses_of, same, trained_as

EXACT = {**settings.EXACT, "loss": "cross_entropy"}


class TwoLayers(nn.Module):
    """``nets.write_mlp``."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        for name, array in weights.items():
            self.register_parameter(name, nn.Parameter(torch.as_tensor(array).double()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x @ self.w1.T + self.b1)
        found: Tensor = hidden @ self.w2.T + self.b2
        return found


def check(
    run: oocdl.Run, module: nn.Module, arrays: dict[str, Any], batch: int, k: int, clip: float | None = None
) -> None:
    """Two epochs of Adam are those of PyTorch's users, ``(loss / k).backward()``."""
    x, y = torch.as_tensor(arrays["x"]).double(), torch.as_tensor(arrays["y"])
    optim = torch.optim.Adam(module.parameters(), lr=0.01)
    if clip is not None:
        optim.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(module.parameters(), clip) and None)

    def loss(rows: slice) -> Tensor:
        return nn.functional.cross_entropy(module(x[rows]), y[rows])

    passes = [functools.partial(loss, slice(at, at + batch)) for at in range(0, len(x), batch)]
    losses = in_torch(optim, 2 * [passes[at : at + k] for at in range(0, len(passes), k)])
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-10)
    trained_as(run, module, rtol=1e-10)


@pytest.mark.parametrize(("k", "clip"), [(2, None), (3, 0.5)])
def test_out_of_core(k: int, clip: float | None, tmp_path: Path) -> None:
    """Weights in a dozen pieces and a tier of two units: sums and full gradients go through the disk.

    The ragged batch of one sample is cut otherwise than the full one, so its updates are cut anew.
    """
    sizes = (64, 96, 32)
    x = np.random.default_rng(0).normal(0, 0.1, (33, 64)).astype("f4")  # no class is ever quite certain
    arrays = {"x": x, "y": np.argmax(x[:, :32], axis=1)}
    data = nets.write_data(tmp_path / "data.zarr", arrays)
    model = nets.write_mlp(tmp_path / "mlp.onnx", sizes)
    how = {**EXACT, "threads": 1, "batch_size": 16, "optimizer": Adam(lr=0.01, clip_norm=clip), "epochs": 2}
    run = fit(model, data, machine=Small(120_000, 300 << 20), accumulate=k, **how)
    calls = run.plan.kinds[RAGGED].graph.calls
    assert any(call.key.kind is TaskKind.RECUT for call in calls)
    assert len(run.plan.compiled.pieces["w1"]) > 10
    for row in run.history:
        assert row["written_bytes"] > 0, "nothing was spilled"
        assert row["peak_bytes"] <= run.plan.machine.base_bytes + 120_000
    check(run, TwoLayers(nets.mlp_weights(sizes)), arrays, 16, k, clip)


def test_passes_of_a_batch_are_a_batch_of_all(tmp_path: Path) -> None:
    mlp = nets.write_job(tmp_path, 12)
    options = {**EXACT, "shuffle": True, "epochs": 3, "optimizer": SGD(lr=0.5), "keep": ["grad/w1"]}
    one = oocdl.fit(*mlp, workdir=tmp_path / "one", batch_size=6, **options)
    three = oocdl.fit(*mlp, workdir=tmp_path / "three", batch_size=2, accumulate=3, **options)
    rows = [(row["step"], row["epoch"]) for row in three.history]
    assert rows == [(row["step"], row["epoch"]) for row in one.history] == [(n + 1, n // 2) for n in range(6)]
    np.testing.assert_allclose(losses_of(three), losses_of(one), rtol=1e-10)
    for name in ("w1", "b1", "w2", "b2"):
        np.testing.assert_allclose(three.weights[name][...], one.weights[name][...], rtol=1e-10, atol=1e-12)
    # The gradient that is kept is the step's, not the last pass's.
    np.testing.assert_allclose(three.kept["grad/w1"][...], one.kept["grad/w1"][...], rtol=1e-9, atol=1e-13)
    assert {t.spec.name for t in three._store.current().tensors.values()} == {"w1", "b1", "w2", "b2"}


def test_each_pass_draws_its_own_numbers(tmp_path: Path) -> None:
    """A step's loss is the mean over passes whose dropout differs, although their samples are the same."""
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 3))
    model = export(module, (torch.ones(1, 32),), tmp_path / "net.onnx", dynamic=(0,))
    data = nets.write_data(tmp_path / "data.zarr", {"x": np.ones((4, 32), "f4"), "y": np.zeros(4, np.int64)})
    options = {**EXACT, "optimizer": SGD(lr=0.0), "epochs": 2}
    losses = losses_of(oocdl.fit(model, data, workdir=tmp_path / "single", **options))
    double = oocdl.fit(model, data, workdir=tmp_path / "double", accumulate=2, **options)
    assert len(set(losses)) == 8
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    np.testing.assert_allclose(losses_of(double), means, rtol=1e-12)


class Groups(nn.Module):
    """Groups of channels, whose two letters only the update carries to each weight, and a layer of time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 6, 3, stride=2, groups=2)
        self.time = nn.GRU(6, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.time(self.up(x).flatten(2).transpose(1, 2))[0]).transpose(1, 2)
        return found


@pytest.mark.parametrize("cuts", ["auto", {"channels": 2}])
def test_weights_are_split_alike_in_all_passes_of_a_step(cuts: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Groups()
    model = export(module, (torch.zeros(1, 2, 2, 2),), tmp_path / "net.onnx", dynamic=(0,))
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(5, 2, 2, 2)).astype("f4"), "y": random.integers(0, 2, (5, 25))}
    data = nets.write_data(tmp_path / "data.zarr", arrays)
    options = {**EXACT, "optimizer": Adam(lr=0.01), "parallel": cuts, "batch_size": 2, "accumulate": 2}
    run = oocdl.fit(model, data, workdir=tmp_path / "run", epochs=2, **options)
    check(run, module.double(), arrays, 2, 2)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Convolutions with batch norms, and eight volumes."""
    folder = tmp_path_factory.mktemp("net")
    model = write_unet3d(folder / "unet.onnx", base=2, depth=0, classes=2, norm="batch")
    return model, nets.write_data(folder / "data.zarr", nets.volumes(8, 6))


def test_a_step_that_is_stopped_half_way_leaves_no_trace(job: tuple[Path, Path], tmp_path: Path) -> None:
    """Running statistics move with every pass; a commit has those of whole steps only."""
    options: dict[str, Any] = {**EXACT, "accumulate": 3, "steps": 4, "optimizer": Adam(lr=0.01)}
    whole = oocdl.fit(*job, workdir=tmp_path / "whole", **options)

    def get(graph: Any, keys: Any, **given: Any) -> Any:
        """Our own ``get``, with Ctrl-C pressed in one pass."""
        left.pop()
        if not left:
            raise KeyboardInterrupt
        return scheduler.get(graph, keys, **given)

    for at in (4, 5, 6):  # the first pass of the second step, the middle one, the last
        left, there = list(range(at)), {**options, "workdir": tmp_path / f"run{at}"}
        with pytest.raises(KeyboardInterrupt):
            oocdl.fit(*job, scheduler=get, **there)
        assert oocdl.open(tmp_path / f"run{at}").steps == 1
        same(oocdl.fit(*job, **there), whole)


def test_the_plan_counts_all_passes_and_a_delayed_takes_them(job: tuple[Path, Path], tmp_path: Path) -> None:
    options = {**EXACT, "batch_size": 2, "accumulate": 4, "parallel": {"space": (2,)}}
    run = oocdl.fit(*job, workdir=tmp_path / "run", **options)
    plan = run.plan
    first, main = plan.kinds[FIRST].plan, plan.kinds[MAIN].plan
    assert plan.read_bytes == 3 * first.read_bytes + main.read_bytes
    assert plan.tasks == 3 * first.tasks + main.tasks
    (row,) = run.history
    assert row["unit_read_bytes"] == plan.read_bytes and row["unit_written_bytes"] == plan.written_bytes
    assert row["peak_bytes"] <= plan.peak_bytes
    assert "batch 2 x 4 passes" in str(plan)
    assert plan.delayed(0).compute(scheduler="threads") == pytest.approx(row["loss"], rel=1e-12)
