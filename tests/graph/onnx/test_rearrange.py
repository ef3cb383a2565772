"""What puts elements elsewhere: values and gradients are PyTorch's, in every cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.errors import UnsupportedError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from tests.kit import lowered
from tests.kit.one_node import OneNode, check

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 4, 5))
LENGTHS = np.array([4, 0, 2])


def turned(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The first elements of axis 1 of each sample, turned round."""
    rows = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(x, lengths.tolist(), strict=True)]
    return torch.stack(rows)


FOLDED = {"dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
CASES = [
    OneNode(
        "ReverseSequence",
        lambda x: turned(x, torch.as_tensor(LENGTHS)),
        [X, LENGTHS],
        {"batch_axis": 0, "time_axis": 1},
    ),
    OneNode(
        "ReverseSequence",
        lambda x: turned(x.mT, torch.as_tensor(LENGTHS)).mT,
        [X, LENGTHS],
        {"batch_axis": 0, "time_axis": 2},
    ),
    OneNode("CenterCropPad", lambda x: F.pad(x, (1, 2))[:, 1:3], [X, np.array([3, 2, 8])]),
    OneNode("CenterCropPad", lambda x: F.pad(x, (0, 0, 0, 1)), [X, np.array([5])], {"axes": [-2]}),
    OneNode("Compress", lambda x: x[:, [0, 3]], [X, np.array([True, False, False, True])], {"axis": 1}),
    OneNode("Compress", lambda x: x.reshape(-1)[[1, 2, 5]], [X, np.arange(6) % 4 % 3 > 0]),
    OneNode(
        "Col2Im",
        lambda x: F.fold(x, (5, 6), (2, 3), **FOLDED),  # type: ignore[arg-type]
        [RANDOM.normal(size=(2, 3 * 6, 6)), np.array([5, 6]), np.array([2, 3])],
        {"dilations": [1, 2], "pads": [1, 0, 1, 0], "strides": [2, 1]},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_sequences_of_lengths_that_data_tells(tmp_path: Path) -> None:
    inputs = {"x": X, "n": LENGTHS}
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], name="n", batch_axis=0, time_axis=1)
    lowered.check(lowered.model_of([node], inputs, ["y"]), inputs, turned, tmp_path, counts=(1, 3))


def test_a_choice_by_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    inputs = {"x": X, "c": np.array([True, False, True])}
    node = helper.make_node("Compress", ["x", "c"], ["y"], name="n", axis=0)
    path.write_bytes(lowered.model_of([node], inputs, ["y"]).SerializeToString())
    with pytest.raises(UnsupportedError, match="'n'.*its shape depends on data"):
        inspect_onnx(path).bind(RULES)
