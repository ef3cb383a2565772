"""LSTM, GRU and RNN nodes against ONNX Runtime; what is not computed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.lower import lower_sequences
from tests.kit.lowered import model_of
from tests.kit.onnx_kit import bound, run

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
OUTPUTS = {"RNN": ("y", "yh"), "GRU": ("y", "yh"), "LSTM": ("y", "yh", "yc")}


def node_model(
    op: str,
    x: Array,
    hidden: int,
    *,
    lengths: Array | None = None,
    states: bool = False,
    bias: bool = True,
    peepholes: bool = False,
    random: np.random.Generator,
    **attrs: Any,
) -> onnx.ModelProto:
    """One node on ``x`` [T, N, I], lengths as an input, all else in the file."""
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    width, start = GATES[op] * hidden, (directions, x.shape[1], hidden)
    shapes = {"W": (directions, width, x.shape[2]), "R": (directions, width, hidden)}
    shapes |= {"B": (directions, 2 * width)} if bias else {}
    shapes |= dict.fromkeys(("h0", "c0")[: len(OUTPUTS[op]) - 1], start) if states else {}
    shapes |= {"P": (directions, 3 * hidden)} if peepholes else {}
    tensors = {name: random.normal(size=shape) / 2 for name, shape in shapes.items()}
    there = {"x", *shapes, *(["lengths"] if lengths is not None else [])}
    names = [name if name in there else "" for name in ("x", "W", "R", "B", "lengths", "h0", "c0", "P")]
    names = names[: max(place for place, name in enumerate(names) if name) + 1]
    made = helper.make_node(op, names, OUTPUTS[op], name="layer", hidden_size=hidden, **attrs)
    inputs = {"x": x} if lengths is None else {"x": x, "lengths": lengths}
    return model_of([made], inputs, OUTPUTS[op], tensors, opset=17)


def found(model: onnx.ModelProto, x: Array, lengths: Array | None, folder: Path) -> list[Array]:
    """What the graph of the file computes, in float64."""
    given = {"x": x.shape} | ({} if lengths is None else {"lengths": lengths.shape})
    imported = bound(model, folder, given, precision="float64", training=False)
    more = [] if lengths is None else [torch.as_tensor(lengths.astype(np.int64))]
    values = run(imported, torch.as_tensor(x), *more)
    return [values[value].numpy() for _, value in imported.outputs]


def wanted(model: onnx.ModelProto, x: Array, lengths: Array | None) -> list[Array]:
    """What ONNX Runtime computes."""
    runtime = pytest.importorskip("onnxruntime")
    typed = onnx.shape_inference.infer_shapes(model).SerializeToString()
    session = runtime.InferenceSession(typed, providers=["CPUExecutionProvider"])
    feeds = {"x": x} | ({} if lengths is None else {"lengths": lengths})
    results: list[Array] = session.run(None, feeds)
    return results


@settings(max_examples=25)
@given(
    op=st.sampled_from(sorted(GATES)),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    states=st.booleans(),
    bias=st.booleans(),
    late=st.booleans(),
    short=st.booleans(),
    segment=st.sampled_from([1, 20, 1 << 21]),
    seed=st.integers(0, 99),
)
def test_results_are_onnxs(
    op: str,
    sizes: tuple[int, int, int, int],
    direction: str,
    states: bool,
    bias: bool,
    late: bool,
    short: bool,
    segment: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    random = np.random.default_rng(seed)
    steps, samples, width, hidden = sizes
    x = random.normal(size=(steps, samples, width)).astype("f4")
    lengths = random.integers(1, steps + 1, samples).astype("i4") if short else None
    attrs: dict[str, Any] = {"direction": direction}
    if op == "GRU":
        attrs["linear_before_reset"] = int(late)
    if op == "RNN" and late:
        attrs["activations"] = ["Relu"] * (2 if direction == "bidirectional" else 1)
    model = node_model(op, x, hidden, lengths=lengths, states=states, bias=bias, random=random, **attrs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower_sequences, "SEGMENT_ELEMENTS", segment)
        results = found(model, x, lengths, tmp_path_factory.mktemp("layer"))
    for one, other in zip(results, wanted(model, x, lengths), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("attrs", "why"),
    [
        *(
            ({name: value}, "LSTM with peepholes, clip, input_forget or layout 1")
            for name, value in (("clip", 1.0), ("input_forget", 1), ("peepholes", True), ("layout", 1))
        ),
        ({"activations": ["Sigmoid", "Softsign", "Tanh"]}, "LSTM with activation Softsign"),
    ],
)
def test_what_is_not_computed_is_refused(attrs: dict[str, Any], why: str, tmp_path: Path) -> None:
    x = np.zeros((2, 1, 3), "f4")
    model = node_model("LSTM", x, 2, random=np.random.default_rng(0), **attrs)
    with pytest.raises(UnsupportedError, match=why):
        found(model, x, None, tmp_path)


@pytest.mark.parametrize("attrs", [{"activations": ["Tanh"]}, {"direction": "sideways"}])
def test_what_is_wrong_is_an_error(attrs: dict[str, Any], tmp_path: Path) -> None:
    x = np.zeros((2, 1, 3), "f4")
    model = node_model("LSTM", x, 2, random=np.random.default_rng(0), **attrs)
    with pytest.raises(ModelError, match="layer"):
        found(model, x, None, tmp_path)


@pytest.mark.parametrize("lengths", [[2, 1], [2, 2, 2], [9]])
def test_lengths_that_are_fixed_are_those_of_the_batch(lengths: list[int], tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(2, len(lengths), 3)).astype("f4")
    known = np.array(lengths, "i4")
    model = node_model("GRU", x, 2, lengths=known, random=np.random.default_rng(0))
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(known, "lengths"))
    if max(lengths) > 2:  # more than there is: all
        known = np.minimum(known, 2)
    twin = node_model("GRU", x, 2, lengths=known, random=np.random.default_rng(0))
    for one, other in zip(found(model, x, None, tmp_path), wanted(twin, x, known), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    more = np.concatenate([x, x], 1)
    with pytest.raises(ModelError, match="sequence lengths are fixed"):
        found(model, more, None, tmp_path)


def test_a_generated_initial_state_of_zeros_is_no_weight(tmp_path: Path) -> None:
    x = np.zeros((2, 1, 3), "f4")
    model = node_model("LSTM", x, 2, states=True, random=np.random.default_rng(0))
    for tensor in model.graph.initializer:
        if tensor.name in ("h0", "c0"):
            zeros = np.zeros(tuple(tensor.dims), "f4")
            tensor.CopyFrom(numpy_helper.from_array(zeros, f"onnx::LSTM_{tensor.name[0] == 'c':d}"))
    model.graph.node[0].input[5:7] = ["onnx::LSTM_0", "onnx::LSTM_1"]
    assert sorted(bound(model, tmp_path, {"x": x.shape}).weights) == ["B", "R", "W"]
