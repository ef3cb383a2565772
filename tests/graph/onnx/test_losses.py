"""Losses that are nodes of a file: values and gradients are PyTorch's, in every cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.ops import RULES
from tests.kit import lowered
from tests.kit.onnx_kit import bound

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


KNOWN = np.abs(LABELS) % 3
MASKED = np.where(np.arange(3)[:, None] == 2, -np.inf, SCORES)
CROSS = "SoftmaxCrossEntropyLoss"
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    **{
        f"{op}, weighted, ignores -100, {reduction}": (
            model(op, WEIGHTS, reduction=reduction, ignore_index=-100), SCORES, LABELS,
            partial(loss, weight=torch.as_tensor(WEIGHTS), reduction=reduction))
        for op, loss in OPS.items()
        for reduction in ("mean", "sum", "none")
    },
    **{
        f"{op}, ignores a class": (model(op, ignore_index=1), SCORES, KNOWN, partial(loss, ignore_index=1))
        for op, loss in OPS.items()
    },
    "the loss and its logarithms": (
        model(CROSS, outputs=2, ignore_index=-100), SCORES, LABELS,
        lambda x, y: (F.cross_entropy(x, y), F.log_softmax(x, 1))),
    "a class that is masked by infinity": (model(CROSS), MASKED, KNOWN % 2, F.cross_entropy),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_pytorchs(name: str, tmp_path: Path) -> None:
    made, scores, labels, formula = CASES[name]
    lowered.check(made, {"x": scores, "y": labels}, formula, tmp_path, counts=(1, 3))


def test_no_label_counts_is_no_number_and_so_is_a_label_that_is_no_class(tmp_path: Path) -> None:
    for labels, ignored in ((np.full((4, 5), 1), 1), (np.full((4, 5), 3), 1)):
        made = model(CROSS, ignore_index=ignored)
        graph, outputs, _ = lowered.with_gradients(made, tmp_path, {"x": SCORES, "y": labels}, "float64")
        found = lowered.run_graph(graph, RULES, {"x": SCORES, "y": labels}, engine="torch")
        assert np.isnan(found.outputs[outputs[0]])


def test_class_weights_are_not_trained(tmp_path: Path) -> None:
    assert not bound(model(CROSS, WEIGHTS), tmp_path).weights
