"""Small files that make much of themselves, and nodes that are not as ONNX defines them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper, parser

from oocdl.errors import ModelError
from oocdl.graph.onnx import lowering
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from tests.kit import nets
from tests.kit.bombs import little_memory
from tests.kit.onnx_kit import bound, run

HEAD = '<ir_version: 8, opset_import: ["": 17, "own": 1]>'
X = f"{HEAD} net (float[2,3,4] x) => (float[p,q,r] y)"
NODE = helper.make_node


def functions(depth: int, last: str) -> str:
    """Functions of which each calls the next one twice."""
    text = f"{HEAD} net (float[2] x) => (float[2] y) {{ y = own.f0 (x) }}"
    for number in range(depth):
        after = f"own.f{number + 1}" if number < depth - 1 else last
        text += (
            f'<domain: "own", opset_import: ["": 17, "own": 1]> f{number} (x) => (y) '
            f"{{ a = {after} (x) y = {after} (a) }}"
        )
    return text


BOMBS = {
    "functions that call each other twice": (functions(30, "Tanh"), "they are called, make"),
    "functions in functions": (functions(70, "Tanh"), "more than 64 stand in one another"),
    "a function that calls itself": (functions(3, "own.f0"), "calls itself"),
    "a call of too many": (
        functions(1, "Tanh").replace("own.f0 (x)", "own.f0 (x, x)"),
        "node 'y' calls 'f0' with 2 inputs and 1 outputs: too many"),
    "loops in loops": (
        X
        + """{ n = Constant <value_int=9000> ()
        y = Loop (n, , x) <body = o (int64 i, bool c, float[2,3,4] a) => (bool d, float[2,3,4] b) {
            d = Identity (c)
            b = Loop (n, , a) <body = p (int64 j, bool e, float[2,3,4] s) => (bool f, float[2,3,4] t) {
                f = Identity (e) t = Identity (s) }>
        }> }""",
        "more than 2000 nodes",
    ),
    "constants": (
        X
        + "{ s = Constant <value_ints=[65536]> () c0 = ConstantOfShape (s)"
        + "".join(f" c{n + 1} = Exp (c{n})" for n in range(40))
        + " y = Add (x, c40) }",
        "the constants of the model take more than 8 MiB",
    ),
    "axes": (X + f"{{ s = Constant <value_ints={[1] * 40 + [24]}> () y = Reshape (x, s) }}", "has 41 axes"),
    "elements": (
        X + f"{{ s = Constant <value_ints={[2**20, 2**20, 2**15, 1, 1, 1]}> () y = Expand (x, s) }}",
        "elements"),
    "numbers of an axis": (
        X
        + "{ s = Constant <value_ints=[2,3,1099511627776]> () w = ReduceMax <axes=[2]> (x) z = Expand (w, s) "
        "i = ArgMax <axis=2> (z) y = Cast <to=1> (i) }",
        "at most 8388608 are numbered",
    ),
    "windows": (
        X.replace("2,3,4", "2,3,2147483648") + "{ y = AveragePool <kernel_shape=[2]> (x) }",
        "windows along an axis of 2147483648 read 4294967294 elements"),
    "steps": (
        X.replace("2,3,4] x", "1099511627776,3,4] x, float[1,12,4] w, float[1,12,3] r")
        + "{ y = LSTM <hidden_size=3> (x, w, r) }",
        "nodes",
    ),
    "parts": (
        X.replace('"": 17', '"": 18') + "{ y = Split <axis=1, num_outputs=1099511627776> (x) }", "parts"),
}  # fmt: skip
MALFORMED = {
    "no outputs": (f"{HEAD} net (float[2] x) => () {{ y = Relu (x) }}", "it has no outputs"),
    "an attribute left out": (X + "{ y = MaxPool (x) }", "node 'y' (MaxPool) has no attribute kernel_shape"),
    "an attribute of another type": (
        X + "{ y = Conv <pads=1.5> (x, x) }", "pads of type FLOAT; it has to be INTS"),
    "an input left out": (
        X + "{ y = Conv (x, , x) }", "node 'y' (Conv) has no input 1 (W), which it needs"),
    "too many inputs": (X + "{ y = Relu (x, x) }", "node 'y' (Relu) has 2 inputs; it takes 1 to 1"),
    "an axis that is not there": (X + "{ y = Transpose <perm=[0, 7, -9]> (x) }", "node 'y' (Transpose)"),
    "an axis twice": (
        X + "{ a = Constant <value_ints=[0, 0]> () y = Unsqueeze (x, a) }",
        "(Unsqueeze): its operands and attributes do not fit (ValueError: repeated axis"),
    "a permutation of nothing": (
        X + "{ s = Softmax (x) y = Transpose <perm: ints = []> (s) }", "(Transpose)"),
    "a permutation of something else": (
        X + "{ s = Softmax <axis=1> (x) y = Transpose <perm=[0, 2, 2]> (s) }", "(Transpose)"),
    "what does not fit": (
        X.replace("2,3,4", "2,4,8,8") + "{ y = DepthToSpace <blocksize=0> (x) }",
        "node 'y' (DepthToSpace): its operands and attributes do not fit (ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BOMBS, *MALFORMED])
def test_what_makes_too_much_of_itself_or_is_not_as_onnx_defines_it_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "MOST_NODES", 2000)  # the bounds themselves take seconds
    monkeypatch.setattr(lowering, "MOST_CONSTANTS_BYTES", 8 << 20)
    text, part = {**BOMBS, **MALFORMED}[case]
    with pytest.raises(ModelError) as caught:
        bound(parser.parse_model(text), tmp_path, training=False)
    assert part in str(caught.value), caught.value


@pytest.mark.parametrize("size", [7, 8, 2**40])
def test_a_window_over_more_channels_than_there_are_is_one_over_all(size: int, tmp_path: Path) -> None:
    text = X + f"{{ y = LRN <size={size}, alpha={size / 2}> (x) }}"
    with little_memory():
        imported = bound(parser.parse_model(text), tmp_path, training=False)
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    wanted = x / (1 + 0.5 * (x * x).sum(1, keepdim=True)) ** 0.75
    np.testing.assert_allclose(run(imported, x)[imported.outputs[0][1]], wanted, rtol=1e-5)


def test_statistics_of_another_shape_are_refused(tmp_path: Path) -> None:
    """They were made into a graph that is not sound."""
    model = nets.save(
        tmp_path / "m.onnx",
        [NODE("BatchNormalization", ["x", "s", "s", "m", "v"], ["y"], name="n")],
        {"s": np.ones(3), "m": np.ones((3, 1)), "v": np.ones(3)},
        [2, 3, 4],
        {"y": [2, 3, 4]},
    )
    with pytest.raises(ModelError, match=r"running statistics \[3, 1\] for 3 channels"):
        inspect_onnx(model).bind(RULES)


def test_a_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    content = (
        parser.parse_model(X + "{ y = Relu (wxyz) }").SerializeToString().replace(b"wxyz", b"w\xff\xfez")
    )
    with pytest.raises(ModelError, match=r"a name that is no UTF-8 text: b'w\\xff\\xfez'"):
        bound(content, tmp_path)
