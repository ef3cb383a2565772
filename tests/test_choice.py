"""``engine="measured"``: the engine of each layer, by rates, for good."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oocdl
from oocdl import cli
from oocdl.choice import assigned, fastest, rates_by_engine, run_by
from oocdl.config import make_settings
from oocdl.engines.engine import Compiled, get_engine
from oocdl.errors import BudgetError, InputError
from oocdl.graph import layout
from oocdl.graph.plan import LayerPlan
from oocdl.graph.program import Program
from oocdl.graph.rates import NOMINAL, Rates, program_seconds
from oocdl.graph.step import UnitCall
from oocdl.ops import RULES
from oocdl.optim import SGD
from tests import nets
from tests.test_exact_networks import EVEN, Job, errors_of, losses_of, prepare, train, unet

BOTH = {"torch", "onnxruntime"}
MADE_UP = {
    # Layers with Moments are for torch; for what is left, onnxruntime starts sooner.
    "torch": NOMINAL,
    "onnxruntime": replace(NOMINAL, program_seconds=0.0, memory={**NOMINAL.memory, "Moments": 1e3}),
}
OPTIONS: dict[str, Any] = {
    "engine": "measured", "precision": "float32", "parallel": {"space": (2,)},
    "optimizer": SGD(lr=0.05, momentum=0.9),
}  # fmt: skip


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rates]:
    """What is known of engines, to be changed; and channels last, however few."""
    known = dict(MADE_UP)
    monkeypatch.setattr("oocdl.choice.rates_for", lambda engine: pytest.fail(f"measures {engine}"))
    monkeypatch.setattr("oocdl.choice.load_rates", known.get)
    monkeypatch.setattr("oocdl.planning.load_rates", known.get)
    monkeypatch.setattr(layout, "LEAST", 1)
    monkeypatch.setattr(layout, "MULTIPLE", 1)
    return known


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A U-Net with instance norm, and volumes."""
    return prepare(unet(*EVEN[0]), tmp_path_factory.mktemp("unet"))


def engines(plan: oocdl.Plan) -> list[str]:
    return [layer.engine for layer in plan.layers]


def has(layer: LayerPlan, op: str) -> bool:
    return any(step.op == op for unit in layer.units for step in unit.program.instructions)


# --- the choice itself -------------------------------------------------------------------


@pytest.fixture
def layers(job: Job, rates: dict[str, Rates]) -> tuple[LayerPlan, ...]:
    options = {**OPTIONS, "engine": "torch", "memory": "6GiB", "loss": "cross_entropy"}
    return oocdl.plan(job.model, job.data, **options).layers


def test_each_layer_has_the_engine_with_the_fewest_seconds(layers: tuple[LayerPlan, ...]) -> None:
    found = fastest(layers, MADE_UP, RULES, 1 << 40)
    assert set(found) == BOTH
    for layer, engine in zip(layers, found, strict=True):
        assert (engine == "torch") == has(layer, "Moments")
        seconds = {
            name: sum(program_seconds(unit.program, RULES, known) for unit in layer.units)
            for name, known in MADE_UP.items()
        }
        assert seconds[engine] == min(seconds.values())


def test_of_equals_the_first_is_taken(layers: tuple[LayerPlan, ...]) -> None:
    same = {"onnxruntime": NOMINAL, "torch": NOMINAL}
    assert set(fastest(layers, same, RULES, 1 << 40)) == {"onnxruntime"}


def test_an_engine_without_room_for_its_work_is_not_taken(layers: tuple[LayerPlan, ...]) -> None:
    chosen = zip(layers, fastest(layers, MADE_UP, RULES, 1 << 40), strict=True)
    wanted = [run_by(layer, name, RULES) for layer, name in chosen if name == "onnxruntime"]
    larger = [layer for layer in wanted if layer.work_bytes > run_by(layer, "torch", RULES).work_bytes]
    assert larger
    for layer in larger:
        assert fastest([layer], MADE_UP, RULES, layer.peak_bytes) == ("onnxruntime",)
        assert fastest([layer], MADE_UP, RULES, layer.peak_bytes - 1) == ("torch",)


def test_engines_are_part_of_the_numerics(job: Job, rates: dict[str, Rates]) -> None:
    plan = oocdl.plan(job.model, job.data, **{**OPTIONS, "engine": "torch"}).compiled.plan
    others = [assigned(plan, [name] * len(plan.layers), RULES) for name in sorted(BOTH)]
    assert len({one.numerics() for one in (plan, *others)}) == 3
    assert assigned(plan, (), RULES) is plan


# --- what there is to choose from ----------------------------------------------------------


@pytest.fixture
def asked(rates: dict[str, Rates], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were measured."""
    found: list[str] = []

    def measure(engine: str) -> Rates:
        found.append(engine)
        return NOMINAL

    monkeypatch.setattr("oocdl.choice.rates_for", measure)
    return found


def test_what_is_not_known_is_measured(rates: dict[str, Rates], asked: list[str]) -> None:
    assert rates_by_engine(make_settings(engine="measured")) == MADE_UP and asked == []
    del rates["onnxruntime"]
    found = rates_by_engine(make_settings(engine="measured", memory="64GiB"))
    assert list(found) == ["torch", "onnxruntime"] and asked == ["onnxruntime"]
    assert rates_by_engine(make_settings(engine="torch")) == {}
    # onnxruntime has no float64: it is not measured for nothing.
    assert list(rates_by_engine(make_settings(engine="measured", precision="float64"))) == ["torch"]
    assert asked == ["onnxruntime"]


def test_measuring_keeps_the_budget(rates: dict[str, Rates], asked: list[str]) -> None:
    assert rates_by_engine(make_settings(engine="measured", memory="1MiB")) == MADE_UP
    rates.clear()
    with pytest.raises(BudgetError, match="oocdl info --machine --engine measured") as caught:
        rates_by_engine(make_settings(engine="measured", memory="64MiB"))
    assert asked == [] and "\n" not in str(caught.value)


def test_an_engine_that_is_not_installed(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oocdl.engines.engine.installed", lambda name: name != "torch")
    with pytest.raises(InputError, match=r"engine 'measured' needs PyTorch: pip install 'oocdl\[torch\]'$"):
        job.fit(tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
    command = ["fit", str(job.model), str(job.data), "--engine", "measured"]
    assert cli.run_command(command, debug=False) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_info_shows_each_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("oocdl.info.rates_for", lambda engine: NOMINAL)
    assert cli.run_command(["info", "--machine", "--engine", "measured"], debug=True) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: GFLOP/s of a thread" in out for name in BOTH)


# --- runs ----------------------------------------------------------------------------------


def recorded(patch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Keys of the programs that each engine runs from now on."""
    found: dict[str, set[str]] = {name: set() for name in BOTH}
    for name, keys in found.items():
        engine = get_engine(name)

        def compile_(program: Program, keys: set[str] = keys, whole: Any = engine.compile) -> Compiled:
            keys.add(program.key)
            made: Compiled = whole(program)
            return made

        patch.setattr(engine, "compile", compile_)
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[str, set[str]]:
    """Keys of the programs that ``fitted`` ran, by engine."""
    return {}


@pytest.fixture(scope="module")
def fitted(
    job: Job, compiled: dict[str, set[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[oocdl.Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oocdl.choice.load_rates", MADE_UP.get)
        patch.setattr("oocdl.planning.load_rates", MADE_UP.get)
        patch.setattr(layout, "LEAST", 1)
        patch.setattr(layout, "MULTIPLE", 1)
        compiled |= recorded(patch)
        run = job.fit(tmp_path_factory.mktemp("runs") / "run", **OPTIONS)
    yield run


def test_each_layer_ran_on_its_engine(fitted: oocdl.Run, compiled: dict[str, set[str]]) -> None:
    wanted: dict[str, set[str]] = {name: set() for name in BOTH}
    for kind in fitted.plan.kinds.values():
        for layer in kind.plan.layers:
            wanted[layer.engine] |= {unit.program.key for unit in layer.units}
    assert compiled == wanted and all(wanted.values())


def test_a_mixed_run_is_as_good_as_pytorchs(job: Job, fitted: oocdl.Run) -> None:
    """At most three times PyTorch's own error of float32 against float64 (with a floor of 1e-5)."""
    assert set(engines(fitted.plan)) == BOTH
    sorting = [
        call for call in fitted.plan.compiled.graph.calls
        if isinstance(call, UnitCall) and call.engine == "onnxruntime" and call.unit.program.orders
    ]  # fmt: skip
    assert any(order for call in sorting for order in call.unit.program.output_orders)
    for call in fitted.plan.compiled.graph.calls:
        if isinstance(call, UnitCall) and call.engine:
            assert call.work_bytes == get_engine(call.engine).needs(call.unit.program, RULES).work_bytes
    losses, weights = train(job, "sgd")
    own = errors_of(train(job, "sgd", torch.float32)[1], weights)
    np.testing.assert_allclose(losses_of(fitted), losses, rtol=1e-4)
    found = errors_of(dict(fitted.weights), weights)
    worst = max(found, key=lambda name: found[name] / max(own[name], 1e-5 / 3))
    assert found[worst] <= max(3 * own[worst], 1e-5), (worst, found[worst], own[worst])


def test_plan_and_report_name_the_engines(fitted: oocdl.Run, rates: dict[str, Rates]) -> None:
    plan, counts = fitted.plan, {name: engines(fitted.plan).count(name) for name in BOTH}
    summary = plan.summary()
    for name, count in counts.items():
        assert f"{count} with {name}" in summary and str(plan).count(f" {name} │") == count
    assert "engine measured: layers " in summary and "rates are nominal" in summary
    rates |= {name: replace(known) for name, known in rates.items()}
    assert "rates are measured on this machine" in plan.summary()
    report = oocdl.open(fitted.path).report()
    assert [layer.engine for layer in report.layers] == engines(plan)
    assert all(f" {name} │" in str(report) for name in BOTH)


def test_the_choice_is_frozen(job: Job, fitted: oocdl.Run, rates: dict[str, Rates], tmp_path: Path) -> None:
    first = job.fit(tmp_path / "run", **OPTIONS, steps=2)
    frozen = json.loads((first.path / "plan.json").read_text())["plan"]
    assert frozen["main"]["engines"] == engines(fitted.plan)
    assert set(frozen["machine"]) > BOTH
    rates |= {"torch": MADE_UP["onnxruntime"], "onnxruntime": MADE_UP["torch"]}
    run = job.fit(tmp_path / "run", **OPTIONS)
    assert engines(run.plan) == engines(fitted.plan)
    assert nets.files_of(run) == nets.files_of(fitted)
    rates.clear()  # nor has anything to be measured
    assert engines(job.fit(tmp_path / "run", **OPTIONS).plan) == engines(fitted.plan)
    with pytest.raises(InputError, match="engine was measured, is torch; pass replan=True"):
        job.fit(tmp_path / "run", **{**OPTIONS, "engine": "torch"}, steps=6)
    rates |= {"torch": MADE_UP["onnxruntime"], "onnxruntime": MADE_UP["torch"]}
    run = job.fit(tmp_path / "run", **OPTIONS, steps=6, replan=True)
    assert run.steps == 6 and engines(run.plan) != engines(fitted.plan)


def test_prediction_and_evaluation_choose_as_well(
    job: Job,
    fitted: oocdl.Run,
    rates: dict[str, Rates],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_run = job.fit(tmp_path / "torch", **{**OPTIONS, "engine": "torch"})
    ran = recorded(monkeypatch)
    made = [
        np.asarray(run.predict(job.data, tmp_path / f"{number}.zarr", batch_size=2)["y"])
        for number, run in enumerate((fitted, torch_run))
    ]
    np.testing.assert_allclose(*made, rtol=1e-3, atol=1e-4)
    assert all(ran.values())
    losses = [run.evaluate(job.data)["loss"] for run in (fitted, torch_run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_passes_and_float64(job: Job, rates: dict[str, Rates], tmp_path: Path) -> None:
    run = job.fit(tmp_path / "run", **{**OPTIONS, "precision": "float64"}, accumulate=2, steps=1)
    assert set(engines(run.plan)) == {"torch"}
    run = job.fit(tmp_path / "mixed", **OPTIONS, accumulate=3, steps=1)
    graphs = [kind.graph for kind in run.plan.kinds.values()]
    assert len(graphs) > 2
    for graph in graphs:
        assert {call.engine for call in graph.calls if isinstance(call, UnitCall)} >= BOTH
