"""Masks and positions as exporters of transformers write them: whole numbers and bools, in every cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from oocdl.engines.engine_registry import ENGINES
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from oocdl.testing import run_graph

SIZE = 6
CONSTANTS = {
    "one": np.array(1),
    "two": np.array(2),
    "half": np.array(0.5, np.float32),
    "axis": np.array(1),
    "rows": np.arange(SIZE).reshape(SIZE, 1),
    "columns": np.arange(SIZE),
    "low": np.array(-np.inf, np.float32),
    "none": np.array(0.0, np.float32),
    "middle": np.array([1, 2]),
    "last": np.array([-1]),
}
NODES = [
    # positions: how many tokens that count are before, 1 where there is none
    ("CumSum", "given axis", "counted"),
    ("Sub", "counted one", "before"),
    ("Equal", "given one", "counts"),
    ("Where", "counts before one", "positions"),
    ("Mod", "positions two", "odd"),
    ("Pow", "positions two", "squares"),
    ("Pow", "positions half", "roots"),
    ("Div", "squares two", "halves"),
    # the causal mask, and with it the tokens that count
    ("LessOrEqual", "columns rows", "causal"),
    ("Unsqueeze", "counts middle", "keys"),
    ("And", "causal keys", "both"),
    ("Xor", "both causal", "hidden"),
    ("Not", "hidden", "seen"),
    ("Or", "seen hidden", "all"),
    ("Where", "both none low", "bias"),
    # rows in which nothing is seen have no softmax
    ("Add", "scores bias", "masked"),
    ("Softmax", "masked", "weights"),
    ("IsNaN", "weights", "undefined"),
    ("Where", "undefined none weights", "attention"),
    ("ReduceMax", "positions last", "longest"),
    ("ArgMax", "given", "first"),
]
RESULTS = ("positions", "odd", "roots", "halves", "seen", "all", "attention", "longest", "first")


def model() -> onnx.ModelProto:
    def port(name: str, kind: int, shape: tuple[int, ...] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        [helper.make_node(op, names.split(), [made], name=f"n_{made}") for op, names, made in NODES],
        "masks",
        [
            port("given", TensorProto.INT64, (2, SIZE)),
            port("scores", TensorProto.FLOAT, (2, 1, SIZE, SIZE)),
        ],
        [port(name, TensorProto.UNDEFINED, None) for name in RESULTS],
        [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_masks_are_onnxs_in_every_cut(engine: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "masks.onnx").write_bytes(model().SerializeToString())
    imported = inspect_onnx(tmp_path / "masks.onnx").bind(RULES)
    given = {
        "given": np.array([[1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0]]),
        "scores": np.random.default_rng(0).normal(size=(2, 1, SIZE, SIZE)).astype(np.float32),
    }
    with np.errstate(invalid="ignore"):
        wanted = ReferenceEvaluator(model()).run(None, given)
    ran = run_graph(imported.graph, RULES, given, engine=engine, cuts=dict.fromkeys(range(8), count))
    for name, array in zip(RESULTS, wanted, strict=True):
        found = ran.outputs[dict(imported.outputs)[name]]
        assert found.dtype.kind == array.dtype.kind, name
        np.testing.assert_allclose(
            found.astype(np.float64), array.astype(np.float64), 1e-5, 1e-6, err_msg=name
        )
