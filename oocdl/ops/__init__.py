"""The operators, losses and optimizers: shape, axes, gradient and cost of each. See README.md.

``register`` takes ONNX operators of your own.
"""

from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.registry import RULES, register

__all__ = ["RULES", "Builder", "register"]
