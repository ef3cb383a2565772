"""16-bit storage: half the traffic, the same bits whatever is spilled, losses close to float32's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oocdl
from oocdl.errors import InputError
from oocdl.planning.calibrate import store_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.runtime import scheduler
from tests.kit.machine import Small, fit
from tests.kit.models import UNet3d, export
from tests.kit.nets import write_data
from tests.kit.runs import losses_of, same

Job = tuple[Path, Path]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("rounded")
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(4, 1, 40, 24, 24)).astype("float32")
    model = export(UNet3d(base=8, depth=1), (torch.as_tensor(x[:1]),), folder / "net.onnx", dynamic=(0,))
    return model, write_data(folder / "data.zarr", {"x": x, "y": (x[:, 0] > 0).astype("uint8")})


@pytest.fixture
def _slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is worth avoiding has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    slow = replace(NOMINAL, disk_read_bytes_per_second=1e6, disk_write_bytes_per_second=1e6)
    store_rates("torch", slow)


def fit_small(job: Job, workdir: Path, **options: Any) -> oocdl.Run:
    """Four steps with little memory."""
    settings = {"engine": "torch", "steps": 4, "memory": "6GiB", "progress": False, "threads": 2, "seed": 1}
    return fit(
        *job, machine=Small(5 << 19, process_bytes=512 << 20), workdir=workdir, **{**settings, **options}
    )


ONE_BY_ONE = {"scheduler": lambda *a, **k: scheduler.get(*a, workers=1)}


@pytest.mark.usefixtures("_slow_disk")
def test_half_the_traffic_and_losses_close_to_float32(job: Job, tmp_path: Path) -> None:
    # Tasks run one by one: of two at a time, the quicker one decides how much a step moves.
    plain = fit_small(job, tmp_path / "a", steps=2, **ONE_BY_ONE)
    halved = fit_small(job, tmp_path / "b", spill_dtype="bfloat16", steps=2, **ONE_BY_ONE)
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
def test_the_same_bits_with_other_schedules_and_after_a_pause(job: Job, tmp_path: Path) -> None:
    run = fit_small(job, tmp_path / "a", spill_dtype="bfloat16")
    assert run.plan.compiled.bfloat16_values
    same(fit_small(job, tmp_path / "b", spill_dtype="bfloat16", **ONE_BY_ONE), run)
    fit_small(job, tmp_path / "c", spill_dtype="bfloat16", steps=2)
    same(fit_small(job, tmp_path / "c", spill_dtype="bfloat16"), run)
    with pytest.raises(InputError, match="spill_dtype"):
        fit_small(job, tmp_path / "c", steps=6)


def test_what_fits_is_not_rounded_and_refusals(job: Job) -> None:
    plan = oocdl.plan(*job, memory="6GiB", engine="torch", spill_dtype="bfloat16")
    assert not plan.compiled.bfloat16_values
    with pytest.raises(InputError, match="spill_dtype must be 'bfloat16', got float16"):
        oocdl.plan(*job, spill_dtype="float16")
    with pytest.raises(InputError, match="spill_dtype needs engine='torch'"):
        oocdl.plan(*job, engine="onnxruntime", spill_dtype="bfloat16")
