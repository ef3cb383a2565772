"""What a file says of its module: it decides what is trained, and is believed only where it fits the file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.metadata import FORMAT, KEY, Counter, Fact, Metadata, write_metadata
from oocdl.graph.onnx.reader import Imported, OnnxModel, inspect_onnx
from oocdl.ops import RULES
from tests.kit.nets import save
from tests.kit.onnx_kit import run

FACTS = {
    "w": Fact(kind="parameter", names=("fc.weight", "head.weight"), requires_grad=True),
    "still": Fact(kind="parameter", names=("still",)),
    "pe": Fact(kind="buffer", names=("pe",)),
    "mean": Fact(kind="statistic", names=("norm.running_mean",)),
    "var": Fact(kind="statistic", names=("norm.running_var",)),
}
KNOWN = Metadata(
    module="Net",
    exporter="dynamo",
    facts=FACTS,
    unread=("aux.weight",),
    counters={"norm.num_batches_tracked": Counter(start=3, per_pass=1)},
)


def write(path: Path, norm: dict[str, Any] | None = None) -> Path:
    """x -> x @ w + still + pe + loose -> BatchNorm -> y, without metadata."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "fc"),
        helper.make_node("Add", ["a", "still"], ["b"], "add"),
        helper.make_node("Add", ["b", "pe"], ["c"], "pe_add"),
        helper.make_node("Add", ["c", "loose"], ["d"], "loose_add"),
        helper.make_node(
            "BatchNormalization", ["d", "g", "b0", "mean", "var"], ["y"], "norm", **(norm or {})
        ),
    ]
    three = np.arange(1.0, 4.0)
    weights = {"w": np.eye(3), "still": three, "pe": three, "loose": three, "g": np.ones(3), "b0": three}
    return save(path, nodes, {**weights, "mean": three, "var": three}, ["n", 3], {"y": ["n", 3]})


def with_text(path: Path, *texts: str) -> Path:
    model = onnx.load(str(path))
    for text in texts:
        model.metadata_props.add(key=KEY, value=text)
    onnx.save(model, str(path))
    return path


def bound(path: Path, **options: Any) -> tuple[OnnxModel, Imported]:
    model = inspect_onnx(path)
    return model, model.bind(RULES, {"x": (4, 3)}, precision="float64", **options)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    model = onnx.load(str(write(tmp_path / "m.onnx")))
    model.metadata_props.add(key="author", value="someone")
    write_metadata(model, replace(KNOWN, module="Other"))
    write_metadata(model, KNOWN)
    onnx.save(model, str(tmp_path / "n.onnx"))
    assert inspect_onnx(tmp_path / "n.onnx").metadata == KNOWN
    assert [entry.key for entry in model.metadata_props] == ["author", KEY]
    assert KNOWN.initializer_of("head.weight") == "w" and KNOWN.initializer_of("no") is None


def test_it_decides_what_is_trained(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx")
    _, plain = bound(path)
    assert {v.name for v in plain.graph.of_role(Role.WEIGHT)} == {"w", "still", "pe", "loose", "g", "b0"}
    _, told = bound(with_text(path, KNOWN.text()))
    assert {v.name for v in told.graph.of_role(Role.WEIGHT)} == {"w", "still"}
    assert told.frozen == ("still",) and not told.weights.keys() & {"pe", "loose", "g", "b0"}
    assert set(told.graph.updates) == {"mean", "var"}


def test_statistics_that_are_buffers_mean_evaluation_mode(tmp_path: Path) -> None:
    still = {name: replace(FACTS[name], kind="buffer") for name in ("mean", "var")}
    path = with_text(write(tmp_path / "m.onnx"), replace(KNOWN, facts={**FACTS, **still}).text())
    _, told = bound(path)
    assert not told.graph.updates
    x = torch.randn(4, 3, dtype=torch.float64)
    three = torch.arange(1.0, 4.0, dtype=torch.float64)
    wanted = (x + 3 * three - three) / torch.sqrt(three + 1e-5) + three
    assert torch.allclose(run(told, x)[dict(told.outputs)["y"]], wanted, atol=1e-12)


def test_freeze_takes_the_names_of_the_module(tmp_path: Path) -> None:
    _, told = bound(with_text(write(tmp_path / "m.onnx"), KNOWN.text()), freeze=("head.*",))
    assert set(told.frozen) == {"w", "still"}


@pytest.mark.parametrize(
    ("modes", "wanted"),
    [((1, 0), ("n1",)), ((0, 0), ()), ((1, 1), ())],
    ids=["one in evaluation", "an inference file", "all in training"],
)
def test_a_file_with_norms_in_both_modes(modes: tuple[int, int], wanted: Any, tmp_path: Path) -> None:
    """A norm with training_mode=0 beside one with 1 stays in evaluation mode, as in PyTorch."""
    nodes, weights, x = [], {}, "x"
    for number, mode in enumerate(modes):
        names = [f"{kind}{number}" for kind in ("scale", "bias", "mean", "var")]
        weights |= dict(zip(names, (np.ones(3), np.zeros(3), np.full(3, 0.5), np.full(3, 2.0)), strict=True))
        outputs = [f"y{number}", *(f"{n}.new" for n in names[2:] if mode)]
        nodes.append(
            helper.make_node("BatchNormalization", [x, *names], outputs, f"n{number}", training_mode=mode)
        )
        x = f"y{number}"
    _, found = bound(save(tmp_path / "m.onnx", nodes, weights, ["n", 3], {x: ["n", 3]}))
    assert set(found.graph.updates) == {
        f"{kind}{n}" for n in (0, 1) if f"n{n}" not in wanted for kind in ("mean", "var")
    }


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_keeps_no_statistics(mode: int, training: bool, tmp_path: Path) -> None:
    """Over statistics that the graph computes, as exporters write F.batch_norm(x, None, None)."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[0], keepdims=0),
        helper.make_node("Sub", ["x", "m"], ["d"], "sub"),
        helper.make_node("Mul", ["d", "d"], ["s"], "square"),
        helper.make_node("ReduceMean", ["s"], ["v"], "var", axes=[0], keepdims=0),
        helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["y"], "norm", training_mode=mode),
    ]
    weights = {"g": np.full(3, 1.5), "b": np.arange(3.0)}
    _, found = bound(save(tmp_path / "m.onnx", nodes, weights, ["n", 3], {"y": ["n", 3]}), training=training)
    x = torch.randn(4, 3, dtype=torch.float64)
    wanted = torch.nn.functional.batch_norm(
        x, None, None, torch.full((3,), 1.5).double(), torch.arange(3.0).double(), training=True
    )
    assert torch.allclose(run(found, x)[dict(found.outputs)["y"]], wanted, atol=1e-12)
    assert not found.graph.updates


def changed(**changes: Any) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(KNOWN), **changes}


def one(name: str, **changes: Any) -> dict[str, Any]:
    known = asdict(KNOWN)["facts"]
    return changed(facts={**known, name: {**asdict(Fact(kind="buffer", names=("other",))), **changes}})


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "cannot be read"),
    "a list": ([1], "cannot be read"),
    "deep": ("[" * 100_000, "cannot be read"),
    "another format": (changed(format=99), "format 99"),
    "a field is missing": ({"format": FORMAT, "facts": {}}, "KeyError"),
    "a name that is no text": (changed(unread=[3]), "3 is no str"),
    "a flag that is no flag": (one("pe", requires_grad=1), "1 is no bool"),
    "a count below zero": (changed(counters={"c": {"start": -1, "per_pass": 1}}), "-1 is no int"),
    "an initializer that is not there": (one("gone"), "no initializer 'gone'"),
    "an unknown kind": (one("pe", kind="gradient"), "'gradient'"),
    "no names": (one("pe", names=[]), "0 names"),
    "one name for two": (one("pe", names=["still"]), "'still' names two tensors"),
    "a counter with the name of a weight": (
        changed(counters={"still": {"start": 1, "per_pass": 1}}), "'still' names two tensors"),
    "a statistic of no norm": (one("pe", kind="statistic"), "read as something else"),
    "a buffer that is trained": (one("pe", requires_grad=True), "a buffer that is trained"),
    "a number without end": (changed(numbers=[10**400]), "cannot be read"),
    "an empty name": (one("pe", names=[""]), "a name is empty"),
    "no class": (changed(module=""), "a text is empty"),
    "padding outside": (one("w", kind="parameter", padding_idx=3), "row 3 of 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_the_file_is_refused(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    text = data if isinstance(data, str) else json.dumps(data)
    path = with_text(write(tmp_path / "m.onnx"), text)
    with pytest.raises(ModelError, match=message) as caught:
        inspect_onnx(path)
    assert "from_torch" in str(caught.value) and "\n" not in str(caught.value)


def test_whole_numbers_are_no_parameters_and_two_texts_are_one_too_many(tmp_path: Path) -> None:
    model = onnx.load(str(write(tmp_path / "m.onnx")))
    model.graph.initializer.append(helper.make_tensor("ids", TensorProto.INT64, [1], [1]))
    onnx.save(model, str(tmp_path / "m.onnx"))
    text = json.dumps(one("ids", kind="parameter"))
    with pytest.raises(ModelError, match="is int64"):
        inspect_onnx(with_text(tmp_path / "m.onnx", text))
    with pytest.raises(ModelError, match="cannot be read"):
        inspect_onnx(with_text(write(tmp_path / "n.onnx"), KNOWN.text(), KNOWN.text()))
