"""Forms of operators that ONNX's own tests lack, against onnxruntime, and repeats that are interpolation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.lower.arithmetic import of_rules
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from oocdl.testing import run_graph
from tests.kit.lowered import check, model_of
from tests.kit.onnx_kit import bound, run
from tests.kit.op_cases import CASES

F = np.float32
RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(F)


FORMS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "conv-lower": ("Conv", (2, 3, 8), {"w": numbers(4, 3, 4)}, {"auto_pad": "SAME_LOWER"}),
    "conv-dilated": (
        "Conv", (1, 2, 9, 9, 9), {"w": numbers(3, 2, 3, 3, 3)},
        {"dilations": [2, 1, 2], "pads": [1, 2, 0, 0, 1, 2]}),
    "conv-groups": ("Conv", (2, 6, 7, 5), {"w": numbers(9, 2, 3, 3), "b": numbers(9)}, {"group": 3}),
    "conv-depthwise": ("Conv", (2, 4, 5, 6, 4), {"w": numbers(8, 1, 3, 2, 3)}, {"group": 4, "pads": [1] * 6}),
    "transpose-groups": (
        "ConvTranspose", (2, 6, 5, 4), {"w": numbers(6, 2, 3, 3), "b": numbers(6)},
        {"group": 3, "strides": [2, 2], "output_padding": [1, 0]}),
    "transpose-padding": (
        "ConvTranspose", (2, 3, 5, 6), {"w": numbers(3, 4, 3, 3), "b": numbers(4)},
        {"strides": [2, 3], "pads": [1, 0, 1, 1], "output_padding": [1, 2]}),
    "transpose-shape": (
        "ConvTranspose", (2, 3, 5, 6), {"w": numbers(3, 4, 3, 3)},
        {"strides": [2, 2], "output_shape": [10, 12]}),
    "transpose-beyond": (
        "ConvTranspose", (2, 3, 5, 6), {"w": numbers(3, 4, 3, 3), "b": numbers(4)},
        {"strides": [3, 2], "output_shape": [17, 14], "auto_pad": "SAME_UPPER"}),
    "group-18": (
        "GroupNormalization", (2, 6, 4, 5), {"s": numbers(3), "b": numbers(3)},
        {"num_groups": 3, "opset": 18}),
    "group-21": (
        "GroupNormalization", (2, 6, 4, 5), {"s": numbers(6), "b": numbers(6)},
        {"num_groups": 3, "opset": 21}),
    "matmul-vector": ("MatMul", (2, 3, 4), {"w": numbers(4)}, {}),
    "matmul-left": ("MatMul", (4,), {"w": numbers(3, 4, 5)}, {}),
    "gemm": (
        "Gemm", (4, 3), {"w": numbers(5, 4), "b": numbers(5)},
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "split-13": ("Split", (2, 7), {"s": np.array([3, 4])}, {"axis": 1, "outputs": 2}),
    "split-11": ("Split", (2, 7), {}, {"axis": 1, "split": [2, 5], "outputs": 2, "opset": 11}),
    "slice-9": ("Slice", (6, 7), {}, {"starts": [1, 0], "ends": [-1, 3], "opset": 9}),
    "slice-back": ("Slice", (6, 7), {"a": [5, -1], "b": [0, -(2**62)], "c": [0, 1], "d": [-2, -1]}, {}),
    "reshape-0": ("Reshape", (2, 3, 4), {"s": np.array([0, -1])}, {}),
    "squeeze-11": ("Squeeze", (2, 1, 4, 1), {}, {"axes": [1], "opset": 11}),
    "gather-one": ("Gather", (3, 4, 5), {"i": np.array(-1)}, {"axis": 1}),
    "celu-one": ("Celu", (2, 3), {}, {}),
    "gather-any": ("Gather", (3, 4, 5), {"i": np.array([3, 0, 0])}, {"axis": 1}),
    "mean-attribute": ("ReduceMean", (2, 3, 4), {}, {"axes": [-1], "keepdims": 0}),
    "l2": ("ReduceL2", (2, 3), {}, {"axes": [1]}),
    "softmax-11": ("Softmax", (2, 3, 4), {}, {"axis": 1, "opset": 11}),
    "pow-3": ("Pow", (2, 3), {"e": np.array(3.0, F)}, {}),
    "pow-half": ("Pow", (2, 3), {"e": np.array([2.0], F)}, {}),
    "clip-9": ("Clip", (2, 3), {}, {"min": -0.1, "opset": 9}),
    "resize-pytorch": (
        "Resize", (1, 2, 5, 6), {"r": None, "s": None, "z": np.array([1, 2, 3, 1])},
        {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    "resize-10": ("Resize", (1, 2, 5, 6), {"s": np.array([1, 1, 2, 3], F)}, {"mode": "nearest", "opset": 10}),
    "upsample": ("Upsample", (1, 2, 5, 6), {"s": np.array([1, 1, 2, 3], F)}, {"mode": "nearest", "opset": 9}),
}  # fmt: skip


SPANNED = np.array([[-10, -3, 4], [11, 2**53 + 1, np.iinfo(np.int64).min]])
ENDLESS = np.array([[-np.inf] * 3, [-np.inf, 0, 1], [np.inf, 0, 1]], F)
EACH = {"noop_with_empty_axes": 1}
SIGNED = np.array([[-2, -1, 0], [1, 2, 3]], F)
AS_WRITTEN: dict[str, tuple[str, np.ndarray[Any, Any], dict[str, Any], dict[str, Any]]] = {
    "clip-whole": ("Clip", SPANNED, {"low": np.array(0), "high": np.array(np.iinfo(np.int64).max)}, {}),
    "clip-odd": ("Clip", SPANNED, {"low": np.array(2**53 + 1)}, {}),
    "mean-whole": ("ReduceMean", SPANNED[:, :2], {}, {"axes": [1], "opset": 13}),
    "mean-of-all": ("ReduceMean", SPANNED[:, :2], {}, {"axes": [0, 1], "keepdims": 0, "opset": 13}),
    "pow-axes": ("Pow", SIGNED, {"e": np.full((1, 1, 1), 2, F)}, {}),
    "pow-axes-whole": ("Pow", SPANNED[:, 0], {"e": np.full((1, 1), 2)}, {}),
    "min-whole": ("ReduceMin", SPANNED, {}, {"axes": [1], "opset": 13}),
    "argmin-whole": ("ArgMin", SPANNED, {}, {"axis": 1}),
    "erf-nan": ("Erf", np.array([np.nan, np.inf, -np.inf, 0.5], F), {}, {}),
    **{
        f"{op}-each": (f"Reduce{op}", np.abs(SIGNED) + 1 if op == "LogSum" else SIGNED, {}, EACH)
        for op in ("Sum", "Mean", "SumSquare", "L1", "L2", "LogSum", "LogSumExp")
    },
    "softmax-far": ("Softmax", SIGNED - 1e4, {}, {}),
    "softmax-masked": ("Softmax", np.array([[-1e9] * 4, [np.finfo(F).min] * 4], F), {}, {}),
    "softmax-endless": ("Softmax", ENDLESS, {}, {}),
    "log-softmax-far": ("LogSoftmax", SIGNED + 1e4, {}, {}),
    "log-softmax-endless": ("LogSoftmax", ENDLESS, {}, {}),
    "relu-whole": ("Relu", SPANNED, {}, {}),
}  # fmt: skip
"""Operator, operand, what the file has, and attributes of nodes that are the reference's on every engine."""


@pytest.mark.parametrize("engine", ["torch", "numpy", "onnxruntime"])
@pytest.mark.parametrize("form", AS_WRITTEN)
def test_a_form_is_the_references_on_every_engine(form: str, engine: str, tmp_path: Path) -> None:
    op, x, known, given = AS_WRITTEN[form]
    attrs = dict(given)
    opset = attrs.pop("opset", 18)
    node = helper.make_node(op, ["x", *known], ["y"], name="n", **attrs)
    model = model_of([node], {"x": x}, ["y"], known, opset=opset)
    imported = bound(model, tmp_path)
    values = {
        name: replace(value, role=Role.WEIGHT) if value.role is Role.INPUT else value
        for name, value in imported.graph.values.items()
    }
    [(_, result)] = imported.outputs
    found = run_graph(replace(imported.graph, values=values), RULES, {"x": x}, engine=engine).outputs[result]
    with np.errstate(invalid="ignore", divide="ignore"):
        (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0 if x.dtype == np.int64 else 1e-6)


@pytest.mark.parametrize("op", sorted(op for op in of_rules(RULES) if "::" in op))
def test_operators_of_other_domains_that_are_ours_too(op: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.op == op.rpartition("::")[2])
    arrays = {f"x{i}": a.astype(F) if a.dtype.kind == "f" else a for i, a in enumerate(case.arrays())}
    domain, _, title = op.rpartition("::")
    for attrs in ({}, case.attrs):
        node = helper.make_node(title, list(arrays), ["y"], name="n", domain=domain, **attrs)
        model = model_of([node], arrays, ["y"], opset=20)
        model.graph.output[0].type.CopyFrom(model.graph.input[0].type)  # ONNX infers no type of these
        imported = bound(model, tmp_path)
        [(_, value)] = imported.outputs
        found = run(imported, *map(torch.as_tensor, arrays.values()))[value].numpy()
        (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, arrays)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str, tmp_path: Path) -> None:
    op, shape, known, given = FORMS[form]
    attrs = dict(given)
    x, opset, outputs = numbers(*shape), attrs.pop("opset", 17), attrs.pop("outputs", 1)
    names = ["x", *(name if array is not None else "" for name, array in known.items())]
    results = [f"out{index}" for index in range(outputs)]
    node = helper.make_node(op, names, results, name="n", **attrs)
    known = {name: np.asarray(array) for name, array in known.items() if array is not None}
    model = onnx.shape_inference.infer_shapes(model_of([node], {"x": x}, results, known, opset=opset))
    if op == "GroupNormalization":  # onnxruntime-training 1.19 cannot run it
        wanted = ReferenceEvaluator(model).run(None, {"x": x})
    else:
        wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    imported = bound(model, tmp_path)
    values = run(imported, torch.as_tensor(x))
    for (_, value), array in zip(imported.outputs, wanted, strict=True):
        found = values[value].numpy()
        assert found.shape == array.shape
        np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-5)


KERAS = Path(__file__).parent / "keras"
node = helper.make_node


def after_unsqueeze(axis: int, repeats: list[int], shape: list[int], perm: list[int] | None = None) -> Any:
    nodes = [node("Unsqueeze", ["x", "a"], ["u"]), node("Tile", ["u", "r"], ["t"])]
    nodes += [node("Transpose", ["t"], ["p"], perm=perm)] if perm else []
    nodes += [node("Reshape", ["p" if perm else "t", "s"], ["y"])]
    return nodes, {"a": np.array([axis]), "r": np.array(repeats), "s": np.array(shape)}


Formula = Callable[[Tensor], Tensor]
REPEATS: dict[str, tuple[Any, Formula, bool]] = {
    # nodes and constants; what they compute of [2, 3, 4]; whether that is a repeat
    "repeat": (after_unsqueeze(2, [1, 1, 2, 1], [2, 6, 4]), lambda x: x.repeat_interleave(2, 1), True),
    "repeat the last": (
        after_unsqueeze(3, [1, 1, 1, 3], [2, 3, 12]), lambda x: x.repeat_interleave(3, 2), True),
    "repeat between transposes": (
        after_unsqueeze(3, [1, 1, 1, 2], [2, 8, 3], [0, 2, 3, 1]),
        lambda x: x.permute(0, 2, 1).repeat_interleave(2, 1), True),
    "all of it again": (after_unsqueeze(1, [1, 2, 1, 1], [2, 6, 4]), lambda x: x.repeat(1, 2, 1), False),
    "copies moved elsewhere": (
        after_unsqueeze(2, [1, 1, 2, 1], [2, 8, 3], [0, 2, 3, 1]),
        lambda x: x.permute(0, 2, 1).repeat(1, 2, 1), False),
    "heads of a group of queries": (
        ([node("Unsqueeze", ["x", "a"], ["u"]), node("Expand", ["u", "e"], ["t"]),
          node("Reshape", ["t", "s"], ["y"])],
         {"a": np.array([2]), "e": np.array([2, 3, 2, 4]), "s": np.array([2, 6, 4])}),
        lambda x: x.repeat_interleave(2, 1), False),
    "merged with more": (
        after_unsqueeze(2, [1, 1, 2, 1], [2, 24]), lambda x: x.repeat_interleave(2, 1), False),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATS)
def test_what_is_repeated_is_equal_and_stays_whole(name: str, tmp_path: Path) -> None:
    (nodes, constants), formula, is_repeat = REPEATS[name]
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    model = model_of(nodes, {"x": x}, ["y"], constants)
    shape = tuple(constants["s"])
    check(model, {"x": x}, lambda x: formula(x).reshape(shape), tmp_path, counts=(2,))
    found = [one.op for one in bound(model, tmp_path).graph.nodes]
    assert ("Resample" in found) == is_repeat and ("Expand" in found) != is_repeat


def test_whole_numbers_are_repeated_too(tmp_path: Path) -> None:
    nodes, constants = after_unsqueeze(2, [1, 1, 2, 1], [2, 6, 4])
    x = np.arange(24).reshape(2, 3, 4)
    model = model_of(nodes, {"x": x}, ["y"], constants)
    check(model, {"x": x}, lambda x: x.repeat_interleave(2, 1), tmp_path, counts=(2,))


@pytest.mark.parametrize("name", ["unet", "volume"])
def test_no_copy_of_another_layout_is_left_in_a_u_net_of_keras(name: str) -> None:
    model = inspect_onnx(KERAS / f"{name}.onnx")
    with np.load(KERAS / f"{name}.npz") as stored:
        shapes = {model.inputs[0].name: stored["x"].shape}
    found = [one.op for one in model.bind(RULES, shapes).graph.nodes]
    assert found.count("Transpose") == 1, "that of the output"
    assert "Expand" not in found and found.count("Resample") == {"unet": 4, "volume": 3}[name]
