"""Branches, loops, sequences and functions whose course is known: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import parser

from oocdl.errors import UnsupportedError
from tests.kit.lowered import check
from tests.kit.onnx_kit import bound

HEAD = '<ir_version: 8, opset_import: ["" : 18, "own" : 1]>\n'
X, W = np.random.default_rng(0).normal(size=(2, 3)), np.random.default_rng(1).normal(size=(3, 3))


def powers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = [x]
    for _ in range(3):
        steps.append(torch.tanh(steps[-1] @ w))
    return steps[-1], torch.stack(steps[1:])


MODELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "loop": (
        """g (float[2,3] x, float[3,3] w) => (float[2,3] y, float[3,2,3] all)
        {
          n = Constant <value_int: int = 3> ()
          y, all = Loop <
            body = b (int64 i, bool c, float[2,3] h) => (bool go, float[2,3] next, float[2,3] out)
            { go = Identity(c)  p = MatMul(h, w)  next = Tanh(p)  out = Identity(next) }> (n, , x)
        }""",
        powers,
    ),
    "loop that ends by its condition": (
        """g (float[2,3] x, float[3,3] w) => (float[2,3] y)
        {
          two = Constant <value_int: int = 2> ()  yes = Constant <value = bool {1}> ()
          y = Loop <body = b (int64 i, bool c, float[2,3] h) => (bool go, float[2,3] next)
            { go = Less(i, two)  p = MatMul(h, w)  next = Tanh(p) }> ( , yes, x)
        }""",
        lambda x, w: powers(x, w)[0],
    ),
    "if": (
        """g (float[2,3] x, float[3,3] w) => (float[2,3] y)
        {
          s = Shape(x)  one = Constant <value_int: int = 1> ()  d = Gather(s, one)
          three = Constant <value_int: int = 3> ()  c = Equal(d, three)
          y = If (c) <then_branch = t () => (float[2,3] a) { a = MatMul(x, w) },
                      else_branch = e () => (float[2,3] b) { b = Neg(x) }>
        }""",
        lambda x, w: x @ w,
    ),
    "scan": (
        """g (float[2,3] x, float[3,3] w) => (float[3] last, float[2,3] all)
        {
          z = Constant <value_floats = [0.0, 0.0, 0.0]> ()
          last, all = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
            body = b (float[3] s, float[3] row) => (float[3] next, float[3] out)
            { m = MatMul(row, w)  next = Add(s, m)  out = Identity(next) }> (z, x)
        }""",
        lambda x, w: ((x @ w).sum(0), (x @ w).flip(0).cumsum(0).flip(0)),
    ),
    "sequences": (
        """g (float[2,3] x, float[3,3] w) => (float[3,3] y)
        {
          q = Constant <value_ints = [0]> ()
          e = SequenceEmpty()  a = SequenceInsert(e, w)  zero = Constant <value_int: int = 0> ()
          b = SequenceInsert(a, x, zero)  c = SequenceAt(b, zero)
          two = Constant <value_int: int = 2> ()
          d = Loop <body = t (int64 i, bool c0, seq(float[2,3]) s) => (bool go, seq(float[2,3]) more)
            { go = Identity(c0)  item = Neg(x)  more = SequenceInsert(s, item) }> (two, , b)
          f = SequenceErase(d)  y0 = ConcatFromSequence <axis = 0> (f)  n = SequenceLength(f)
          halves = SplitToSequence <axis = 0, keepdims = 0> (c)
          h = ConcatFromSequence <axis = 0, new_axis = 1> (halves)  y1 = Concat <axis = 0> (y0, h)
          m = Neg(n)  p = Unsqueeze(m, q)  q0 = Constant <value_ints = [99]> ()  y = Slice(y1, p, q0)
        }""",
        lambda x, w: torch.cat([x, w, -x, x])[-3:],
    ),
    "function": (
        """g (float[2,3] x, float[3,3] w) => (float[2,3] y) { a = own.twice(x, w)  y = own.twice(a, w) }
        <domain: "own", opset_import: ["" : 18]> twice (v, m) => (r) { p = MatMul(v, m)  r = Tanh(p) }""",
        lambda x, w: torch.tanh(torch.tanh(x @ w) @ w),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str, tmp_path: Path) -> None:
    text, formula = MODELS[name]
    check(parser.parse_model(HEAD + text), {"x": X, "w": W}, formula, tmp_path, counts=(2,))


@pytest.mark.parametrize("place", [-2, -1, 0, 1, 2])
def test_an_item_is_inserted_before_a_position(place: int, tmp_path: Path) -> None:
    text = f"""g (float[2,3] x, float[3,3] w) => (float[8,3] y)
    {{ a = SequenceConstruct(x, w)  n = Neg(w)  p = Constant <value_int: int = {place}> ()
       b = SequenceInsert(a, n, p)  y = ConcatFromSequence <axis = 0> (b) }}"""

    def formula(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        items = [x, w]
        items.insert(place, -w)
        return torch.cat(items)

    check(parser.parse_model(HEAD + text), {"x": X, "w": W}, formula, tmp_path, counts=(2,))


def of(nodes: str, more: str = "", outputs: str = "float[2,3] y") -> str:
    """A graph of ``x`` and whatever else is given."""
    return f"g (float[2,3] x{more}) => ({outputs}) {{ {nodes} }}"


QUANTIZED = "of a quantized network: .* quantize what run.export"
REFUSED = [
    (of("""y = If (c) <then_branch = t () => (float[2,3] a) { a = Neg(x) },
                       else_branch = e () => (float[2,3] b) { b = Abs(x) }>""", ", bool c"),
     "'y' .If with a condition that depends on data"),
    (of("""y = Loop <body = b (int64 i, bool c, float[2,3] h) => (bool c, float[2,3] next)
                { next = Neg(h) }> (n, , x)""", ", int64 n"),
     "'y' .Loop with a number of trips that are not constant"),
    (of("""k = Constant <value = bool {1}> ()
           y = If (k) <then_branch = t () => (float[2,3] a) { a = own.Strange(x) },
                       else_branch = e () => (float[2,3] b) { b = Abs(x) }>"""),
     "'a' .own::Strange in the body of 'y'"),
    *((of(f"y = {op}({', '.join('x' * count)})"), rf"{op} {QUANTIZED}") for op, count in (
        ("QuantizeLinear", 2), ("DequantizeLinear", 2), ("QLinearMatMul", 8), ("ConvInteger", 2))),
    (of("y = com.microsoft.QGemm(x)"), rf"com.microsoft::QGemm .*{QUANTIZED}"),
    (of("y = com.microsoft.FusedConv(x)"),
     r"com.microsoft::FusedConv .*whose optimizer fuses nodes: give the file that it was made of"),
    (of("y = Relu(x) s = SequenceConstruct(x, x)", outputs="float[2,3] y, seq(float[2,3]) s"),
     r"'s' is no tensor; .*extract_model writes a file"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_not_read_is_refused_by_name_with_the_way_out(text: str, why: str, tmp_path: Path) -> None:
    """What depends on data, networks of whole numbers, what only ONNX Runtime has, outputs of no numbers."""
    with pytest.raises(UnsupportedError, match=why):
        bound(parser.parse_model(HEAD + text), tmp_path)


MANY = """g (float[2,3] x, bool d) => (float[2,3] y, float[2,3] z)
        { n = Constant <value_int: int = 2> ()  k = Constant <value = bool {1}> ()
          a = own.First(x)
          p = Loop <body = b (int64 i, bool c, float[2,3] h) => (bool go, float[2,3] next)
            { go = Identity(c)  s = own.Second(h)  t = Neg(s)  next = own.Second(t) }> (n, , x)
          q = If (k) <then_branch = t1 () => (float[2,3] u) { u = own.Third(a) },
                      else_branch = e1 () => (float[2,3] v) { v = Abs(x) }>
          r = If (d) <then_branch = t2 () => (float[2,3] u2) { u2 = own.Fourth(x) },
                      else_branch = e2 () => (float[2,3] v2) { v2 = Abs(x) }>
          w = If (k) <then_branch = t3 () => (float[2,3] u3) {
                 u3 = If (k) <then_branch = t4 () => (float[2,3] u4) { u4 = own.Fifth(x) },
                              else_branch = e4 () => (float[2,3] v4) { v4 = Abs(x) }> },
                      else_branch = e3 () => (float[2,3] v3) { v3 = own.NotTaken(x) }>
          f = own.inner(q)  g0 = Add(f, r)  y = Add(w, g0)  z = own.Last(x) }
        <domain: "own", opset_import: ["" : 18, "own" : 1]>
        inner (m) => (o) { l = Neg(m)  o = own.Sixth(l) }"""


def test_all_that_is_refused_is_told_at_once_in_bodies_and_functions_too(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        bound(parser.parse_model(HEAD + MANY), tmp_path)
    text = str(caught.value)
    assert text.startswith("9 nodes are not supported: 'a' (own::First)")
    for part in (
        "own::Second in the body of 'p' × 2, first ",
        "'u' (own::Third in the body of 'q')",
        "'r' (If with a condition that depends on data)",
        "'u2' (own::Fourth in the body of 'r')",
        "'u4' (own::Fifth in the body of 'u3' in the body of 'w')",
        "(own::Sixth)",
        "'z' (own::Last)",
    ):
        assert part in text
    assert "; docs/reference/operators.md lists what is" in text
    assert text.endswith(", and oocdl.ops.register adds operators of your own")
    assert [item.op for item in caught.value.refusals] == [
        "own::First", "own::Second", "own::Second", "own::Third", "If", "own::Fourth", "own::Fifth",
        "own::Sixth", "own::Last",
    ]  # fmt: skip


def test_a_weight_that_only_a_body_reads_is_trained(tmp_path: Path) -> None:
    model = parser.parse_model(
        HEAD
        + """g (float[2,3] x) => (float[2,3] y) <float[3,3] w = {1,0,0,0,1,0,0,0,1}>
        { n = Constant <value_int: int = 2> ()
          y = Loop <body = b (int64 i, bool c, float[2,3] h) => (bool go, float[2,3] next)
            { go = Identity(c)  next = MatMul(h, w) }> (n, , x) }"""
    )
    assert list(bound(model, tmp_path).weights) == ["w"]
