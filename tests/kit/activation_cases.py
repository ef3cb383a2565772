"""Activations and their fused gradients: attributes of instances, and what they compute by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Oracle = Callable[..., torch.Tensor]
"""(operands, attributes) -> result."""


def _gelu_grad(dy: torch.Tensor, x: torch.Tensor, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(F.gelu(x, **attrs), x, dy.expand(x.shape) if dy.dim() == 0 else dy)[0]


ACTIVATIONS: Mapping[str, tuple[Sequence[Mapping[str, Any]], Oracle]] = {
    "Relu": ([{}], lambda i, a: F.relu(i[0])),
    "LeakyRelu": ([{"alpha": 0.1}], lambda i, a: F.leaky_relu(i[0], a["alpha"])),
    "Elu": (
        [{"alpha": alpha} for alpha in (0.7, -0.7, 0.0)],
        lambda i, a: torch.where(i[0] > 0, i[0], a["alpha"] * torch.expm1(i[0].clamp(max=0))),
    ),
    "Gelu": ([{"approximate": way} for way in ("none", "tanh")], lambda i, a: F.gelu(i[0], **a)),
    "QuickGelu": ([{"alpha": 1.7}], lambda i, a: i[0] * torch.sigmoid(a["alpha"] * i[0])),
}
"""Operator of one operand -> its instances, and its oracle."""
ACTIVATION_GRADS: Mapping[str, tuple[Sequence[Mapping[str, Any]], Oracle]] = {
    "ReluGrad": ([{}], lambda i, a: torch.where(i[1] > 0, i[0], torch.zeros((), dtype=i[0].dtype))),
    "LeakyReluGrad": ([{"alpha": 0.1}], lambda i, a: torch.where(i[1] > 0, i[0], i[0] * a["alpha"])),
    "EluGrad": ([{"alpha": 0.7}], lambda i, a: torch.where(i[1] > 0, i[0], i[0] * (i[1] + a["alpha"]))),
    "GeluGrad": ([{"approximate": way} for way in ("none", "tanh")], lambda i, a: _gelu_grad(*i, a)),
    "SigmoidGrad": ([{}], lambda i, a: i[0] * i[1] * (1 - i[1])),
    "TanhGrad": ([{}], lambda i, a: i[0] * (1 - i[1] ** 2)),
}
"""The same of gradients, which take the gradient of the result and the operand, or the result."""
ORACLES = {op: oracle for op, (_, oracle) in {**ACTIVATIONS, **ACTIVATION_GRADS}.items()}
