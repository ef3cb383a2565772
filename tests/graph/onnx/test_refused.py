"""Nodes that are not read: what of them is not supported, or wrong, is said by the node's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.lower import indexing
from tests.kit.lowered import model_of
from tests.kit.onnx_kit import bound

AT = np.array
LINE, PLANE, ROWS = np.zeros((2, 2, 8)), np.zeros((2, 2, 9, 6)), np.zeros((3, 4))
HEADS, LABELS = (
    dict.fromkeys("qkv", np.zeros((1, 2, 3, 4))),
    {"x": np.ones((4, 3, 5)), "y": np.ones((4, 6), int)},
)
SCATTERED = {"x": ROWS, "i": AT([[1]]), "u": ROWS[:1]}
GRID, MATRICES = {"x": PLANE, "g": np.zeros((2, 5, 4, 2))}, {"x": np.ones((2, 3)), "y": np.ones((3, 4))}
PAST_ITS_END = {"kernel_shape": [2], "strides": [3], "pads": [0, 2], "ceil_mode": 1}
SIZE = {"roi": None, "scales": None, "sizes": AT([2, 2, 9, 8])}
ROI = {"roi": AT([0.0] * 4 + [1.0] * 4), "scales": None, "sizes": AT([2, 2, 9, 8])}
VALID = {"strides": [2], "auto_pad": "VALID", "ceil_mode": 1}

Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]
UNSUPPORTED: list[Case] = [
    # operator, what data gives, what the file has, attributes, what is said
    ("AveragePool", {"x": LINE}, {}, {"kernel_shape": [3], **VALID}, "VALID"),
    ("MaxPool", {"x": LINE}, {}, {"kernel_shape": [3], **VALID}, "VALID"),
    ("AveragePool", {"x": LINE}, {}, {"kernel_shape": [2, 2]}, "a kernel of 2 axes"),
    ("MaxPool", {"x": LINE}, {}, PAST_ITS_END, "pads as large"),
    ("Pad", {"x": ROWS}, {"p": AT([0, 0, 0, 2])}, {"mode": "mirror"}, "Pad with mode mirror"),
    ("Pad", {"x": ROWS}, {"p": AT([1000, 0, 0, 0])}, {"mode": "wrap"}, "axis 0 of 3 repeated 334 times"),
    ("Resize", {"x": PLANE}, SIZE, {"mode": "nearest", "antialias": 1}, "antialias .* in mode nearest"),
    ("Resize", {"x": PLANE}, SIZE, {"mode": "area"}, "mode area"),
    ("Resize", {"x": PLANE}, SIZE, {"coordinate_transformation_mode": "corners"}, "coordinates corners"),
    ("Resize", {"x": PLANE}, SIZE, {"keep_aspect_ratio_policy": "not_larger"}, "policy not_larger"),
    ("Resize", {"x": PLANE}, ROI, {"coordinate_transformation_mode": "tf_crop_and_resize"}, "tf_crop"),
    ("GridSample", GRID, {}, {"mode": "fourth"}, "mode fourth"),
    ("GridSample", GRID, {}, {"padding_mode": "wrap"}, "padding_mode wrap"),
    ("NonZero", {"x": ROWS}, {}, {}, r"NonZero of values .* its shape depends on data"),
    ("Unique", {"x": ROWS}, {}, {}, "Unique: its shape depends on data"),
    ("ScatterND", SCATTERED, {}, {"reduction": "mul"}, "mul of 1 updates into 3"),
    ("ReduceL2", {"x": AT([1, 2])}, {}, {}, "whole numbers; cast them to float"),
    ("Attention", HEADS, {}, {"softcap": 2.0}, "a softcap"),
    ("Attention", HEADS, {"m": np.zeros((3, 2))}, {}, "a mask of 2 of 3 keys"),
]  # fmt: skip
WRONG: list[Case] = [
    ("AveragePool", {"x": LINE}, {}, {"kernel_shape": [2], "pads": [2, 0]}, "some windows would see nothing"),
    ("Pad", {"x": ROWS}, {"p": AT([-3, 0, 0, 0])}, {"mode": "edge"}, "-3 and 0 leave nothing of axis 0"),
    ("Pad", {"x": ROWS}, {"p": AT([0, 0, 0])}, {}, r"pads \[0, 0, 0\] do not fit axes \[0, 1\] of 2"),
    ("Pad", {"x": ROWS}, {"p": AT([2**40, 0, 0, 0])}, {"mode": "edge"}, "the limit is"),
    ("GridSample", {"x": PLANE, "g": np.zeros((2, 5, 4, 3))}, {}, {}, r"grid \[2, 5, 4, 3\] does not fit"),
    *(
        ("Einsum", MATRICES, {}, {"equation": equation}, "equation|letter|extents")
        for equation in ("ij,jk->il", "ij->iij", "ij,jk,kl->il", "i,jk->ik", "ii,ij->j")
    ),
    ("NegativeLogLikelihoodLoss", LABELS, {}, {},
     r"labels \[4, 6\] are not those of scores \[4, 3, 5\]"),
    *(
        (op, {"x": ROWS, **more}, known, attrs, r"axis -?\d is not one of the 2 axes of its operand")
        for op, more, known, attrs in (
            ("Softmax", {}, {}, {"axis": 5}),
            ("ReduceSum", {}, {"axes": AT([2])}, {}),
            ("Concat", {"z": ROWS}, {}, {"axis": 3}),
            ("Split", {}, {}, {"axis": 2, "num_outputs": 1}),
            ("Flatten", {}, {}, {"axis": -3}),
            ("Transpose", {}, {}, {"perm": [0, 3]}),
            ("ArgMax", {}, {}, {"axis": 3}),
            ("CumSum", {}, {"axis": AT(-3)}, {}),
            ("Slice", {}, {"starts": AT([0]), "ends": AT([1]), "axes": AT([2])}, {}),
            ("Gather", {"i": AT([0])}, {}, {"axis": 2}),
            ("GatherElements", {"i": AT([[0]])}, {}, {"axis": -3}),
            ("LayerNormalization", {"s": ROWS[0]}, {}, {"axis": -3}),
        )
    ),
    ("Shrink", {"x": AT([1, 2])}, {}, {"lambd": 0.5}, "-0.5 is no number of int64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kind"),
    [*((case, UnsupportedError) for case in UNSUPPORTED), *((case, ModelError) for case in WRONG)],
    ids=lambda value: f"{value[0]}-{value[4]}" if isinstance(value, tuple) else value.__name__,
)
def test_a_node_that_is_not_read_is_refused_by_name(
    case: Case, kind: type[ModelError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "MOST_COMPARED", 11)
    op, inputs, known, attrs, message = case
    names = [*inputs, *("" if array is None else name for name, array in known.items())]
    known = {name: array for name, array in known.items() if array is not None}
    node = helper.make_node(op, names, ["out"], name="far", **attrs)
    with pytest.raises(kind, match=rf"'far.*({message})") as caught:
        bound(model_of([node], inputs, ["out"], known, opset=24), tmp_path)
    assert type(caught.value) is kind
