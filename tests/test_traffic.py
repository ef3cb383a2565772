"""What units move is what the plan says, to the byte, and what is counted never exceeds the tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocdl.graph.ir import Role
from oocdl.graph.rule import Builder
from oocdl.ops import RULES
from oocdl.testing import run_graph
from tests.test_exact_networks import CUTS, EVEN, NETS, ODD, Job, prepare, unet


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durability is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    nets = {**NETS, "unet": unet(*EVEN[0]), "odd-unet": unet(*ODD[0])}
    return {name: prepare(net, tmp_path_factory.mktemp(name)) for name, net in nets.items()}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "two-heads", "unet", "odd-unet"])
def test_measured_bytes_are_the_planned_ones(
    name: str, cut: str, jobs: dict[str, Job], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"threads": 1} if CUTS[cut] is None else {"parallel": CUTS[cut]}
    run = jobs[name].fit(tmp_path / "run", steps=3, precision="float32", **options)
    plan, ragged = run.plan, run.plan.ragged.plan
    for row, planned in zip(run.history, (plan, plan, ragged), strict=True):
        assert row["unit_read_bytes"] == planned.read_bytes
        assert row["unit_written_bytes"] == planned.written_bytes
        assert row["peak_bytes"] <= plan.peak_bytes
        assert row["read_bytes"] == row["written_bytes"] == 0  # all of it fits


def test_an_accepted_plan_runs_when_partial_results_are_many() -> None:
    build = Builder(RULES)
    x = build.value("x", (4096, 256), "float64", Role.INPUT)
    y = build.value("y", (4096, 64), "float64", Role.INPUT)
    build.outputs = [build("Einsum", x, y, equation="na,nb->ab")]
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(4096, 256)), "y": random.normal(size=(4096, 64))}
    unit = 600_000
    ran = run_graph(build.graph(), RULES, arrays, unit_bytes=unit, capacity_bytes=3 * unit)
    found = next(iter(ran.outputs.values()))
    np.testing.assert_allclose(found, arrays["x"].T @ arrays["y"], rtol=1e-10, atol=1e-10)
    assert ran.peak_bytes <= 3 * unit
