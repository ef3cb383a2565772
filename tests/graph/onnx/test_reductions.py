"""Reductions, scans and norms of ONNX files: values and gradients are PyTorch's, in every cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from tests.kit import lowered
from tests.kit.one_node import OneNode, check

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 3, 5))
TIED = np.round(X)
ZEROS = X * (RANDOM.uniform(size=X.shape) > 0.3)
ZEROS[0, 1] = 0
AXIS, AXES = np.array(1), np.array([0, 2])


def exclusive(x: torch.Tensor) -> torch.Tensor:
    """Sums of all before, from the other end."""
    return x.flip(1).cumsum(1).flip(1) - x


CASES = [
    OneNode("ReduceMax", lambda x: x.amax((0, 2), keepdim=True), [TIED, AXES]),
    OneNode("ReduceMin", lambda x: x.amin((0, 2)), [TIED, AXES], {"keepdims": 0}),
    OneNode("ReduceProd", lambda x: x.prod(2, keepdim=True), [ZEROS, np.array([2])]),
    OneNode("ReduceProd", lambda x: x.prod(), [X + 2], {"keepdims": 0}),
    OneNode("ReduceLogSum", lambda x: x.sum(1, keepdim=True).log(), [np.abs(X), np.array([1])]),
    OneNode("ReduceL2", lambda x: torch.linalg.vector_norm(x, dim=2, keepdim=True), [ZEROS, np.array([2])]),
    OneNode("ReduceMean", lambda x: x, [X, np.array([], np.int64)], {"noop_with_empty_axes": 1}),
    OneNode("ArgMax", lambda x: x.argmax(2, keepdim=True), [TIED], {"axis": 2}),
    OneNode("ArgMin", lambda x: x.argmin(1), [X], {"axis": 1, "keepdims": 0}),
    OneNode("CumSum", lambda x: x.cumsum(1), [X, AXIS]),
    OneNode("CumSum", exclusive, [X, AXIS], {"exclusive": 1, "reverse": 1}),
    OneNode("CumProd", lambda x: x.cumprod(2), [X, np.array(2)], opset=26),
    OneNode("Softmax", lambda x: F.softmax(x.flatten(1), 1).reshape(x.shape), [X], {"axis": 1}, opset=11),
    OneNode("Hardmax", lambda x: F.one_hot(x.argmax(2), 5).double(), [X]),
    OneNode("LpNormalization", lambda x: F.normalize(x, dim=1), [X], {"axis": 1}),
    OneNode("LpNormalization", lambda x: F.normalize(x, 1.0), [X], {"axis": 1, "p": 1}),
    OneNode(
        "MeanVarianceNormalization",
        lambda x: (x - x.mean((0, 2), keepdim=True)) / (x.std((0, 2), unbiased=False, keepdim=True) + 1e-9),
        [X],
        {"axes": [0, 2]},
    ),
    OneNode(
        "RMSNormalization",
        lambda x, w: F.rms_norm(x, (3, 5), w, 1e-5),
        [X, RANDOM.normal(size=(3, 5))],
        {"axis": 1},
    ),
    OneNode(
        "LRN",
        lambda x: F.local_response_norm(x, 3, 0.1, 0.5, 2.0),
        [X],
        {"size": 3, "alpha": 0.1, "beta": 0.5, "bias": 2.0},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("read", [("y", "mean", "inverse"), ("mean",), ("inverse",)])
def test_a_layer_norm_tells_mean_and_inverse_deviation(read: tuple[str, ...], tmp_path: Path) -> None:
    def formula(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        variance, mean = torch.var_mean(x, (1, 2), correction=0, keepdim=True)
        made = {"y": F.layer_norm(x, (3, 5), w), "mean": mean, "inverse": (variance + 1e-5).rsqrt()}
        return tuple(made[name] for name in read)

    node = helper.make_node("LayerNormalization", ["x", "w"], ["y", "mean", "inverse"], name="n", axis=1)
    inputs = {"x": X, "w": RANDOM.normal(size=(3, 5))}
    model = lowered.model_of([node], inputs, list(read))
    lowered.check(model, inputs, formula, tmp_path, counts=(1, 3), tolerances=(1e-7, 2e-5))
