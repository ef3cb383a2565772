"""An ONNX model of a few nodes against a formula of PyTorch: values, gradients, cuts, on all engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from oocdl.graph.ir.graph import Array, Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from oocdl.ops._broadcast import is_float
from oocdl.testing import run_graph

Formula = Callable[..., Any]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 18,
) -> onnx.ModelProto:
    """A model of ``nodes``; floats are float32 in the file."""

    def small(array: Any) -> Array:
        array = np.asarray(array)
        return array.astype(np.float32) if array.dtype == np.float64 else array

    def port(name: str, array: Array) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(small(array).dtype)
        return helper.make_tensor_value_info(name, kind, array.shape)

    graph = helper.make_graph(
        list(nodes),
        "few",
        [port(name, array) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(small(data), name) for name, data in (constants or {}).items()],
    )
    versions = {"": opset} | {node.domain: 1 for node in nodes if node.domain}
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def with_gradients(
    model: onnx.ModelProto,
    folder: Path,
    inputs: Mapping[str, Array],
    precision: str,
    rewrite: Callable[[Graph], Graph] = lambda graph: graph,
) -> tuple[Graph, list[str], list[str]]:
    """The graph with the gradients of all inputs that have one: (graph, outputs, gradients)."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    imported = inspect_onnx(path).bind(
        RULES, {name: array.shape for name, array in inputs.items()}, precision=precision
    )
    outputs, total = [value for _, value in imported.outputs], None
    build = Builder(RULES, rewrite(replace(imported.graph, outputs=tuple(outputs))))
    for number, name in enumerate(outputs):
        if is_float(build.dtype(name)):
            weights = build.constant(weights_of(number, build.shape(name)), build.dtype(name))
            part, rank = build("Mul", name, weights), len(build.shape(name))
            part = build("ReduceSum", part, axes=tuple(range(rank))) if rank else part
            part = build("Reshape", part, shape=()) if rank else part
            total = part if total is None else build("Add", total, part)
    floats = [name for name in imported.inputs if is_float(build.dtype(name))]
    grads = differentiate(build, total, floats) if total is not None and floats else {}
    if total is not None:
        grads = {name: grads.get(name) or build.zeros_like(name) for name in floats}
    # What only renames an input gets a node behind it, to have a layer.
    ends = [
        build("Neg", name) if is_float(build.dtype(name)) else build("Identity", name) for name in outputs
    ]
    build.outputs = [*ends, *(build("Neg", grads[name]) for name in floats if name in grads)]
    build.values = {
        name: replace(value, role=Role.WEIGHT) if value.role is Role.INPUT else value
        for name, value in build.values.items()
    }
    return build.graph(), build.outputs[: len(outputs)], build.outputs[len(outputs) :]


def weights_of(number: int, shape: Sequence[int]) -> Array:
    """The weights of an output in the sum that is differentiated."""
    return np.random.default_rng([7, number]).normal(size=tuple(shape))


def _truth(formula: Formula, inputs: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
    """Results and gradients by autograd, in float64, both with the sign that the graph gives them."""
    tensors = [torch.as_tensor(np.array(array)) for array in inputs.values()]
    floats = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    made = formula(*tensors)
    results = list(made) if isinstance(made, tuple) else [made]
    loss = sum(
        (result * torch.as_tensor(weights_of(number, result.shape))).sum()
        for number, result in enumerate(results)
        if result.is_floating_point()
    )
    grads: Sequence[torch.Tensor | None] = [None] * len(floats) if isinstance(loss, torch.Tensor) else []
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, floats, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(floats, grads, strict=False)]
    signed = [-result if result.is_floating_point() else result for result in results]
    return [result.detach().numpy() for result in signed], [-grad.numpy() for grad in filled]


def check(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    formula: Formula,
    folder: Path,
    *,
    counts: Sequence[int] = (1, 2, 3),
    tolerances: tuple[float, float] = (1e-10, 1e-5),
    rewrite: Callable[[Graph], Graph] = lambda graph: graph,
) -> None:
    """Results and gradients are those of ``formula``, in pieces as ``counts`` says, on every engine.

    ``tolerances``: in float64 and in float32. ``rewrite`` is applied before gradients are added.
    """
    results, grads = _truth(formula, inputs)
    runs = [("torch", "float64", count) for count in counts]
    runs += [(engine, "float32", max(counts)) for engine in ("onnxruntime", "numpy")]
    for engine, precision, count in runs:
        graph, outputs, gradients = with_gradients(model, folder, inputs, precision, rewrite)
        given = {
            name: array.astype(precision) if array.dtype.kind == "f" else array
            for name, array in inputs.items()
        }
        ran = run_graph(graph, RULES, given, engine=engine, cuts=dict.fromkeys(range(20), count))
        tolerance = tolerances[precision == "float32"]
        assert len(gradients) == len(grads)
        for name, wanted in zip([*outputs, *gradients], [*results, *grads], strict=True):
            found = ran.outputs[name]
            assert found.shape == wanted.shape, (engine, count, name, found.shape, wanted.shape)
            np.testing.assert_allclose(
                found, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{engine}, {count} pieces, {name}"
            )
