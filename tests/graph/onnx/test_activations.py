"""Activation functions of ONNX files: values and gradients are PyTorch's, at kinks too, in every cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.kit.one_node import OneNode, check

AROUND = np.array([-7.0, -3, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 3, 7, 30]).reshape(1, 2, 7)
SLOPE = np.array([[0.25], [-0.5]])

CASES = [
    OneNode("HardSigmoid", F.hardsigmoid, [AROUND], {"alpha": 1 / 6}),
    OneNode("HardSwish", F.hardswish, [AROUND]),
    OneNode("Selu", F.selu, [AROUND]),
    OneNode("Celu", F.celu, [AROUND]),
    OneNode("Celu", lambda x: F.celu(x, 0.5), [AROUND], {"alpha": 0.5}),
    OneNode("Mish", F.mish, [AROUND]),
    OneNode("Swish", F.silu, [AROUND]),
    OneNode(
        "SwiGLU",
        lambda a, b: a * torch.sigmoid(1.5 * a) * b,
        [AROUND, AROUND[::-1].copy()],
        {"alpha": 1.5},
        opset=28,
    ),
    OneNode("Softsign", F.softsign, [AROUND]),
    OneNode("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), [AROUND], {"alpha": 0.5}),
    OneNode("Shrink", F.softshrink, [AROUND], {"lambd": 0.5, "bias": 0.5}),
    OneNode("Shrink", F.hardshrink, [AROUND], {"lambd": 0.5}),
    OneNode("Elu", F.elu, [AROUND]),
    OneNode("Gelu", F.gelu, [AROUND], {"approximate": "none"}),
    OneNode("Gelu", lambda x: F.gelu(x, approximate="tanh"), [AROUND], {"approximate": "tanh"}),
    OneNode("Ceil", torch.ceil, [AROUND]),
    OneNode("Sign", torch.sign, [AROUND]),
    OneNode("Mean", lambda x, y: (x + y) / 2, [AROUND, SLOPE]),
    OneNode("PRelu", lambda x, w: F.prelu(x, w.reshape(-1)), [AROUND, SLOPE]),
    OneNode("PRelu", F.prelu, [AROUND, np.array([0.25])]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)
