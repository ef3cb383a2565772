"""Groups of weights with settings of their own; random courses compare them with PyTorch's in numbers."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oocdl
from oocdl.config import make_settings
from oocdl.errors import InputError
from oocdl.optim import SGD, Adam, Cosine, Own, Step, Then, WarmUp, register
from oocdl.training import resume
from tests.kit import jobs, nets
from tests.kit.settings import QUICK


def test_a_number_in_a_group_begins_the_schedule_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.prepare(jobs.NETS["mlp"], tmp_path)
    schedule = WarmUp(Cosine(0.1, 5, 0.01), 2)
    groups = [{"params": "*bias", "lr": 0.03}, {"params": "*0.*", "lr": Step(0.2, 1)}]

    def make(weights: Any) -> torch.optim.Optimizer:
        found: list[list[Any]] = [[], [], []]
        for name, weight in zip(dict(job.module.named_parameters()), weights, strict=True):
            found[0 if name.endswith("bias") else 1 if "0." in name else 2].append(weight)
        optimizer = torch.optim.SGD([{"params": one} for one in found], lr=0.1)
        count = [0]

        def rates(_: Any, *__: Any) -> None:
            for place, base in ((0, 0.03), (2, 0.1)):
                cosine = 0.01 + (base - 0.01) * (1 + np.cos(np.pi * count[0] / 5)) / 2
                optimizer.param_groups[place]["lr"] = cosine * (1 / 3 + min(count[0] / 2, 1) * 2 / 3)
            optimizer.param_groups[1]["lr"] = 0.2 * 0.1 ** count[0]
            count[0] += 1

        optimizer.register_step_pre_hook(rates)
        return optimizer

    monkeypatch.setitem(jobs.OPTIMIZERS, "made", (None, make))
    run = job.fit(tmp_path / "run", optimizer=SGD(lr=schedule), param_groups=groups)
    jobs.check(run, *jobs.train(job, "made"), 1e-10)
    assert [row["lr/2"] for row in run.history] == pytest.approx([0.2, 0.02, 0.002])


def test_one_word_takes_decay_off_norms_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.prepare(jobs.NETS["resnet"], tmp_path)
    ours = SGD(lr=0.05, weight_decay=0.5)
    group = {"params": "*conv*", "lr": 0.01}

    def make(weights: Any) -> torch.optim.Optimizer:
        found = []
        for name, weight in zip(dict(job.module.named_parameters()), weights, strict=True):
            lr = 0.01 if fnmatchcase(name, "*conv*") else 0.05
            found.append({"params": [weight], "lr": lr, "weight_decay": 0.5 if weight.dim() > 1 else 0.0})
        return torch.optim.SGD(found, lr=0.05)

    monkeypatch.setitem(jobs.OPTIMIZERS, "made", (None, make))
    run = job.fit(tmp_path / "run", optimizer=ours, param_groups=["no_decay_1d", group])
    jobs.check(run, *jobs.train(job, "made"), 1e-10)
    alone = job.fit(tmp_path / "alone", optimizer=ours, param_groups="no_decay_1d")
    plain = job.fit(tmp_path / "plain", optimizer=ours)
    assert alone.history[0]["loss"] == plain.history[0]["loss"]
    assert any((alone.weights[n][...] != plain.weights[n][...]).any() for n in alone.weights)


def fit(folder: Path, **options: Any) -> oocdl.Run:
    job = folder / "net.onnx", folder / "data.zarr"
    job = job if job[1].exists() else nets.write_job(folder)
    return oocdl.fit(*job, workdir=folder / "run", **{**QUICK, "batch_size": 4, **options})


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"params": "decoder.*"}], "'decoder.*', which matches no trained weight, as 'w1', 'b1', "),
        ([{"params": "b2", "lr": 0.1}], "'b2', which matches no trained weight"),
        ([{"params": "*"}, {"params": ["w1", "b?"]}], "'w1, b[?]', whose weights are all in groups before"),
        ([{"params": "w1", "rate": 0.1}], "has 'rate' for 'w1'; it takes params, lr, momentum, nesterov"),
        ([{"params": "w1", "clip_norm": 0.1}], "has 'clip_norm' for 'w1'; it takes params"),
        ([{"params": "w1", "lr": -0.1}], "for 'w1': lr must not be negative, not -0.1"),
        ([{"params": "w1", "momentum": "much"}], r"\['momentum'\] must be a finite number, got much"),
        ([{"params": "w1", "momentum": 1, "nesterov": "no"}], r"\['nesterov'\] must be True or False, got"),
        ([{"params": "w1", "momentum": True}], r"\['momentum'\] must be a finite number, got True"),
        ([{"params": "w1", "nesterov": True}], "for 'w1': nesterov needs a positive momentum"),
        ([{"lr": 0.1}], "takes 'no_decay_1d' and mappings such as .*got {'lr': 0.1}"),
        (["no_decay"], "takes 'no_decay_1d' and mappings such as .*got no_decay"),
        (7, "param_groups takes a list of mappings, got 7"),
        ([{"params": 7}], r"param_groups\['params'\] takes names, got 7"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_the_run(groups: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        fit(tmp_path, optimizer="sgd", param_groups=groups, steps=1, freeze="b2")
    assert not (tmp_path / "run").exists()


def test_any_name_of_a_tied_weight_finds_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    module[2].weight = module[0].weight
    before = copy.deepcopy(module)
    ones = np.ones((2, 6), "f4")
    data = nets.write_data(tmp_path / "data.zarr", {"input": ones, "y": ones})
    given = {**QUICK, "loss": "mse", "steps": 1, "optimizer": "sgd", "workdir": tmp_path / "run"}
    run = oocdl.fit(module, data, param_groups=[{"params": "2.weight", "lr": 0.0}], **given)
    run.load_into(module)
    assert torch.equal(module[0].weight, before[0].weight)
    assert not torch.equal(module[0].bias, before[0].bias)
    assert [row["lr/1"] for row in run.history] == [0.0]


def test_a_function_of_the_users_own_cannot_be_scaled(tmp_path: Path) -> None:
    groups: Any = [{"params": "w1", "lr": 0.1}]
    with pytest.raises(InputError, match="for 'w1': its lr is a number, but the optimizer's is a function"):
        fit(tmp_path, lr=lambda step: 0.1, param_groups=groups, steps=1)
    groups[0]["lr"] = lambda step: 0.1 / (step + 1)
    run = fit(tmp_path, lr=lambda step: 0.1, param_groups=groups, steps=2)
    assert [(row["lr"], row["lr/1"]) for row in run.history] == [(0.1, 0.1), (0.1, 0.05)]


def test_an_optimizer_of_the_users_own_has_rates_by_group_and_no_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oocdl.ops.optimizers.KNOWN", {})
    monkeypatch.setattr("oocdl.ops.optimizers.OPTIMIZERS", {})

    def plain(build: Any, weight: str, gradient: str, state: Any, scalars: Any) -> tuple[str, Any]:
        return build("Sub", weight, build("Mul", gradient, scalars["lr"])), {}

    register("plain")(plain)
    still = fit(tmp_path, optimizer=Own("plain", 0.1), param_groups={"params": "w1", "lr": 0.0}, steps=2)
    np.testing.assert_array_equal(still.weights["w1"][...], nets.mlp_weights()["w1"])
    assert (still.weights["w2"][...] != nets.mlp_weights()["w2"]).any()
    with pytest.raises(InputError, match="'no_decay_1d', but this optimizer has no weight_decay"):
        make_settings(optimizer=Own("plain"), param_groups="no_decay_1d")
    with pytest.raises(InputError, match="has a state 'ema', which ema= keeps"):
        register("averaging", state={"ema": 0.0})(plain)


def test_a_run_goes_on_with_the_same_groups_only(tmp_path: Path) -> None:
    def go(steps: int, rate: Any = 0.1, **group: Any) -> oocdl.Run:
        one = {"params": "w?", "lr": 0.01, "weight_decay": 0.1, **group}
        return fit(tmp_path, optimizer=Adam(lr=rate), param_groups=[one], steps=steps)

    assert go(2).steps == 2
    with pytest.raises(InputError, match=r"optimizer\.lr/1 was 0\.01 at step 1, is 0\.02"):
        go(3, lr=0.02)
    alike = [{"params": "w?", "weight_decay": 0.1}]  # it would have the optimizer's rate
    for call in (
        lambda: go(3, weight_decay=0.2),
        lambda: fit(tmp_path, optimizer=Adam(lr=0.01), param_groups=alike, steps=3),
        lambda: fit(tmp_path, optimizer=Adam(lr=0.1), steps=3),
    ):
        with pytest.raises(InputError, match="param_groups was"):
            call()
    run = go(4, Then(0.1, 2, 0.05))  # the group's rate is halved with the other
    assert [row["lr/1"] for row in run.history] == pytest.approx([0.01, 0.01, 0.005, 0.005])
    assert run.settings.param_groups == ({"params": ("w?",), "lr": 0.01, "weight_decay": 0.1},)
    assert oocdl.open(run.path).predict(tmp_path / "data.zarr", tmp_path / "out.zarr")


def test_a_schedule_in_a_group_lasts_as_long_as_the_run(tmp_path: Path) -> None:
    run = fit(tmp_path, param_groups=[{"params": "w1", "lr": Cosine(0.1)}], steps=4)
    assert [row["lr/1"] for row in run.history] == pytest.approx([Cosine(0.1, 4)(step) for step in range(4)])
    assert run.history[0]["lr"] == 0.001


def test_a_run_from_before_there_were_groups_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts have no fields that are off by default."""
    now = resume.identity

    def before(*given: Any) -> dict[str, Any]:
        facts = now(*given)
        del facts["param_groups"], facts["ema"], facts["optimizer"]["clip_value"]
        del facts["loss"]["y"]["loss"]["label_smoothing"], facts["loss"]["y"]["loss"]["sample_weights"]
        return facts

    with monkeypatch.context() as patched:
        patched.setattr("oocdl.training.resume.identity", before)
        assert "ema" not in fit(tmp_path, steps=1).facts
    assert fit(tmp_path, steps=2).steps == 2
    with pytest.raises(InputError, match=r"ema was nothing, is 0\.5"):
        fit(tmp_path, steps=3, ema=0.5)
