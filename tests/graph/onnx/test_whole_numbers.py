"""Whole numbers, truth values and casts are ONNX's on all engines, or refused; what draws numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from oocdl.engines.engine_registry import ENGINES
from oocdl.errors import InputError, ModelError
from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import Imported
from oocdl.ops import RULES
from oocdl.testing import run_graph
from tests.kit import lowered
from tests.kit.onnx_kit import bound
from tests.kit.whole_cases import KINDS, WholeCase, cases, model_of

LEAST = np.iinfo(np.int64).min
REFUSED = {
    **dict.fromkeys(KINDS, {"MatMul", "Einsum"}),
    "bool": {"OneHot"},
    "float32": {"Cast-uint64", "CastLike-uint64"},
    "uint64": {
        *("MatMul", "Einsum", "Cast-float32", "CastLike-float32", "Abs", "Sign", "Clip", "Mod-fmod"),
        *("Div", "Mod", "Max", "Min", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"),
        *("Div-known", "Mod-known", "Max-known", "Min-known", "Less-known", "Greater-known"),
        *("LessOrEqual-known", "GreaterOrEqual-known", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceMean"),
        *("Scatter-none", "Scatter-max", "Scatter-min", "ArgMax", "ArgMin", "TopK-0", "TopK-1"),
    },
}
"""The cases of each type that are refused, whatever their numbers are."""


def found(model: onnx.ModelProto, given: dict[str, Array], engine: str, folder: Path) -> list[Array]:
    """The results of a model on an engine."""
    imported = bound(model, folder, training=False)
    build = Builder(RULES, imported.graph)
    # What only renames an input gets a node behind it.
    build.outputs = [build("Expand", value, shape=(2, *build.shape(value))) for _, value in imported.outputs]
    build.values = {
        name: replace(value, role=Role.WEIGHT) if value.role is Role.INPUT else value
        for name, value in build.values.items()
    }
    arrays = {name: array.astype(build.dtype(name)) for name, array in given.items()}
    ran = run_graph(build.graph(), RULES, arrays, engine=engine, cuts={})
    return [ran.outputs[name][0] for name in build.outputs]


def refused(case: WholeCase, folder: Path) -> bool:
    """Whether a model of a case is refused, and says why of it."""
    try:
        bound(model_of([case])[0], folder, training=False)
    except ModelError as error:
        assert f"'{case.name}" in str(error)
        return True
    return False


def wanted(model: onnx.ModelProto, given: dict[str, Array]) -> list[Array]:
    """ONNX's results, those of uint64 by their bits."""
    with np.errstate(all="ignore"):
        made = [np.asarray(array) for array in ReferenceEvaluator(model).run(None, given)]
    return [array.astype(np.int64) if array.dtype.kind in "iu" else array for array in made]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_onnxs(kind: str, tmp_path: Path) -> None:
    every = cases(kind)
    some = [case for case in every if not refused(case, tmp_path)]
    assert {case.name for case in every} - {case.name for case in some} == REFUSED[kind]
    model, given = model_of(some)
    truths = wanted(model, given)
    for engine in ENGINES:
        for case, array, truth in zip(some, found(model, given, engine, tmp_path), truths, strict=True):
            np.testing.assert_allclose(array, truth, rtol=1e-6 * (truth.dtype.kind == "f"), err_msg=f"{case}")


BEYOND = np.array([300.0, -1, -300.7, 3e9, -3e9, 1e19, np.nan, np.inf, -np.inf, 2.0**33 + 19712], "f4")
"""Floating-point numbers that types of whole numbers have not: ONNX leaves them open, NumPy takes int32."""


def _cast(kind: str) -> tuple[WholeCase, Any]:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    with np.errstate(invalid="ignore"):
        return WholeCase(kind, "Cast", (BEYOND,), attrs={"to": to}), BEYOND.astype(kind)


OPEN: list[tuple[WholeCase, Any]] = [
    *map(_cast, ("int8", "uint8", "int16", "uint16", "int32", "int64")),
    (WholeCase("Div", "Div", (np.array([LEAST] * 3), np.array([-1, 2, LEAST]))), [LEAST, LEAST // 2, 1]),
    (WholeCase("Mod", "Mod", (np.array([LEAST] * 3), np.array([-1, 3, LEAST]))), [0, 1, 0]),
    (
        WholeCase("Pow", "Pow", (np.array([0, 1, -1, 2, -3, 3]), np.array([-1, -2, -3, -1, -1, 2]))),
        [0, 1, -1, 0, 0, 9],
    ),
    (
        WholeCase("TopK", "TopK", (np.array([1, np.nan, 3, LEAST], "f4"), np.array([4])), (1,)),
        [np.nan, 3, 1, LEAST],
    ),
]
"""What ONNX leaves open, and what PyTorch makes of it."""


@pytest.mark.parametrize(("case", "truth"), OPEN, ids=lambda item: getattr(item, "name", ""))
def test_engines_agree_where_onnx_says_nothing(case: WholeCase, truth: Any, tmp_path: Path) -> None:
    for engine in ENGINES:
        array = found(*model_of([case]), engine, tmp_path)[0]
        np.testing.assert_array_equal(array, np.asarray(truth, array.dtype), engine)


@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("known", [(), (1,), (0, 1)])
def test_whole_numbers_divided_by_0_are_an_error(op: str, known: tuple[int, ...], tmp_path: Path) -> None:
    case = WholeCase("n", op, (np.array([1, 2]), np.array([3, 0])), known)
    for engine in ENGINES:
        with pytest.raises(InputError, match=r"^node 'n' .*divide.* by 0"):
            found(*model_of([case]), engine, tmp_path)


def test_a_power_that_is_no_whole_number_needs_a_floating_point_base(tmp_path: Path) -> None:
    """Rounded down, 3 is the square root of 15 and of 9, or of none of them if that is a digit less."""
    case = WholeCase("n", "Pow", (np.array([4, 9]), np.array([0.5, 2], "f4")))
    assert refused(case, tmp_path)


SUM = helper.make_node("Add", ["x", "x"], ["s"], name="s")
WAYS: dict[str, Sequence[onnx.NodeProto]] = {
    "moved": [
        helper.make_node("Identity", ["s"], ["i"], name="i"),
        helper.make_node("Reshape", ["i", "shape"], ["m"], name="m"),
    ],
    "sequence": [
        helper.make_node("SequenceConstruct", ["s", "x"], ["q"], name="q"),
        helper.make_node("SequenceAt", ["q", "zero"], ["m"], name="m"),
    ],
    "joined": [
        helper.make_node("SequenceConstruct", ["s", "x"], ["q"], name="q"),
        helper.make_node("ConcatFromSequence", ["q"], ["m"], name="m", axis=0),
    ],
    "scanned": [
        helper.make_node(
            "Scan",
            ["x"],
            ["m"],
            name="m",
            num_scan_inputs=1,
            body=helper.make_graph(
                [helper.make_node("Mul", ["one", "one"], ["square"], name="square")],
                "body",
                [helper.make_tensor_value_info("one", TensorProto.INT8, None)],
                [helper.make_tensor_value_info("square", TensorProto.INT8, None)],
            ),
        )
    ],
}
"""Ways by which a value of int8 gets its type: all go on to a Div, which shows what was not brought back."""


@pytest.mark.parametrize("way", WAYS)
def test_a_type_stays_with_its_value(way: str, tmp_path: Path) -> None:
    x = np.array([100, -100, 127, -128, 3], "i1")
    last = helper.make_node("Add", ["m", "m"], ["double"], name="double")
    end = helper.make_node("Div", ["double", "two"], ["y"], name="y")
    known = {"shape": np.array([-1]), "zero": np.array(0), "two": np.array(2, "i1")}
    model = lowered.model_of([SUM, *WAYS[way], last, end], {"x": x}, ["y"], known)
    (truth,) = wanted(model, {"x": x})
    np.testing.assert_array_equal(found(model, {"x": x}, "torch", tmp_path)[0], truth)


SHAPE = (40, 50)


def reading(nodes: list[onnx.NodeProto], folder: Path, training: bool = True) -> Imported:
    """The graph of nodes that make ``y`` of ``x`` and the number ``p``."""
    model = lowered.model_of(nodes, {"x": np.zeros(SHAPE)}, ["y"], {"p": 0.75}, opset=22)
    return bound(model, folder, training=training)


def drawn(imported: Imported, **more: Any) -> Array:
    given = {"x": np.full(SHAPE, 0.3, np.float32)}
    given = {name: array for name, array in given.items() if name in imported.graph.values}
    (y,) = run_graph(imported.graph, RULES, given, **more).outputs.values()
    return y


def node(op: str, *inputs: str, name: str = "draw", out: str = "y", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, [*inputs], [out], name=name, **attrs)


DRAWS = {
    "uniform": (node("RandomUniformLike", "x", low=-1.0, high=3.0), 1.0, 4 / 12**0.5),
    "uniform by shape": (node("RandomUniform", shape=SHAPE, low=1.0, high=2.0), 1.5, 1 / 12**0.5),
    "normal": (node("RandomNormalLike", "x", mean=2.0, scale=0.5), 2.0, 0.5),
    "normal by shape": (node("RandomNormal", shape=SHAPE), 0.0, 1.0),
    "bernoulli": (node("Bernoulli", "x"), 0.3, 0.21**0.5),
}


@pytest.mark.parametrize("which", DRAWS)
def test_numbers_are_equal_in_every_cut_and_others_for_other_seeds(which: str, tmp_path: Path) -> None:
    draw, mean, deviation = DRAWS[which]
    imported = reading([draw], tmp_path)
    whole = drawn(imported)
    assert abs(whole.mean() - mean) < 4 * deviation / whole.size**0.5
    assert abs(whole.std() - deviation) < 0.05 * deviation
    for count in (2, 3):
        cut = drawn(imported, cuts=dict.fromkeys(range(4), count))
        # The logarithm of a normal number has other bits in a loop than in a kernel, which small pieces have.
        np.testing.assert_allclose(cut, whole, 1e-6 if "normal" in which else 0, 0)
    assert not np.array_equal(drawn(imported, seed=1), whole)
    assert not np.array_equal(drawn(imported, step=1), whole)
    for engine in ENGINES:
        np.testing.assert_allclose(drawn(imported, engine=engine), whole, 1e-5, 1e-5)


STOCHASTIC_DEPTH = [
    node("RandomUniformLike", "x", out="u"),
    node("Less", "u", "p", name="less", out="kept"),
    node("Cast", "kept", name="cast", out="mask", to=TensorProto.FLOAT),
    node("Div", "mask", "p", name="div", out="scaled"),
    node("Mul", "x", "scaled", name="mul"),
]


def test_stochastic_depth_drops_in_training_and_is_left_out_of_predictions(tmp_path: Path) -> None:
    found = drawn(reading(STOCHASTIC_DEPTH, tmp_path))
    assert {0.0, round(0.3 / 0.75, 3)} == {round(float(number), 3) for number in found.reshape(-1)}
    predicting = reading(STOCHASTIC_DEPTH, tmp_path, training=False)
    assert not predicting.graph.of_role(Role.RANDOM)
    np.testing.assert_array_equal(drawn(predicting), np.full(SHAPE, 0.3, np.float32))


def test_other_random_numbers_stay_in_predictions(tmp_path: Path) -> None:
    imported = reading([DRAWS["normal"][0]], tmp_path, training=False)
    assert len(imported.graph.of_role(Role.RANDOM)) == 2


@pytest.mark.parametrize("training", [True, False])
def test_the_mask_of_a_dropout_tells_what_it_keeps(training: bool, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Dropout", ["x", "p"], ["kept", "mask"], name="drop"),
        helper.make_node("Cast", ["mask"], ["flags"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "flags"], ["chosen"], name="choose"),
        helper.make_node("Concat", ["kept", "chosen"], ["y"], name="both", axis=0),
    ]
    kept, chosen = np.split(drawn(reading(nodes, tmp_path, training), cuts={0: 3}), 2)
    np.testing.assert_allclose(kept, chosen / 0.25 if training else chosen, rtol=1e-6)
    assert 0.2 < (chosen != 0).mean() < 0.3 if training else (chosen != 0).all()
