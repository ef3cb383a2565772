"""One ONNX node against a function of PyTorch: value and gradients, run by an engine in several cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops._broadcast import is_float
from oocdl.ops.registry import RULES
from oocdl.testing import run_graph

ENGINES = ("torch", "numpy", "onnxruntime")


@dataclass(frozen=True, eq=False)
class Lowered:
    """A node and its operands in float64: the first is an input of the model, the others initializers."""

    op: str
    function: Callable[..., torch.Tensor]
    """Takes the floating-point operands."""
    arrays: Sequence[Array | None]
    """Whole numbers are constants; ``None`` is left out."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 24

    def __str__(self) -> str:
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self.op}({attrs})".replace(" ", "")

    def names(self) -> list[str]:
        """Of the operands; one that is left out has none."""
        return ["" if array is None else f"x{place}" for place, array in enumerate(self.arrays)]

    def given(self) -> dict[str, Array]:
        """The floating-point operands by name."""
        pairs = zip(self.names(), self.arrays, strict=True)
        return {name: array for name, array in pairs if array is not None and array.dtype.kind == "f"}

    def graph(self, folder: Path, precision: str) -> tuple[Builder, list[str]]:
        """The graph, whose outputs are the result and the gradients of operands, with their names."""
        first, *others = zip(self.names(), self.arrays, strict=True)
        assert first[1] is not None
        graph = helper.make_graph(
            [helper.make_node(self.op, self.names(), ["y"], name="n", **self.attrs)],
            "one",
            [helper.make_tensor_value_info("x0", onnx.TensorProto.DOUBLE, first[1].shape)],
            [helper.make_tensor_value_info("y", onnx.TensorProto.UNDEFINED, None)],
            [numpy_helper.from_array(array, name) for name, array in others if array is not None],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        (folder / "one.onnx").write_bytes(model.SerializeToString())
        imported = inspect_onnx(folder / "one.onnx").bind(RULES, precision=precision)
        build = Builder(RULES, imported.graph)
        [(_, y)] = imported.outputs
        grads: dict[str, str] = {}
        if is_float(build.dtype(y)):
            weight = build.value("dy", build.shape(y), build.dtype(y), Role.WEIGHT)
            product = build("Mul", y, weight)
            total = build("ReduceSum", product, axes=tuple(range(len(build.shape(y)))))
            grads = differentiate(build, build("Reshape", total, shape=()), list(self.given()))
            y = build("Neg", build("Neg", y))
        build.outputs = [y, *grads.values()]
        build.values["x0"] = replace(build.values["x0"], role=Role.WEIGHT)
        return build, list(grads)


def check(case: Lowered, engine: str, folder: Path, cuts: Sequence[int] = (1, 3)) -> None:
    """Compare with PyTorch, in float64 where the engine has it; no gradient is 0 in PyTorch."""
    precision = "float32" if engine == "onnxruntime" else "float64"
    build, names = case.graph(folder, precision)
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in case.given().items()}
    wanted = case.function(*tensors.values())
    dy = np.asarray(np.random.default_rng(0).normal(size=wanted.shape))
    if wanted.requires_grad:
        wanted.backward(torch.tensor(dy))
    graph = build.graph()
    arrays = {**case.given(), "dy": dy}
    given = {name: array.astype(precision) for name, array in arrays.items() if name in graph.values}
    tolerance = (
        2e-5 if precision == "float32" else 1e-7
    )  # attributes are float32, and some of PyTorch's numbers
    for count in cuts:
        ran = run_graph(graph, RULES, given, engine=engine, cuts=dict.fromkeys(range(8), count))
        y, *grads = ran.outputs.values()
        np.testing.assert_allclose(y, wanted.detach(), tolerance, tolerance)
        for name, grad in zip(names, grads, strict=True):
            np.testing.assert_allclose(grad, tensors[name].grad, tolerance, tolerance, err_msg=f"d{name}")
    for name in tensors.keys() - set(names):
        assert tensors[name].grad is None or not tensors[name].grad.any(), name
