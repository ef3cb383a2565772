"""What a run that is opened says of itself: its settings, its plan and its peak, as it was trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zarr

import oocdl
from oocdl.cli.info import info_of
from oocdl.errors import DatasetError, InputError
from oocdl.events import RunStarted, Stop
from oocdl.losses import CrossEntropy
from oocdl.ops.optimizers import KNOWN, OPTIMIZERS
from oocdl.optim import SGD, Adam, Cosine, Then, WarmUp, register
from oocdl.report.tables import text_of
from oocdl.report.units import size_text
from oocdl.storage.run.manifest import Manifest
from oocdl.storage.run.run_store import RunStore
from oocdl.training.prediction.inference import Inference
from oocdl.training.resume import numerics_of
from tests.kit import nets
from tests.kit.settings import QUICK


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., oocdl.Run]:
    job = nets.write_job(tmp_path)

    def call(**options: Any) -> oocdl.Run:
        return oocdl.fit(*job, workdir=tmp_path / "run", **{**QUICK, "batch_size": 2, **options})

    return call


def manifest_of(run: oocdl.Run) -> Manifest:
    manifest = RunStore.open(run.path).current()
    assert manifest is not None
    return manifest


RATES = (0.1, Cosine(0.1, 9), WarmUp(Cosine(0.01), 3), Then(Cosine(0.1, 2), 2, 0.01))


@pytest.mark.parametrize("lr", RATES, ids=lambda lr: type(lr).__name__)
def test_settings_are_those_of_the_training(fit: Callable[..., oocdl.Run], lr: Any) -> None:
    options: dict[str, Any] = {
        "optimizer": SGD(lr=lr, momentum=0.9), "steps": 4, "accumulate": 2, "shuffle": False, "seed": 3,
        "loss": CrossEntropy(ignore_index=1), "threads": 1, "commit_seconds": 5.0, "freeze": ["b1"],
        "keep": ("y",), "parallel": {"batch": 2},
    }  # fmt: skip
    trained = fit(**options).plan.settings
    assert oocdl.open(fit(**options).path).settings == trained
    assert not isinstance(lr, float) or oocdl.open(fit(**{**options, "steps": 7}).path).settings.steps == 7


def test_settings_are_those_of_the_last_steps(fit: Callable[..., oocdl.Run], tmp_path: Path) -> None:
    """Those of a call that does no step, or is stopped before one, are not the run's."""
    first: dict[str, Any] = {"memory": "4GiB", "threads": 1, "optimizer": "sgd", "lr": 0.1}
    other = {**first, "memory": "3GiB", "threads": 2, "engine": "numpy", "replan": True}
    begun = fit(**first, steps=2)
    assert "settings" not in manifest_of(begun).meta

    def stop(event: Any) -> None:
        if isinstance(event, RunStarted):
            raise Stop("at once")

    before = manifest_of(begun).meta
    for steps, callbacks in ((2, ()), (5, (stop,))):
        fit(**{**other, "steps": steps, "callbacks": callbacks})
        assert manifest_of(begun).meta == before and begun.settings == begun.plan.settings
    trained = fit(**{**other, "lr": Then(0.1, 2, 0.01), "steps": 4})
    opened = oocdl.open(trained.path)
    assert opened.settings == begun.settings == trained.plan.settings
    assert (opened.settings.engine, opened.plan.machine.engine) == ("numpy", "numpy")
    assert "SGD(lr=Then(first=0.1, steps=2, after=0.01))" in text_of(*info_of(str(opened.path))[1])
    inference = Inference([RunStore.open(opened.path)], tmp_path / "data.zarr", None, 1, None, None)
    assert (inference.machine.engine, inference.settings.memory_bytes) == ("numpy", 3 << 30)
    assert fit(**{**first, "replan": True, "lr": Then(0.1, 2, 0.01), "steps": 5}).settings.threads == 1


@pytest.mark.parametrize("called", ["array", "x", "kind"])
def test_an_array_an_input_or_an_output_may_be_called_type(tmp_path: Path, called: str) -> None:
    model = onnx.load(nets.write_two_heads(tmp_path / "net.onnx"))
    for value in (*model.graph.input, *model.graph.output):
        value.name = "type" if value.name == called else value.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["type" if name == called else name for name in names]
    onnx.save(model, tmp_path / "net.onnx")
    arrays = {"type": nets.vectors()["x"], "k": nets.vectors()["y"], "s": np.ones((10, 1), "f4")}
    kind = "type" if called == "kind" else "kind"
    options: dict[str, Any] = {
        "inputs": {"type" if called == "x" else "x": "type"}, "targets": {kind: "k", "size": "s"},
        "scale": {"type": 2.0}, "loss": {kind: "cross_entropy", "size": "mse"}, "steps": 2,
    }  # fmt: skip
    trained = oocdl.fit(tmp_path / "net.onnx", arrays, workdir=tmp_path / "run", **options, **QUICK)
    run = oocdl.open(trained.path)
    assert run.settings == trained.plan.settings and run.evaluate(arrays)["loss"] > 0


def test_a_rate_of_the_users_own_is_known_where_it_was_noted(fit: Callable[..., oocdl.Run]) -> None:
    lr: Any = oocdl.open(fit(optimizer=Adam(lr=lambda step: 0.1 / (step + 1)), steps=2).path).settings
    assert lr.optimizer.lr(1) == 0.05 and lr.stored()["optimizer"]["lr"]["type"] == "function of the step"
    with pytest.raises(InputError, match="the learning rate was a function of yours.*not noted at step 9"):
        lr.optimizer.lr(9)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"parallel": {"batch": 2}}])
def test_the_plan_is_made_again(fit: Callable[..., oocdl.Run], options: dict[str, Any]) -> None:
    trained = fit(steps=3, **options)
    plan = oocdl.open(trained.path).plan
    assert str(plan.table()) and list(map(str, plan.layers)) == list(map(str, trained.plan.layers))
    assert plan.settings == trained.plan.settings and plan.kinds.keys() == trained.plan.kinds.keys()


def test_a_plan_that_is_given_is_repeated_by_plan(tmp_path: Path) -> None:
    job, options = nets.write_job(tmp_path), {**QUICK, "batch_size": 2}
    cut = oocdl.plan(*job, **options, parallel={"batch": 2})
    again = oocdl.plan(*job, **options, plan=cut, parallel={"batch": 2}, workdir=tmp_path / "none")
    assert numerics_of(again.kinds) == numerics_of(cut.kinds)
    run = oocdl.fit(*job, **options, parallel={"batch": 2}, workdir=tmp_path / "run", steps=1)
    assert numerics_of(oocdl.plan(*job, **options, plan=run.path).kinds) == numerics_of(cut.kinds)
    for wrong, message in (
        ({"plan": oocdl.plan(*job, **{**options, "batch_size": 5})}, "the plan of another model"),
        ({"client": "tcp://127.0.0.1:1"}, "leave client= out"),
        ({"resume": "bogus"}, "resume must be True"),
        ({"plan": 3}, "plan"),
    ):
        with pytest.raises(InputError, match=message):
            oocdl.plan(*job, **{**options, **wrong})


def test_a_plan_needs_the_dataset_and_its_name(fit: Callable[..., oocdl.Run], tmp_path: Path) -> None:
    run = oocdl.open(fit(steps=1).path)
    shutil.rmtree(tmp_path / "data.zarr")
    with pytest.raises(DatasetError, match="there is no dataset"):
        assert run.plan
    group = zarr.open_group(zarr.storage.MemoryStore())
    for name, values in nets.vectors().items():
        group.create_array(name, data=values)
    run = oocdl.fit(tmp_path / "net.onnx", group, workdir=tmp_path / "other", steps=1, **QUICK)
    with pytest.raises(InputError, match="trained on a store that was open; oocdl.plan"):
        assert oocdl.open(run.path).plan


def test_there_is_one_peak_of_memory(fit: Callable[..., oocdl.Run]) -> None:
    run = fit(steps=3)
    assert run.peak_bytes == max(row["process_bytes"] for row in run.history)
    assert run.report().measured.peak_bytes == run.peak_bytes
    for text in (run._repr_html_(), text_of(*info_of(str(run.path))[1])):
        assert size_text(run.peak_bytes) in text


def test_settings_name_an_optimizer_that_is_not_registered_here(
    fit: Callable[..., oocdl.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    @register("mine", state={"n": 0.0})
    def mine(build: Any, weight: str, gradient: str, state: Any, scalars: Any) -> Any:
        return build("Sub", weight, build("Mul", gradient, scalars["lr"])), dict(state)

    try:
        run = fit(optimizer="mine", lr=0.1, steps=1)
        trained = run.plan.settings
    finally:
        del OPTIMIZERS["mine"], KNOWN["mine"]
    assert oocdl.open(run.path).settings == trained
    with pytest.raises(InputError, match="'mine' is not known here"):
        assert oocdl.open(run.path).plan
