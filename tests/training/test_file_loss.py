"""Losses given as ONNX files, against PyTorch's in float64; what cannot be one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import zarr
from onnx import TensorProto, helper, numpy_helper

import oocdl
from oocdl.errors import DatasetError, InputError, ModelError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from oocdl.ops.loss_functions import add_loss
from oocdl.ops.own_loss import file_loss
from tests.kit import nets
from tests.kit.interpret import evaluate
from tests.kit.runs import losses_of
from tests.kit.settings import QUICK

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def write(path: Path, nodes: list[Any], y: int, shape: tuple[Any, ...] = (), **weights: Any) -> Path:
    """A file of a prediction [b, 3] and a target "y" of this type."""
    dims = ["b", 3] if y == FLOAT else ["b"]
    inputs = [
        helper.make_tensor_value_info("x", FLOAT, ["b", 3]),
        helper.make_tensor_value_info("y", y, dims),
    ]
    outputs = [helper.make_tensor_value_info("l", FLOAT, list(shape))]
    held = [numpy_helper.from_array(np.asarray(array, "f4"), name) for name, array in weights.items()]
    made = helper.make_graph(nodes, "loss", inputs, outputs, held)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def huber(path: Path, scale: float = 0.5) -> Path:
    """The Huber loss of delta 1, times 2 ``scale``."""
    node = helper.make_node
    number = {"one": 1.0, "scale": scale}
    nodes = [node("Constant", [], [name], value_float=value) for name, value in number.items()]
    nodes += [
        node("Sub", ["x", "y"], ["e"]),
        node("Abs", ["e"], ["a"]),
        node("Min", ["a", "one"], ["m"]),
        node("Mul", ["m", "m"], ["q"]),
        node("Mul", ["q", "scale"], ["h"]),
        node("Sub", ["a", "m"], ["r"]),
        node("Add", ["h", "r"], ["s"]),
        node("ReduceMean", ["s"], ["l"], keepdims=0),
    ]
    return write(path, nodes, FLOAT)


def cross_entropy(path: Path, axis: int = 1) -> Path:
    """By rows that are gathered, as operators that every opset has."""
    node = helper.make_node
    nodes = [
        node("Constant", [], ["last"], value_ints=[1]),
        node("LogSoftmax", ["x"], ["p"], axis=axis),
        node("Unsqueeze", ["y", "last"], ["i"]),
        node("GatherElements", ["p", "i"], ["g"], axis=1),
        node("ReduceMean", ["g"], ["m"], keepdims=0),
        node("Neg", ["m"], ["l"]),
    ]
    return write(path, nodes, INT64)


def one_node(path: Path) -> Path:
    """As ONNX's own operator."""
    return write(path, [helper.make_node("SoftmaxCrossEntropyLoss", ["x", "y"], ["l"])], INT64)


@pytest.mark.parametrize("kind", [huber, cross_entropy, one_node])
def test_value_and_gradient_are_pytorchs(kind: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    x = torch.as_tensor(random.normal(size=(4, 3)) * 2).requires_grad_()
    y = torch.as_tensor(random.normal(size=(4, 3)) if kind is huber else random.integers(3, size=4))
    truth = torch.nn.functional.huber_loss if kind is huber else torch.nn.functional.cross_entropy
    build = Builder(RULES)
    logits = build.value("x", (4, 3), "float64", Role.INPUT)
    target = build.value("t", tuple(y.shape), "float64" if kind is huber else "int64", Role.TARGET)
    build.value("e", (), "float64", Role.INPUT)  # a name that the file has, too
    loss = add_loss(build, file_loss(kind(tmp_path / "loss.onnx")), logits, target)
    slope = differentiate(build, loss, [logits])[logits]
    build.outputs = [loss, slope]
    found = evaluate(build.graph(), {"x": x.detach(), "t": y, "e": torch.zeros(())})
    expected = truth(x, y)
    (gradient,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(found[loss], expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found[slope], gradient, rtol=1e-11, atol=1e-14)


def test_a_run_is_the_same_as_with_the_loss_by_name_and_goes_on_with_it_only(tmp_path: Path) -> None:
    model, data = nets.write_job(tmp_path)
    path = cross_entropy(tmp_path / "loss.onnx")

    def fit(loss: Any, workdir: str = "run", **options: Any) -> oocdl.Run:
        given = {**QUICK, "batch_size": 4, **options}
        return oocdl.fit(model, data, loss=loss, workdir=tmp_path / workdir, **given)

    fit(str(path), steps=1)
    run = fit(path, steps=3)
    named = fit("cross_entropy", "named", steps=3)
    np.testing.assert_allclose(losses_of(run), losses_of(named), rtol=1e-5)
    assert run.evaluate(data) == pytest.approx(named.evaluate(data), rel=1e-5)
    with pytest.raises(InputError, match="loss was FileLoss, is CrossEntropy"):
        fit("cross_entropy", steps=4)
    group = zarr.open_group(data)
    group["y"][3] = 7
    with pytest.raises(DatasetError, match="7"):
        fit(path, "wrong", epochs=1)
    nets.write_data(data, nets.vectors())
    cross_entropy(path, axis=-1)
    with pytest.raises(InputError, match=r"loss\.digest was [0-9a-f]+, is [0-9a-f]+"):
        fit(path, steps=4)
    with pytest.raises(InputError, match="another than the run's"):
        run.evaluate(data)
    path.unlink()
    with pytest.raises(InputError, match="no file '.*loss.onnx'"):
        fit(path, steps=4)


def test_what_is_no_loss_is_refused(tmp_path: Path) -> None:
    path, node = tmp_path / "bad.onnx", helper.make_node

    def add(target: str = "float32", shape: tuple[int, ...] = (4, 3)) -> None:
        build = Builder(RULES)
        x, y = build.value("x", (4, 3), "float32", Role.INPUT), build.value("y", shape, target, Role.TARGET)
        add_loss(build, file_loss(path), x, y)

    for nodes, weights, why in (
        ([node("Sub", ["x", "y"], ["l"])], {}, r"gives float32 \[4, 3\]"),
        (
            [node("MatMul", ["x", "w"], ["z"]), node("ReduceMean", ["z"], ["l"], keepdims=0)],
            {"w": np.ones((3, 3))},
            "has weights .'w'.*Constant",
        ),
    ):
        write(path, nodes, FLOAT, **weights)
        with pytest.raises(InputError, match=why):
            add()
    nets.write_mlp(path)
    with pytest.raises(InputError, match="1 inputs and 1 outputs; it has to have two"):
        file_loss(path)
    huber(path)
    with pytest.raises(InputError, match="takes float32 as 'y', which is int64"):
        add("int64")
    with pytest.raises(ModelError, match="in the loss .*bad.onnx': .*has 2 axes"):
        add(shape=(4,))
