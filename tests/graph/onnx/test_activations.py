"""Activation functions of ONNX files: values and gradients are PyTorch's, at kinks too, in every cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.kit.one_node import ENGINES, Lowered, check

AROUND = np.array([-7.0, -3, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 3, 7, 30]).reshape(1, 2, 7)
SLOPE = np.array([[0.25], [-0.5]])

CASES = [
    Lowered("HardSigmoid", F.hardsigmoid, [AROUND], {"alpha": 1 / 6}),
    Lowered("HardSwish", F.hardswish, [AROUND]),
    Lowered("Selu", F.selu, [AROUND]),
    Lowered("Celu", F.celu, [AROUND]),
    Lowered("Celu", lambda x: F.celu(x, 0.5), [AROUND], {"alpha": 0.5}),
    Lowered("Mish", F.mish, [AROUND]),
    Lowered("Swish", F.silu, [AROUND]),
    Lowered("Softsign", F.softsign, [AROUND]),
    Lowered("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), [AROUND], {"alpha": 0.5}),
    Lowered("Shrink", F.softshrink, [AROUND], {"lambd": 0.5, "bias": 0.5}),
    Lowered("Shrink", F.hardshrink, [AROUND], {"lambd": 0.5}),
    Lowered("Elu", F.elu, [AROUND]),
    Lowered("Gelu", F.gelu, [AROUND], {"approximate": "none"}),
    Lowered("Gelu", lambda x: F.gelu(x, approximate="tanh"), [AROUND], {"approximate": "tanh"}),
    Lowered("Ceil", torch.ceil, [AROUND]),
    Lowered("Sign", torch.sign, [AROUND]),
    Lowered("Mean", lambda x, y: (x + y) / 2, [AROUND, SLOPE]),
    Lowered("PRelu", lambda x, w: F.prelu(x, w.reshape(-1)), [AROUND, SLOPE]),
    Lowered("PRelu", F.prelu, [AROUND, np.array([0.25])]),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: Lowered, engine: str, tmp_path: Path) -> None:
    check(case, engine, tmp_path)
