"""Losses that are nodes of a file: values and gradients are PyTorch's, in every cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from tests.kit import lowered

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(4, 3, 5))
LABELS = RANDOM.integers(3, size=(4, 5))
LABELS[0, :3] = -100
WEIGHTS = np.array([0.5, 2.0, 0.25])
OPS = {"SoftmaxCrossEntropyLoss": F.cross_entropy, "NegativeLogLikelihoodLoss": F.nll_loss}


def model(op: str, weights: Any = None, outputs: int = 1, **attrs: Any) -> Any:
    names = ["x", "y"] + ["w"] * (weights is not None)
    results = ["z", "chances"][:outputs]
    return lowered.model_of(
        [helper.make_node(op, names, results, name="n", **attrs)],
        {"x": SCORES, "y": LABELS},
        results,
        {"w": weights} if weights is not None else {},
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("op", OPS)
def test_weighted_with_ignored_labels(op: str, reduction: str, tmp_path: Path) -> None:
    def formula(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return OPS[op](x, y, torch.as_tensor(WEIGHTS), reduction=reduction)  # ignores -100

    made = model(op, WEIGHTS, reduction=reduction, ignore_index=-100)
    lowered.check(made, {"x": SCORES, "y": LABELS}, formula, tmp_path, counts=(1, 3))


@pytest.mark.parametrize("op", OPS)
def test_an_ignored_class_and_no_weights(op: str, tmp_path: Path) -> None:
    labels = np.abs(LABELS) % 3
    lowered.check(
        model(op, ignore_index=1),
        {"x": SCORES, "y": labels},
        lambda x, y: OPS[op](x, y, ignore_index=1),
        tmp_path,
        counts=(1, 3),
    )


def test_the_loss_and_its_logarithms_both_have_gradients(tmp_path: Path) -> None:
    made = model("SoftmaxCrossEntropyLoss", outputs=2, ignore_index=-100)
    lowered.check(
        made,
        {"x": SCORES, "y": LABELS},
        lambda x, y: (F.cross_entropy(x, y), F.log_softmax(x, 1)),
        tmp_path,
        counts=(1, 3),
    )


def test_a_class_that_is_masked_by_infinity_changes_nothing(tmp_path: Path) -> None:
    scores, labels = SCORES.copy(), np.abs(LABELS) % 2
    scores[:, 2] = -np.inf
    made = model("SoftmaxCrossEntropyLoss")
    lowered.check(made, {"x": scores, "y": labels}, F.cross_entropy, tmp_path, counts=(1, 3))


def test_no_label_counts_is_no_number_and_so_is_a_label_that_is_no_class(tmp_path: Path) -> None:
    for labels, ignored in ((np.full((4, 5), 1), 1), (np.full((4, 5), 3), 1)):
        made = model("SoftmaxCrossEntropyLoss", ignore_index=ignored)
        graph, outputs, _ = lowered.with_gradients(made, tmp_path, {"x": SCORES, "y": labels}, "float64")
        found = lowered.run_graph(graph, RULES, {"x": SCORES, "y": labels}, engine="torch")
        assert np.isnan(found.outputs[outputs[0]])


def test_class_weights_are_not_trained(tmp_path: Path) -> None:
    path = tmp_path / "loss.onnx"
    path.write_bytes(model("SoftmaxCrossEntropyLoss", WEIGHTS).SerializeToString())
    assert not inspect_onnx(path).bind(RULES).weights
