"""Networks with a user's own operators: trained as PyTorch trains them, and with the run's functions only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import oocdl
from oocdl.errors import InputError, UnsupportedError
from oocdl.ops import Builder, register
from oocdl.ops.own_loss import file_loss
from oocdl.optim import SGD
from oocdl.training import plan_cache
from tests.kit import nets
from tests.kit.lowered import model_of
from tests.kit.machine import Small
from tests.kit.runs import in_torch, losses_of
from tests.kit.settings import EXACT, QUICK

pytestmark = pytest.mark.usefixtures("own_operators")
RANDOM = np.random.default_rng(3)
ARRAYS = {"x": RANDOM.normal(size=(6, 5)).astype("f4"), "y": RANDOM.normal(size=(6, 4)).astype("f4")}
WEIGHTS = {"w": RANDOM.normal(size=(5, 4)).astype("f4"), "alpha": np.full(4, 0.7, "f4")}


def snake(build: Builder, x: str, alpha: str, *, scale: float = 1.0) -> str:
    """scale (x + sin(alpha x)^2 / alpha)."""
    wave = build("Sin", build("Mul", x, alpha))
    made = build("Add", x, build("Div", build("Mul", wave, wave), alpha))
    return build("Mul", made, build.like(scale, x))


def plain(build: Builder, x: str, alpha: str, *, scale: float = 1.0) -> str:
    return build("Mul", x, alpha)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """x w, snaked."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Snake", ["h", "alpha"], ["y"], domain="audio", scale=0.5),
    ]
    model = model_of(nodes, {"x": ARRAYS["x"][:1]}, ["y"], WEIGHTS)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "b"
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["b", 4]))
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx", nets.write_data(tmp_path / "data.zarr", ARRAYS)


def fit(files: tuple[Path, Path], **options: Any) -> oocdl.Run:
    given = {**QUICK, "loss": "mse", "batch_size": 3, "workdir": files[0].with_name("run"), **options}
    return oocdl.fit(*files, **given)


@pytest.mark.parametrize("cut", ["auto", {"batch": 2}, {"channels": 2}], ids=["whole", "batch", "channels"])
def test_trains_as_pytorch_does_whole_and_cut(cut: Any, files: tuple[Path, Path]) -> None:
    register("audio::Snake")(snake)
    run = fit(files, **{**EXACT, "optimizer": SGD(lr=0.1, momentum=0.9), "steps": 4, "parallel": cut})
    w, alpha = (torch.tensor(WEIGHTS[name], dtype=torch.float64).requires_grad_() for name in WEIGHTS)

    def loss(first: int) -> torch.Tensor:
        x, y = (torch.tensor(ARRAYS[name][first:][:3]).double() for name in "xy")
        h = x @ w
        return torch.nn.functional.mse_loss((h + torch.sin(alpha * h) ** 2 / alpha) / 2, y)

    optimizer = torch.optim.SGD([w, alpha], lr=0.1, momentum=0.9)
    losses = in_torch(optimizer, 2 * [[lambda: loss(0)], [lambda: loss(3)]])
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-12)
    for name, tensor in (("w", w), ("alpha", alpha)):
        np.testing.assert_allclose(run.weights[name][...], tensor.detach().numpy(), rtol=1e-11)


def test_a_run_goes_on_and_predicts_with_the_same_function_only(
    files: tuple[Path, Path], own_operators: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=r"audio::Snake.*oocdl\.ops\.register"):
        fit(files, steps=1)
    register("audio::Snake")(snake)
    fit(files, steps=1)
    run = fit(files, steps=2)
    out = files[0].with_name("out.zarr")
    predicted = run.predict(files[1], out)["y"][...]
    assert predicted.shape == (6, 4)
    register("audio::Snake", replace=True)(plain)
    digest = r"operators.audio::Snake was [0-9a-f]+, is [0-9a-f]+"
    asks = [lambda: fit(files, steps=3), lambda: run.predict(files[1], out), lambda: run.evaluate(files[1])]
    for ask in asks:
        with pytest.raises(InputError, match=f"has other functions: {digest}; register those of the run"):
            ask()
    own_operators.clear()
    for ask in asks:
        with pytest.raises(InputError, match="audio::Snake was [0-9a-f]+, is nothing; register"):
            ask()
    exported = onnx.load(run.export(files[0].with_name("trained.onnx")))  # that needs no function
    assert [node.op_type for node in exported.graph.node] == ["MatMul", "Snake"]


def test_the_plan_says_it_and_another_function_is_planned_anew(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plan_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def planned() -> tuple[str, int]:
        made = Small(1 << 30, 300 << 20).job(*files, **{**QUICK, "loss": "mse"}).plan()
        return str(made), len(list((tmp_path / "cache/oocdl/plans").iterdir()))

    register("audio::Snake")(snake)
    text, count = planned()
    assert "operators of your own: 'audio::Snake' × 1, as registered" in text and count == 1
    assert planned() == (text, 1)
    register("audio::Snake", replace=True)(plain)
    assert planned()[1] == 2


def test_a_loss_in_a_file_is_another_with_another_function(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sub", ["x", "y"], ["e"]),
        helper.make_node("Snake", ["e", "one"], ["s"], domain="audio"),
        helper.make_node("ReduceMean", ["s"], ["l"], keepdims=0),
    ]
    model = model_of(nodes, {"x": ARRAYS["y"], "y": ARRAYS["y"]}, ["l"])
    one = numpy_helper.from_array(np.ones((), "f4"))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["one"], value=one))
    onnx.save(model, tmp_path / "loss.onnx")
    register("audio::Snake")(snake)
    first = file_loss(tmp_path / "loss.onnx")
    assert file_loss(tmp_path / "loss.onnx") == first
    register("audio::Snake", replace=True)(plain)
    assert file_loss(tmp_path / "loss.onnx") != first
