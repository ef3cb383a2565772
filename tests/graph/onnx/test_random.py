"""What draws numbers: equal bits in every cut, the right distribution, and what predictions make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from oocdl.engines.engine_registry import ENGINES
from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.onnx.reader import Imported
from oocdl.ops.registry import RULES
from oocdl.testing import run_graph
from tests.kit.lowered import model_of
from tests.kit.onnx_kit import bound

SHAPE = (40, 50)


def reading(nodes: list[onnx.NodeProto], folder: Path, training: bool = True) -> Imported:
    """The graph of nodes that make ``y`` of ``x`` and the number ``p``."""
    model = model_of(nodes, {"x": np.zeros(SHAPE)}, ["y"], {"p": 0.75}, opset=22)
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
def test_bits_are_equal_in_every_cut_and_others_for_other_seeds_and_steps(which: str, tmp_path: Path) -> None:
    draw, mean, deviation = DRAWS[which]
    imported = reading([draw], tmp_path)
    whole = drawn(imported)
    assert abs(whole.mean() - mean) < 4 * deviation / whole.size**0.5
    assert abs(whole.std() - deviation) < 0.05 * deviation
    for count in (2, 3):
        assert drawn(imported, cuts=dict.fromkeys(range(4), count)).tobytes() == whole.tobytes()
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
