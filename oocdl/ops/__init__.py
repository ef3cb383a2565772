"""The operators, losses and optimizers: shape, axes, gradient and cost of each. See README.md."""

from oocdl.ops.registry import RULES

__all__ = ["RULES"]
