"""Threads that run each unit together: the plan says so, and all who repeat it make the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster

import oocdl
from tests.kit import nets
from tests.kit.models import ResNet, export
from tests.kit.settings import EXACT

SHORT: dict[str, Any] = {**EXACT, "precision": "float32", "batch_size": 4, "optimizer": "adam"}


@pytest.fixture(autouse=True, scope="module")
def _cuts_small_layers_and_loops() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tile_search", "pass_plan", "choice.budget"):
            patch.setattr(f"oocdl.planning.{module}.MIN_PARALLEL_SECONDS", 1e-5)
        patch.setattr("oocdl.fusion.loop_nest.SPLIT_ELEMENTS", 64)
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A network of convolutions and norms, and its images."""
    folder, random = tmp_path_factory.mktemp("job"), np.random.default_rng(0)
    torch.manual_seed(0)
    x = random.normal(size=(8, 3, 24, 24)).astype("float32")
    model = export(ResNet(classes=3), (torch.as_tensor(x[:4]),), folder / "net.onnx", dynamic=(0,))
    return model, nets.write_data(folder / "data.zarr", {"x": x, "y": random.integers(0, 3, 8)})


def train(job: tuple[Path, Path], workdir: Path, **options: Any) -> oocdl.Run:
    return oocdl.fit(*job, workdir=workdir, **{**SHORT, "steps": 4, **options})


def test_short_units_are_run_by_all_threads(job: tuple[Path, Path]) -> None:
    plan, alone = oocdl.plan(*job, **SHORT), oocdl.plan(*job, **{**SHORT, "threads": 1})
    assert plan.compiled.plan.threads == 2 and alone.compiled.plan.threads == 1
    assert "threads 2, which run each unit together" in plan.text()
    assert "each unit together" not in alone.text()
    # Each layer is one unit, as for one thread.
    assert plan.compiled.plan.counts == alone.compiled.plan.counts


@pytest.mark.parametrize("options", [{"parallel": {"batch": 2}}, {"engine": "onnxruntime"}])
def test_units_that_are_cut_as_asked_are_not(job: tuple[Path, Path], options: dict[str, Any]) -> None:
    assert oocdl.plan(*job, **{**SHORT, **options}).compiled.plan.threads == 1


def test_long_units_are_not(job: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocdl.planning.choice.budget.PIECE_SECONDS", 0.0)
    plan = oocdl.plan(*job, **SHORT).compiled.plan
    assert plan.threads == 1 and max(plan.counts) == 2


def test_it_trains_what_one_thread_does(job: tuple[Path, Path], tmp_path: Path) -> None:
    exact = {"precision": "float64", "validation": 0.25, "metrics": ["accuracy"]}
    run, alone = (train(job, tmp_path / str(threads), threads=threads, **exact) for threads in (2, 1))
    assert run.plan.compiled.plan.threads == 2
    assert "val_loss" in run.history[-1]
    for row, other in zip(run.history, alone.history, strict=True):
        for name in row.keys() & {"loss", "val_loss"}:
            assert row[name] == pytest.approx(other[name], rel=1e-12)


def test_others_make_the_same_bits(job: tuple[Path, Path], tmp_path: Path) -> None:
    """Fewer threads, and workers of a cluster."""
    whole = nets.files_of(train(job, tmp_path / "whole"))
    train(job, tmp_path / "parts", steps=2)
    run = train(job, tmp_path / "parts", steps=3, threads=1)
    assert run.plan.compiled.plan.threads == 2
    how: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "memory_limit": 0}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **how) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        run = train(job, tmp_path / "parts", client=client, threads=None)
    assert nets.files_of(run) == whole
