"""Metrics of a user's own, as nodes and as functions of blocks, beside NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oocdl
from oocdl.errors import InputError
from oocdl.ops.metric_functions import METRICS
from oocdl.ops.own_loss import METRIC_FORMULAS
from tests.kit import nets
from tests.kit.settings import EXACT

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")

CUTS: dict[str, Any] = {"whole": "auto", "cut": {"batch": 2, "space": (3, 2), "channels": 2}}
GIVEN: dict[str, Any] = {**EXACT, "optimizer": "sgd", "lr": 0.1, "steps": 1, "batch_size": 2}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before, formulas = dict(METRICS), dict(METRIC_FORMULAS)
    yield
    for table, was in ((METRICS, before), (METRIC_FORMULAS, formulas)):
        table.clear()
        table.update(was)  # type: ignore[arg-type]


def register() -> None:
    @oocdl.metrics.register("bias")
    def bias(build: Any, prediction: str, target: str) -> str:
        return str(build("Sub", prediction, oocdl.losses.aligned(build, prediction, target)))

    @oocdl.metrics.register("within")
    def within(build: Any, prediction: str, target: str) -> tuple[str, str]:
        truth = oocdl.losses.aligned(build, prediction, target)
        there = build("Greater", truth, build.like(0.0, truth))
        near = build("Less", build("Abs", build("Sub", prediction, truth)), build.like(1.0, truth))
        return build("And", near, there), there


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(5, 2, 6, 4)), "y": random.normal(size=(5, 3, 6, 4))}
    return nets.write_data(tmp_path_factory.mktemp("job") / "data.zarr", arrays), arrays


def net(outside: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(2, outside, 3, padding=1).double()


def predicted(run: oocdl.Run, x: np.ndarray, outside: int = 3) -> np.ndarray:
    module = net(outside)
    run.load_into(module)
    found: np.ndarray = module(torch.as_tensor(x)).detach().numpy()
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_nodes_are_averaged_over_samples_and_places(job: Any, tmp_path: Path, cut: str) -> None:
    register()
    data, arrays = job
    given = {**GIVEN, "loss": "mse", "parallel": CUTS[cut], "workdir": tmp_path / "run", "validation": data}
    given |= {"inputs": {"input": "x"}, "metrics": ["mae", "bias", "within"]}
    run = oocdl.fit(net(), data, **given)
    p, y = predicted(run, arrays["x"]), arrays["y"]
    row = run.history[-1]
    assert row["val_bias"] == pytest.approx((p - y).mean(), rel=1e-12)
    assert row["val_within"] == pytest.approx((np.abs(p - y)[y > 0] < 1).mean(), rel=1e-12)
    found = run.evaluate(data, metrics=["within", "bias"], per_sample=tmp_path / "t.csv")
    assert found["bias"] == pytest.approx(row["val_bias"], rel=1e-12)
    table = np.genfromtxt(tmp_path / "t.csv", delimiter=",", names=True)
    np.testing.assert_allclose(table["bias"], (p - y).mean((1, 2, 3)), rtol=1e-12)
    METRICS.pop("within")
    with pytest.raises(InputError, match="no metric 'within'"):
        oocdl.fit(net(), data, **{**given, "steps": 2})

    @oocdl.metrics.register("within")
    def within(build: Any, prediction: str, target: str) -> str:
        return prediction

    with pytest.raises(InputError, match="was started differently: metrics.within.digest was"):
        oocdl.fit(net(), data, **{**given, "steps": 2})
    register()
    assert oocdl.fit(net(), data, **{**given, "steps": 2}).steps == 2


@pytest.mark.parametrize("cut", CUTS)
def test_places_whose_label_is_ignored_do_not_count(job: Any, tmp_path: Path, cut: str) -> None:
    """As what is around padded samples: in values of places and classes, of places, and of neither."""
    for name, reduced in (
        ("each", {}),
        ("most", {"axes": (1,), "keepdims": False}),
        ("rows", {"axes": (2,)}),
    ):

        @oocdl.metrics.register(name)
        def metric(build: Any, prediction: str, target: str, reduced: Any = reduced) -> str:
            found: str = build("ReduceMax", prediction, **reduced) if reduced else prediction
            return found

    random = np.random.default_rng(1)
    y = random.choice([0, 1, 2, 255], size=(5, 6, 4))
    data = nets.write_data(tmp_path / "data.zarr", {"x": job[1]["x"], "y": y})
    given = {**GIVEN, "loss": oocdl.losses.CrossEntropy(ignore_index=255), "parallel": CUTS[cut]}
    given |= {"workdir": tmp_path / "run", "validation": data, "metrics": ["each", "most", "rows"]}
    run = oocdl.fit(net(), data, **given)
    p, row, counted = predicted(run, job[1]["x"]), run.history[-1], y != 255
    assert row["val_each"] == pytest.approx(np.moveaxis(p, 1, -1)[counted].mean(), rel=1e-12)
    assert row["val_most"] == pytest.approx(p.max(1)[counted].mean(), rel=1e-12)
    assert row["val_rows"] == pytest.approx(p.max(2).mean(), rel=1e-12)


def test_bad_nodes_are_refused(job: Any, tmp_path: Path) -> None:
    for name, words in (("dice", "is a metric 'dice' already"), ("loss", "as a variable of Python")):
        with pytest.raises(InputError, match=words):
            oocdl.metrics.register(name)(lambda build, prediction, target: prediction)
    given = {**GIVEN, "loss": "mse", "validation": job[0], "workdir": tmp_path / "run"}
    given["inputs"] = {"input": "x"}

    @oocdl.metrics.register("total")
    def total(build: Any, prediction: str, target: str) -> str:
        return oocdl.losses.mean(build, prediction)

    @oocdl.metrics.register("other", output="nothing")
    def other(build: Any, prediction: str, target: str) -> str:
        return prediction

    for name, words in (
        ("total", r"'total' gave values of shapes \[\[\]\]; .* with the samples, 2 here, on axis 0"),
        ("other", "'other' is of output 'nothing'; those with a loss: output"),
    ):
        with pytest.raises(InputError, match=words):
            oocdl.fit(net(), job[0], metrics=name, **given)


def test_a_run_opened_without_its_function_says_so(job: Any, tmp_path: Path) -> None:
    register()
    run = oocdl.fit(
        net(), job[0], loss="mse", metrics="bias", validation=job[0], workdir=tmp_path / "run",
        inputs={"input": "x"}, **GIVEN,
    )  # fmt: skip
    METRICS.pop("bias")
    again = oocdl.open(run.path)
    assert again.evaluate(job[0])["loss"] == pytest.approx(run.history[-1]["val_loss"], rel=1e-9)
    with pytest.raises(InputError, match="the metric 'bias' is not known here: import what registers it"):
        assert again.plan
