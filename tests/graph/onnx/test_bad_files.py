"""Bad files and nodes that are not read: one line, a typed error, the name of what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.lower import indexing
from oocdl.graph.onnx.model_file import field_header, shown
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from tests.kit.lowered import model_of
from tests.kit.onnx_kit import F, bound, conv_model, external


def refused(path: Path, *parts: str, kind: type[ModelError] = ModelError) -> None:
    """Reading fails with one line that has all ``parts``."""
    with pytest.raises(kind) as caught:
        inspect_onnx(path).bind(RULES, {"x": (2, 4, 8, 8)})
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\x80\x04\x95abc", "looks like a pickle"),
        (b"PK\x03\x04aaaa", "zip archive"),
        (np.random.default_rng(7).bytes(3000), "onnx"),
        (b"\x89HDF\r\n", "HDF5"),
        (b"\x08\x08", "there is no graph"),
    ],
)
def test_not_onnx(content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    refused(tmp_path / "model.onnx", part)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "right.onnx").write_bytes(b"x")
    refused(tmp_path / "wrong.onnx", "no file", "did you mean right.onnx?")
    refused(tmp_path, "is a folder")


def test_truncated_anywhere(tmp_path: Path) -> None:
    data = conv_model().SerializeToString()
    for length in range(1, len(data), 97):
        (tmp_path / "cut.onnx").write_bytes(data[:length])
        refused(tmp_path / "cut.onnx")


def change_weight(function: Callable[[onnx.TensorProto], Any]) -> onnx.ModelProto:
    model = conv_model()
    function(model.graph.initializer[0])
    return model


def set_dims(*dims: int) -> Callable[[onnx.TensorProto], None]:
    def change(tensor: onnx.TensorProto) -> None:
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return change


NODE = helper.make_node


def from_one_row() -> onnx.TensorProto:
    """A weight of one row for ``conv_model``, long enough to stay in the file."""
    return numpy_helper.from_array(np.ones((1, 8), np.float32), "w")


def of(*nodes: tuple[str, str, str], **attrs: Any) -> onnx.ModelProto:
    """The same with other nodes: operator, inputs, output; ``attrs``: those of the first."""
    made = [
        NODE(op, names.split(), [out], **(attrs if not n else {})) for n, (op, names, out) in enumerate(nodes)
    ]
    return conv_model(nodes=made)


BAD: dict[str, tuple[onnx.ModelProto, *tuple[str, ...]]] = {
    "huge": (change_weight(set_dims(2**40)), "tensor 'w'", "4 TiB", "1.125 KiB"),
    "negative": (change_weight(set_dims(-4, 3)), "tensor 'w' has dimension -4"),
    "type": (change_weight(lambda t: setattr(t, "data_type", 99)), "'w'", "unknown element type 99"),
    "integers": (
        conv_model(weight=numpy_helper.from_array(np.ones((8, 4, 3, 3), np.int8), "w")),
        *("'conv'", "'w' is int8; training needs float")),
    "cycle": (of(("Add", "x b", "a"), ("Relu", "a", "b"), ("Relu", "b", "y")), "'b'", "before it is made"),
    "dangling": (of(("Add", "x b", "y")), "'b'", "made nowhere"),
    "twice": (of(("Relu", "x", "y"), ("Relu", "x", "y")), "'y' is made twice"),
    "output": (of(("Relu", "x", "z")), "output 'y' is made nowhere"),
    "group": (of(("Conv", "x w", "y"), group=3), "node 'y' (Conv)", "group 3 does not divide the channels"),
    "bomb": (
        conv_model(
            nodes=[
                NODE("Constant", [], ["s"], value_ints=[2**40, 1024]),
                NODE("ConstantOfShape", ["s"], ["c"], name="c"),
                NODE("Add", ["x", "c"], ["y"]),
            ]
        ),
        *("'c' (ConstantOfShape)", "4 PiB"),
    ),
    "one summed": (  # by MatMul, of which only the axes before the last two broadcast
        conv_model(nodes=[NODE("MatMul", ["x", "w"], ["y"])], weight=from_one_row()),
        *("'y' (MatMul)", "[2, 4, 8, 8] and [1, 8]: 8 times 1"),
    ),
    "half an If": (
        conv_model(nodes=[NODE("If", ["x"], ["y"], then_branch=helper.make_graph([], "then", [], []))]),
        *("'y' (If)", "no attribute else_branch")),
    "a way to pad": (of(("Conv", "x w", "y"), auto_pad="FOO"), "'y' (Conv)", "auto_pad 'FOO' is none of"),
    "channels": (change_weight(set_dims(8, 3, 3, 4)), "conv", "4 input channels"),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[onnx.ModelProto, *tuple[str, ...]]] = {
    "string": (change_weight(lambda t: setattr(t, "data_type", 8)), "'w'", "strings"),
    "opset": (conv_model(opset=9999), "opset 9999 is not known"),
    "old": (conv_model(opset=8), "opset 8 is not known", "onnx.version_converter.convert_version(model, 17)"),
    "unknown": (
        of(("PyOp", "x", "a"), ("Relu", "a", "b"), ("Multinomial", "b", "y"), domain="ai.onnx.contrib"),
        *("2 nodes are not supported: 'a' (ai.onnx.contrib::PyOp); 'y' (", "; docs/reference/operators.md")),
    "newline": (
        conv_model(nodes=[NODE("Foo", ["x"], ["y"], name="a\n<b>" + "c" * 300)]),
        *("'a\\n\\x3cb>ccc", "...")),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *UNSUPPORTED])
def test_bad_model(case: str, tmp_path: Path) -> None:
    model, *parts = {**BAD, **UNSUPPORTED}[case]
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    refused(tmp_path / "model.onnx", *parts, kind=UnsupportedError if case in UNSUPPORTED else ModelError)


def test_deep_nesting(tmp_path: Path) -> None:
    graph = b""
    for _ in range(60):
        for field in (6, 5, 1):  # graph in attribute in node in graph
            graph = field_header(field, len(graph)) + graph
    (tmp_path / "model.onnx").write_bytes(field_header(7, len(graph)) + graph)
    refused(tmp_path / "model.onnx", "cannot be parsed")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_in_a_weight(value: float, tmp_path: Path) -> None:
    array = np.ones((8, 4, 3, 3), F)
    array[0, 1, 2, 0] = value
    model = conv_model(weight=numpy_helper.from_array(array, "w"))
    source = bound(model, tmp_path, {"x": (1, 4, 8, 8)}).weights["w"]
    with pytest.raises(ModelError, match=r"'w' has 1 NaN or infinite numbers, first at \[0, 1, 2, 0\]"):
        source.read()
    assert source.read(((1, 3), (0, 4), (0, 3), (0, 3))).shape == (2, 4, 3, 3)


def test_external_data_is_read_by_region(tmp_path: Path) -> None:
    path = external(tmp_path, offset=0)
    data = np.arange(8 * 4 * 9, dtype=F).reshape(8, 4, 3, 3)
    (tmp_path / "weights.bin").write_bytes(data.tobytes())
    source = inspect_onnx(path).bind(RULES, {"x": (1, 4, 8, 8)}).weights["w"]
    assert (source.read() == data).all()
    assert (source.read(((2, 5), (1, 3), (0, 3), (0, 3))) == data[2:5, 1:3]).all()
    assert (source.read(((2, 3), (1, 3), (1, 2), (0, 2))) == data[2:3, 1:3, 1:2, :2]).all()
    (tmp_path / "weights.bin").write_bytes(data.tobytes() + b"x")
    with pytest.raises(ModelError, match="has changed since"):
        source.read()


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ({"location": "../../etc/passwd"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "absolute"),
        ({"location": "a/../weights.bin"}, "outside"),
        ({"location": "other.bin"}, "not found"),
        ({"location": ""}, "names no file"),
        ({"location": "C:\\weights.bin"}, "absolute"),
        ({"length": 2**60}, "the file has 1.125 KiB"),
        ({"length": -1}, "the file has"),
        ({"offset": -8}, "the file has"),
        ({"offset": 4}, "at offset 4"),
        ({"length": 8}, "declares 1.125 KiB, but its external data is 8 bytes"),
        ({"offset": "abc"}, "no number"),
    ],
)
def test_hostile_external_data(entries: dict[str, Any], part: str, tmp_path: Path) -> None:
    refused(external(tmp_path, **entries), "tensor 'w'", part)


def test_external_links_and_pipes(tmp_path: Path) -> None:
    path, file = external(tmp_path), tmp_path / "weights.bin"
    real = tmp_path.parent / f"{tmp_path.name}-real"
    file.rename(real)
    file.symlink_to(real)
    refused(path, "symbolic link")
    file.unlink()
    os.link(real, file)
    refused(path, "hard link")
    file.unlink()
    os.mkfifo(file)
    refused(path, "no plain file")
    file.unlink()
    file.mkdir()
    refused(path, "no plain file")
    file.rmdir()
    (tmp_path / "link").symlink_to(tmp_path.parent)
    refused(external(tmp_path, location=f"link/{real.name}"), "symbolic link")
    refused(external(tmp_path, location="/dev/zero"), "absolute")


@pytest.mark.parametrize(
    ("shapes", "part"),
    [
        ({}, "dim 'n' of input 'x' has no size; pass dims={'n': ...}"),
        ({"z": (1,)}, "no input 'z'; its inputs are 'x'"),
        ({"x": (1, 4, 8)}, "has 4 axes"),
        ({"x": (0, 4, 8, 8)}, "positive"),
        ({"x": (1, 5, 8, 8)}, "5 input channels"),
    ],
)
def test_bad_shapes(shapes: dict[str, tuple[int, ...]], part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        bound(conv_model(), tmp_path, shapes)
    assert part in str(caught.value)


def test_names_are_shown_harmlessly() -> None:
    assert shown("a\nb<script>") == "'a\\nb\\x3cscript>'"
    assert len(shown("x" * 300)) == 82


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
NOT_READ: list[Case] = [
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
    [*((case, UnsupportedError) for case in NOT_READ), *((case, ModelError) for case in WRONG)],
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
