"""Files of Keras and tf2onnx as they come, trained by ``fit``: equal to Keras, or announced.

``make_keras_files.py`` writes them, and the losses of Keras beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.onnx.trained import Part
from oocdl.ops.registry import RULES
from oocdl.optim import SGD
from tests.kit.nets import write_data
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT

FOLDER = Path(__file__).parent / "keras"
RATE = 0.1
CUTS: dict[str, dict[str, Any]] = {
    "whole": {"threads": 1},
    "batch": {"parallel": {"batch": 2}},
    "space": {"parallel": {"space": (2,)}},
}
# Numbers of the code are in float32 in the file, and Keras has those of "volume" in float32 throughout.
EQUAL = {
    "classifier-training": 1e-8,
    "mobile": 1e-8,
    "recurrent": 1e-12,
    "transformer": 1e-8,
    "unet": 1e-8,
    "volume": 1e-6,
}
CUT = {
    **dict.fromkeys(("mobile", "recurrent", "transformer"), "batch"),
    **dict.fromkeys(("classifier-training", "unet", "volume"), "space"),
}
FOLDED = "BatchNormalization folded in"
BATCHES = "no running statistics in the file"
SAID = {
    "classifier-training": (BATCHES,),
    "mobile": (BATCHES,),
    "classifier": (FOLDED,),
    "mobile-export": (FOLDED,),
    "fresh": ("6 layers have no bias",),
}
Train = Callable[[str, str], oocdl.Run]


def arrays_of(name: str) -> dict[str, np.ndarray]:
    """The batch ``x``, labels ``y`` and ``losses`` of a file."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        return dict(stored)


def remarks_of(path: Path, shape: tuple[int, ...]) -> list[str]:
    model = inspect_onnx(path)
    remarks = model.bind(RULES, {model.inputs[0].name: shape}).trained.remarks
    assert all("oocdl.from_torch" not in remark.cure for remark in remarks)
    return [remark.text for remark in remarks]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Three steps of SGD on the batch of a file."""

    def call(name: str, cut: str) -> oocdl.Run:
        path, arrays = FOLDER / f"{name}.onnx", arrays_of(name)
        given = {inspect_onnx(path).inputs[0].name: arrays["x"], "y": arrays["y"]}
        data = write_data(tmp_path / "data.zarr", given)
        options = {**EXACT, "loss": "cross_entropy", "logits": "auto", **CUTS[cut]}
        size = {"batch_size": len(arrays["x"]), "steps": len(arrays["losses"])}
        run = oocdl.fit(path, data, workdir=tmp_path / "run", optimizer=SGD(lr=RATE), **options, **size)
        assert run is not None
        return run

    return call


@pytest.mark.filterwarnings("ignore::oocdl.errors.ModelWarning")
@pytest.mark.parametrize(("name", "cut"), [*((name, "whole") for name in EQUAL), *CUT.items()])
def test_losses_are_those_of_keras(name: str, cut: str, train: Train) -> None:
    run = train(name, cut)
    wanted = arrays_of(name)["losses"]
    np.testing.assert_allclose(losses_of(run), wanted, rtol=EQUAL[name])


@pytest.mark.parametrize("name", sorted({*EQUAL, *SAID}))
def test_what_is_said_of_a_file(name: str) -> None:
    found = remarks_of(FOLDER / f"{name}.onnx", arrays_of(name)["x"].shape)
    assert len(found) == len(SAID.get(name, ()))
    assert all(word in text for word, text in zip(SAID.get(name, ()), found, strict=True))


@pytest.mark.filterwarnings("ignore::oocdl.errors.ModelWarning")
@pytest.mark.parametrize("name", [name for name in SAID if FOLDED in SAID[name]])
def test_a_folded_norm_computes_the_same_and_trains_another_network(name: str, train: Train) -> None:
    wanted = arrays_of(name)["losses"]
    first, *others = losses_of(train(name, "whole"))
    assert first == pytest.approx(wanted[0], rel=1e-6)
    assert np.abs(np.asarray(others) / wanted[1:] - 1).max() > 1e-4, "there was nothing to say"


def test_numbers_of_the_code_are_not_trained() -> None:
    """The epsilon of a norm, as the constant [0.001] of a generated name; weights have such names, too."""
    model = inspect_onnx(FOLDER / "classifier-training.onnx")
    trained = model.bind(RULES, {"image": (2, 12, 10, 3)}).trained
    folded = [record for record in trained.tensors if record.name.startswith("const_fold_opt__")]
    parts = {record.shape: record.part for record in folded}
    assert parts[1,] is Part.CONSTANT and parts[8, 1, 3, 3] is Part.TRAINED
    assert trained.count(Part.TRAINED) == (12, 717)


def test_the_logits_of_a_softmax_before_a_transpose() -> None:
    imported = inspect_onnx(FOLDER / "unet.onnx").bind(RULES, {"image": (2, 16, 12, 1)})
    ((output, value),) = imported.outputs
    assert imported.final_activation == {output: "Softmax"}
    makers = {name: node for node in imported.graph.nodes for name in node.outputs}
    assert makers[value].attrs["axis"] in (3, -1) and makers[value].inputs == (imported.logits[output],)
    assert imported.graph.values[imported.logits[output]].shape == (2, 16, 12, 3)


def test_the_bias_of_an_lstm_is_one_bias(train: Train) -> None:
    """ONNX adds two; the second is zeros that stand for nothing in Keras, and stays so."""
    weights = train("recurrent", "whole").weights
    (name,) = (name for name in weights if name.startswith("B__"))
    trained = weights[name][...]
    assert trained.shape == (2, 48)
    assert trained[:, :24].all() and not trained[:, 24:].any()
