"""Pad of ONNX files: values and gradients are PyTorch's, in every mode and in every cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from tests.kit import lowered
from tests.kit.one_node import OneNode, check

X = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
ENDS = np.array([3, 1, 2, 0])  # of the axes 2 and 3: before both, after both
MODES = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}


def padded(*pads: int, mode: str = "constant", value: float = 0.0) -> lowered.Formula:
    """PyTorch's pads: the last axis first, before and after."""
    return partial(F.pad, pad=pads, mode=mode, value=value if mode == "constant" else None)


def reflected_twice(x: torch.Tensor) -> torch.Tensor:
    """Five more elements of an axis of three, as NumPy has them; PyTorch refuses it."""
    return x[:, torch.as_tensor(np.pad(np.arange(3), (5, 4), mode="reflect"))]


def pads(axis: int, rank: int, before: int, after: int) -> np.ndarray:
    found = np.zeros((2, rank), np.int64)
    found[:, axis] = before, after
    return found.reshape(-1)


CROPPING = np.array([0, 0, 1, -1, 0, 0, -2, 2])
CASES = [
    *(
        OneNode("Pad", padded(1, 0, 3, 2, mode=mode), [X, ENDS, None, np.array([2, -1])], {"mode": name})
        for name, mode in MODES.items()
    ),
    *(
        OneNode("Pad", padded(-1, 2, 1, -2, mode=mode), [X, CROPPING], {"mode": name})
        for name, mode in MODES.items()
    ),
    OneNode("Pad", reflected_twice, [X, pads(1, 4, 5, 4)], {"mode": "reflect"}),
    OneNode("Pad", padded(1, 0, 3, 2, value=7), [X, ENDS, np.array(7), np.array([2, 3])]),
    OneNode(  # a number so large that it would take the elements' digits with it if it were added
        "Pad",
        padded(-1, 2, 1, -2, value=2.0**100),
        [X],
        {"pads": CROPPING.tolist(), "value": 2.0**100},
        opset=9,
    ),
    OneNode("Pad", padded(-1, 2, 1, -2), [X, CROPPING]),
    OneNode("Pad", padded(1, 2, mode="replicate"), [X[0], pads(2, 3, 1, 2)], {"mode": "edge"}, 11),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}{[*case.arrays, None][1]}")
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


def nodes(folder: Path, ends: Sequence[int], constants: dict[str, np.ndarray], mode: str) -> list[str]:
    """The operators that a Pad of ``[3, 4]`` becomes."""
    node = helper.make_node("Pad", ["x", "p", *constants], ["y"], name="n", mode=mode)
    model = lowered.model_of([node], {"x": X[0, :, 0]}, ["y"], {"p": np.array(ends), **constants}, opset=21)
    onnx.save(model, folder / "pad.onnx")
    return [node.op for node in inspect_onnx(folder / "pad.onnx").bind(RULES).graph.nodes]


@pytest.mark.parametrize("mode", ["constant", *MODES])
def test_pads_of_zero_vanish(mode: str, tmp_path: Path) -> None:
    assert nodes(tmp_path, [0, 0, 0, 0], {"c": np.array(3.0)}, mode=mode) == []


@pytest.mark.parametrize(
    ("ends", "mode", "kind", "message"),
    [
        ([0, 0, 0, 2], "mirror", UnsupportedError, "Pad with mode mirror"),
        ([-3, 0, 0, 0], "edge", ModelError, "pads -3 and 0 leave nothing of axis 0"),
        ([0, 0, 0], "constant", ModelError, r"pads \[0, 0, 0\] do not fit axes \[0, 1\] of 2"),
        ([1000, 0, 0, 0], "wrap", UnsupportedError, "axis 0 of 3 repeated 334 times"),
        ([2**40, 0, 0, 0], "edge", ModelError, "the limit is"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    ends: list[int], mode: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        nodes(tmp_path, ends, {}, mode=mode)
