"""Repeats along an axis by Tile and Reshape are read as interpolation, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from torch import Tensor

from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from tests.kit.lowered import check, model_of
from tests.kit.onnx_kit import bound

KERAS = Path(__file__).parent / "keras"
node = helper.make_node


def after_unsqueeze(axis: int, repeats: list[int], shape: list[int], perm: list[int] | None = None) -> Any:
    nodes = [node("Unsqueeze", ["x", "a"], ["u"]), node("Tile", ["u", "r"], ["t"])]
    nodes += [node("Transpose", ["t"], ["p"], perm=perm)] if perm else []
    nodes += [node("Reshape", ["p" if perm else "t", "s"], ["y"])]
    return nodes, {"a": np.array([axis]), "r": np.array(repeats), "s": np.array(shape)}


Formula = Callable[[Tensor], Tensor]
CASES: dict[str, tuple[Any, Formula, bool]] = {
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


@pytest.mark.parametrize("name", CASES)
def test_what_is_repeated_is_equal_and_stays_whole(name: str, tmp_path: Path) -> None:
    (nodes, constants), formula, is_repeat = CASES[name]
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
