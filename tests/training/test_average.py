"""``ema=``: a moving average of the weights; random courses compare it with PyTorch's in numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oocdl
from oocdl.errors import InputError
from oocdl.optim import SGD, average_of
from oocdl.storage.run.run_store import RunStore
from tests.kit import nets
from tests.kit.runs import in_torch
from tests.kit.settings import EXACT, QUICK

DECAY = 0.7
TWO_HEADS = {"targets": {"kind": "kind"}, "loss": {"kind": "cross_entropy"}, "batch_size": 5}


def averages(run: oocdl.Run) -> dict[str, np.ndarray]:
    """Weight -> its average, of all that have one."""
    with RunStore.open(run.path) as store:
        manifest = store.current()
        assert manifest is not None
        names = {name for name in run.weights if average_of(name) in manifest.tensors}
        return {name: store.array(average_of(name))[...] for name in names}


def fit(folder: Path, **options: Any) -> oocdl.Run:
    folder.mkdir(exist_ok=True)
    model, data = nets.write_two_heads(folder / "net.onnx"), folder / "data.zarr"
    if not data.exists():
        nets.write_data(data, {"x": nets.vectors()["x"], "kind": nets.vectors()["y"]})
    return oocdl.fit(model, data, workdir=folder / "run", **{**QUICK, **TWO_HEADS, "ema": DECAY, **options})


def test_it_begins_as_the_weights_and_is_resumed(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, oocdl.events.Committed):
            raise RuntimeError

    with pytest.raises(RuntimeError):  # once the model's file is committed
        fit(tmp_path, steps=3, callbacks=[stop])
    run = oocdl.open(tmp_path / "run")
    assert run.steps == 0
    for weight, average in averages(run).items():
        np.testing.assert_array_equal(average, run.weights[weight][...])
    fit(tmp_path, steps=2)
    found = averages(fit(tmp_path, steps=3))
    for weight, average in averages(fit(tmp_path / "whole", steps=3)).items():
        np.testing.assert_array_equal(found[weight], average)


def test_what_no_step_changes_has_no_average_of_its_own(tmp_path: Path) -> None:
    """The weight "s" is of a head without a target, "w" is frozen."""
    assert averages(fit(tmp_path, steps=1, freeze="w")).keys() == {"k"}


def test_the_plan_counts_it_and_the_run_remembers_it(tmp_path: Path) -> None:
    run = fit(tmp_path, steps=1, optimizer="sgd")
    given = {**QUICK, **TWO_HEADS, "optimizer": "sgd"}
    job = tmp_path / "net.onnx", tmp_path / "data.zarr"
    plans = [oocdl.plan(*job, **given, **more) for more in ({}, {"ema": DECAY})]
    weights = sum(run.weights[name].nbytes for name in "wk")
    sizes = [plan.kinds["main"].plan.versioned_bytes for plan in plans]
    assert sizes[1] - sizes[0] == weights
    assert run.settings.ema == DECAY and run.facts["ema"] == DECAY
    for ema, said in ((0.8, r"ema was 0\.7, is 0\.8"), (None, r"ema was 0\.7, is nothing")):
        with pytest.raises(InputError, match=said):
            fit(tmp_path, steps=2, optimizer="sgd", ema=ema)
    for decay in (1.0, -0.1, float("nan"), "much", True):
        with pytest.raises(InputError, match="ema must be"):
            fit(tmp_path, steps=1, ema=decay)


def test_a_tied_weight_has_one_average(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)).double()
    module[2].weight = module[0].weight
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 6))
    nets.write_data(tmp_path / "data.zarr", {"x": x, "y": x[:, ::-1].copy()})
    twin = copy.deepcopy(module)
    run = oocdl.fit(
        module, tmp_path / "data.zarr", loss="mse", optimizer=SGD(lr=0.1), batch_size=4, steps=3, ema=DECAY,
        workdir=tmp_path / "run", inputs={"input": "x"}, **EXACT,
    )  # fmt: skip
    averaged = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(twin))
    given, wanted = torch.as_tensor(x), torch.as_tensor(x[:, ::-1].copy())
    in_torch(optimizer, 3 * [[lambda: torch.nn.functional.mse_loss(twin(given), wanted)]])
    expected = {name.removeprefix("module."): p for name, p in averaged.named_parameters()}
    found = averages(run)
    assert len(found) == len(expected) == 3
    for name, average in found.items():
        np.testing.assert_allclose(average, expected[name].detach().numpy(), rtol=1e-10, atol=1e-14)
