"""Activation functions of ONNX files: values and gradients are PyTorch's, at kinks too, in every cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops.registry import RULES
from oocdl.testing import run_graph

AROUND = np.array([-7.0, -3, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 3, 7, 30]).reshape(1, 2, 7)
SLOPE = np.array([[0.25], [-0.5]])

Attrs = Mapping[str, Any]
FUNCTIONS: list[tuple[str, Attrs, Callable[..., torch.Tensor], list[Any]]] = [
    ("HardSigmoid", {"alpha": 1 / 6}, F.hardsigmoid, []),
    ("HardSwish", {}, F.hardswish, []),
    ("Selu", {}, F.selu, []),
    ("Celu", {"alpha": 1.0}, F.celu, []),
    ("Celu", {"alpha": 0.5}, lambda x: F.celu(x, 0.5), []),
    ("Mish", {}, F.mish, []),
    ("Swish", {}, F.silu, []),
    ("Softsign", {}, F.softsign, []),
    ("ThresholdedRelu", {"alpha": 0.5}, lambda x: F.threshold(x, 0.5, 0.0), []),
    ("Shrink", {"lambd": 0.5, "bias": 0.5}, F.softshrink, []),
    ("Shrink", {"lambd": 0.5}, F.hardshrink, []),
    ("Elu", {}, F.elu, []),
    ("Gelu", {"approximate": "none"}, F.gelu, []),
    ("Gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh"), []),
    ("Ceil", {}, torch.ceil, []),
    ("Sign", {}, torch.sign, []),
    ("Mean", {}, lambda x, y: (x + y) / 2, [SLOPE]),
    ("PRelu", {}, lambda x, w: F.prelu(x, w.reshape(-1)), [SLOPE]),
    ("PRelu", {}, lambda x, w: F.prelu(x, w), [np.array([0.25])]),
]


def with_gradients(
    op: str, attrs: Attrs, more: list[Any], folder: Path, precision: str
) -> tuple[Builder, list[str]]:
    """The graph of one node and of the sum of its results; gradients of all operands are outputs, too."""
    names = ["x", *(f"w{place}" for place in range(len(more)))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], name="n", **attrs)],
        "one",
        [helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, AROUND.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, None)],
        [numpy_helper.from_array(array, name) for name, array in zip(names[1:], more, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    (folder / "one.onnx").write_bytes(model.SerializeToString())
    imported = inspect_onnx(folder / "one.onnx").bind(RULES, precision=precision)
    build = Builder(RULES, imported.graph)
    [(_, y)] = imported.outputs
    weight = build.value("dy", build.shape(y), build.dtype(y), Role.WEIGHT)
    product = build("Mul", y, weight)
    loss = build("Reshape", build("ReduceSum", product, axes=(0, 1, 2)), shape=())
    grads = differentiate(build, loss, names)
    build.outputs = [build("Neg", build("Neg", y)), *grads.values()]
    build.values["x"] = build.values["x"].__class__("x", AROUND.shape, precision, Role.WEIGHT)
    return build, list(grads)


@pytest.mark.parametrize("engine", ["torch", "numpy", "onnxruntime"])
@pytest.mark.parametrize(("op", "attrs", "function", "more"), FUNCTIONS)
def test_values_and_gradients_are_pytorchs_in_every_cut(
    op: str,
    attrs: Attrs,
    function: Callable[..., torch.Tensor],
    more: list[Any],
    engine: str,
    tmp_path: Path,
) -> None:
    precision = "float32" if engine == "onnxruntime" else "float64"
    build, names = with_gradients(op, attrs, more, tmp_path, precision)
    dy = np.random.default_rng(0).normal(size=AROUND.shape)
    arrays = {"x": AROUND, "dy": dy, **{f"w{place}": array for place, array in enumerate(more)}}
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    wanted = function(*(tensor for name, tensor in tensors.items() if name != "dy"))
    wanted.backward(tensors["dy"])
    graph = build.graph()
    given = {name: array.astype(precision) for name, array in arrays.items() if name in graph.values}
    exact = 1e-5 if precision == "float32" else 1e-7  # attributes are float32, PyTorch's 1/6 too
    for cuts in (1, 3):
        ran = run_graph(graph, RULES, given, engine=engine, cuts=dict.fromkeys(range(5), cuts))
        y, *grads = ran.outputs.values()
        np.testing.assert_allclose(y, wanted.detach(), exact, exact)
        for name, grad in zip(names, grads, strict=True):
            np.testing.assert_allclose(grad, tensors[name].grad, exact, exact, err_msg=f"d{name}")
    missing = {name for name in arrays if name not in (*names, "dy")}
    assert all(not tensors[name].grad.any() for name in missing)
