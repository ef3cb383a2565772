"""``oocdl.ops.register``: values, gradients and cuts of a user's own operators; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from oocdl.errors import InputError, ModelError, UnsupportedError
from oocdl.ops import Builder, register
from tests.kit.lowered import check, model_of
from tests.kit.onnx_kit import bound

pytestmark = pytest.mark.usefixtures("own_operators")
X, A = np.random.default_rng(0).normal(size=(4, 6)), np.random.default_rng(1).normal(size=6) + 3
HEAD = '<ir_version: 8, opset_import: ["" : 18, "audio" : 1]>\n'


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name="act", domain="audio", **attrs)


def snake(build: Builder, x: str, alpha: str | None = None, *, power: int = 2) -> str:
    """x + sin(alpha x)^power / alpha."""
    alpha = build.like(1.0, x) if alpha is None else alpha
    wave = build("Sin", build("Mul", x, alpha))
    return build("Add", x, build("Div", build("Pow", wave, build.like(power, x)), alpha))


def true_snake(x: torch.Tensor, alpha: torch.Tensor | float = 1.0, power: int = 2) -> torch.Tensor:
    return x + torch.sin(x * alpha) ** power / alpha


@pytest.mark.parametrize("form", ["all", "operand left out", "fewer operands"])
def test_values_and_gradients_are_those_of_the_nodes_in_every_cut(form: str, tmp_path: Path) -> None:
    assert register("audio::Snake")(snake) is snake
    whole = form == "all"
    inputs = {"all": ["x", "a"], "operand left out": ["x", ""], "fewer operands": ["x"]}[form]
    one = node("Snake", inputs, ["y"], **({"power": 3} if whole else {}))
    given = {"x": X, "a": A} if whole else {"x": X}
    check(model_of([one], given, ["y"]), given, lambda *t: true_snake(*t, power=3 if whole else 2), tmp_path)


def test_an_operator_may_mix_all_elements_and_have_several_results(tmp_path: Path) -> None:
    def centred(build: Builder, x: str, *, axis: int) -> tuple[str, str]:
        mean, var = build.node("Moments", [x], {"axes": (axis,)})
        return build("Sub", x, mean), build("Sqrt", build("Add", var, build.like(0.5, var)))

    register("audio::Centred")(centred)
    one = node("Centred", ["x"], ["y", "s"], axis=1)

    def truth(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x - x.mean(1, True), torch.sqrt(x.var(1, unbiased=False, keepdim=True) + 0.5)

    check(model_of([one], {"x": X}, ["y", "s"]), {"x": X}, truth, tmp_path)
    # An ONNX node may leave out results at the end.
    one = node("Centred", ["x"], ["y"], axis=1)
    check(model_of([one], {"x": X}, ["y"]), {"x": X}, lambda x: truth(x)[0], tmp_path, counts=(2,))


def test_attributes_and_operands_that_are_known_come_as_numbers_and_arrays(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def flipped(build: Builder, x: str, axes: str, *more: str, **attributes: Any) -> str:
        seen.update(attributes, axes=build.constants[axes], more=len(more))
        return build("Neg", x)

    register("audio::Flipped")(flipped)
    table = numpy_helper.from_array(np.array([[1.5]], "f4"))
    given = {"i": 3, "f": 0.1, "s": "word", "ints": [1, 2], "floats": [0.5], "strings": ["a", "b"]}
    one = node("Flipped", ["x", "axes", "x", "x"], ["y"], t=table, **given)
    model = model_of([one], {"x": X}, ["y"], {"axes": np.array([0, 1])})
    check(model, {"x": X}, lambda x: -x, tmp_path, counts=(1,))
    found = {name: list(seen[name]) if isinstance(seen[name], tuple) else seen[name] for name in given}
    assert found == given and seen["more"] == 2
    np.testing.assert_array_equal(seen["t"], [[1.5]])
    np.testing.assert_array_equal(seen["axes"], [0, 1])


def test_an_operator_of_onnx_that_the_list_lacks(tmp_path: Path) -> None:
    def halves(build: Builder, x: str, axis: int) -> tuple[str, ...]:
        return build.node("Split", [x], {"axis": axis, "sizes": (1, 1)})

    def det(build: Builder, x: str) -> str:
        (a, b), (c, d) = (halves(build, row, 2) for row in halves(build, x, 1))
        difference = build("Sub", build("Mul", a, d), build("Mul", b, c))
        return build("Reshape", difference, shape=build.shape(x)[:-2])

    register("ai.onnx::Det")(det)
    x = np.random.default_rng(2).normal(size=(3, 2, 2))
    model = model_of([helper.make_node("Det", ["x"], ["y"])], {"x": x}, ["y"])
    check(model, {"x": x}, torch.linalg.det, tmp_path, counts=(2,))


MODELS = {
    "body": """g (float[4,6] x, float[6] a) => (float[4,6] y)
        { n = Constant <value_int: int = 2> ()
          y = Loop <body = b (int64 i, bool c, float[4,6] h) => (bool go, float[4,6] next)
            { go = Identity(c)  next = audio.Snake(h, a) }> (n, , x) }""",
    "function": """g (float[4,6] x, float[6] a) => (float[4,6] y) { y = audio.Twice(x, a) }
        <domain: "audio", opset_import: ["" : 18, "audio" : 1]>
        Twice (v, w) => (r) { p = audio.Snake(v, w)  r = audio.Snake(p, w) }""",
    "function of the same name": """g (float[4,6] x, float[6] a) => (float[4,6] y)
        { p = audio.Snake(x, a)  y = audio.Snake(p, a) }
        <domain: "audio", opset_import: ["" : 18]> Snake (v, w) => (r) { r = Add(v, w) }""",
}


@pytest.mark.parametrize("name", MODELS)
def test_in_loops_and_functions(name: str, tmp_path: Path) -> None:
    register("audio::Snake")(snake)
    model = parser.parse_model(HEAD + MODELS[name])
    check(model, {"x": X, "a": A}, lambda x, a: true_snake(true_snake(x, a), a), tmp_path, counts=(2,))
    assert bound(model, tmp_path).trained.own == (("audio::Snake", 1 if name == "body" else 2),)


def two(build: Builder, x: str, *, axis: int) -> tuple[str, str]:
    return x, build("Neg", x)


@pytest.mark.parametrize(
    ("function", "inputs", "outputs", "attrs", "why"),
    [
        (snake, [], ["y"], {}, "its function does not take what it has: missing a required argument: 'x'"),
        (snake, [""], ["y"], {}, "its operand 'x' is left out, which its function takes"),
        (snake, ["x", "x", "x"], ["y"], {}, "its function does not take what it has: too many positional"),
        (snake, ["x"], ["y"], {"alpha": 2.0}, "it has an attribute 'alpha', which .* as an operand"),
        (snake, ["x"], ["y"], {"speed": 1}, "its function does not .* unexpected .*'speed'"),
        (two, ["x"], ["y"], {}, "its function does not take what it has: missing .* 'axis'"),
        (two, ["x"], ["y", "z", "u"], {"axis": 1}, "its function gave 2 results, but the node has 3 outputs"),
        (lambda build, x: None, ["x"], ["y"], {}, "its function gave None, which are not names of values"),
        (lambda build, x: "nothing", ["x"], ["y"], {}, "its function gave 'nothing', which"),
        (lambda build, x: [3], ["x"], ["y"], {}, r"its function gave \[3\], which"),
        (lambda build, x: build("Sinus", x), ["x"], ["y"], {}, "there is no operator 'Sinus' to build with"),
        (lambda build, x: 1 / 0, ["x"], ["y"], {}, "its function failed: ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_the_function_is_refused_by_node(
    function: Any, inputs: list[str], outputs: list[str], attrs: dict[str, Any], why: str, tmp_path: Path
) -> None:
    register("audio::Odd")(function)
    with pytest.raises(ModelError, match=rf"^node 'act' \(audio::Odd\): {why}") as caught:
        bound(model_of([node("Odd", inputs, outputs, **attrs)], {"x": X}, outputs), tmp_path)
    assert not isinstance(caught.value, UnsupportedError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == ("Division" in why)


def test_what_no_function_gets_is_refused(tmp_path: Path) -> None:
    register("audio::Odd")(lambda build, x, **attributes: x)
    body = helper.make_graph([], "b", [], [])
    items = helper.make_node("SequenceConstruct", ["x"], ["s"])
    for nodes, why in (
        ([node("Odd", ["x"], ["y"], body=body)], "attribute 'body', which is of a kind that is not read"),
        ([items, node("Odd", ["s"], ["y"])], "a sequence among its operands"),
    ):
        with pytest.raises(UnsupportedError, match=f"'act' .audio::Odd with {why}"):
            bound(model_of(nodes, {"x": X}, ["y"]), tmp_path)


def test_the_same_name_in_another_domain_is_told(tmp_path: Path) -> None:
    register("sound::Snake")(snake)
    why = r"'act' .audio::Snake, not sound::Snake, which is registered.*oocdl\.ops\.register"
    with pytest.raises(UnsupportedError, match=why):
        bound(model_of([node("Snake", ["x"], ["y"])], {"x": X}, ["y"]), tmp_path)


def test_names_and_functions_that_cannot_be_are_refused(own_operators: dict[str, Any]) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("Relu", snake, "oocdl reads the operator 'Relu' itself"),
        ("ai.onnx::NonZero", snake, "oocdl reads the operator 'NonZero' itself"),
        ("audio:Snake", snake, "'audio:Snake' is no name"),
        ("::Snake", snake, "'::Snake' is no name"),
        ("audio::Odd", np.add, "made by 'def'"),
        ("audio::Odd", lambda: "x", "takes no builder"),
        ("audio::Odd", lambda build, x, alpha=1.0: x, r"operand 'alpha' with a default .* behind a \*"),
    ]
    for name, function, why in cases:
        with pytest.raises(InputError, match=why):
            register(name)(function)
    register("audio::Snake")(snake)
    register("audio::Snake")(snake)  # the same, as when a cell is run again
    with pytest.raises(InputError, match="'audio::Snake' of another function already; replace=True"):
        register("audio::Snake")(two)
    register("audio::Snake", replace=True)(two)
    assert own_operators["audio::Snake"].function is two


def test_a_weight_that_only_an_own_operator_reads_is_trained(tmp_path: Path) -> None:
    register("audio::Snake")(snake)
    model = model_of([node("Snake", ["x", "a"], ["y"])], {"x": X}, ["y"], {"a": A})
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    assert list(bound(model, tmp_path).weights) == ["a"]
