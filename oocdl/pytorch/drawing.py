"""Draws random numbers in place by ``rand_like``, the operator that exporters know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TINY = float(torch.finfo(torch.float32).tiny)


def uniform_(self: Tensor, *given: float, **named: Any) -> Tensor:
    """Draw between two numbers, of which one is named as a word of Python is."""
    ends = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), given, strict=False)), **named}
    return self.copy_(torch.rand_like(self) * (ends["to"] - ends["from"]) + ends["from"])


def exponential_(self: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    """Draw exponential numbers."""
    return self.copy_(exponential(torch.rand_like(self), lambd))


def exponential(uniform: Tensor, lambd: float) -> Tensor:
    """Make exponential numbers of uniform ones, which may be 0."""
    return -torch.log(uniform.clamp(min=_TINY)) / lambd
