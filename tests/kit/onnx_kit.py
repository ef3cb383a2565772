"""What the tests of ONNX files share: evaluation, and a small model to spoil."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from oocdl.graph.onnx.reader import Imported, inspect_onnx
from oocdl.ops.registry import RULES
from tests.kit.interpret import evaluate

F = np.float32


def run(
    imported: Imported, *inputs: torch.Tensor, weights: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Every value in float64, for the weights in the file."""
    values: dict[str, Any] = {name: item.read() for name, item in imported.weights.items()}
    values |= {name: np.asarray(array, values[name].dtype) for name, array in (weights or {}).items()}
    for name, x in zip(imported.inputs, inputs, strict=True):
        values[name] = (
            x.double() if x.is_floating_point() and imported.graph.values[name].dtype == "float64" else x
        )
    return evaluate(imported.graph, values)


def bound(model: onnx.ModelProto | bytes, folder: Path, *shapes: Any, **options: Any) -> Imported:
    """A model that was written, and read again under these shapes."""
    path = folder / "bound.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return inspect_onnx(path).bind(RULES, *shapes, **options)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Away from the ones and zeros of a fresh model."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def conv_model(**changes: Any) -> onnx.ModelProto:
    """x -> Conv -> y; the weight is 4 KiB and more, so that it is not kept in the message."""
    weight = numpy_helper.from_array(np.ones((8, 4, 3, 3), F) * 0.01, "w")
    nodes = changes.get("nodes") or [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [changes.get("weight") or weight],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", changes.get("opset", 17))], ir_version=8
    )


def external(folder: Path, **entries: Any) -> Path:
    """The same with its weight in an external file."""
    model = conv_model()
    tensor = model.graph.initializer[0]
    (folder / "weights.bin").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path
