"""Optimizers and schedules, as ``fit(optimizer=...)`` takes them, and ``register`` for those of your own."""

from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.optimizers import SGD, Adam, AdamW, Own, register
from oocdl.ops.schedules import Constant, Cosine, OneCycle, Polynomial, Step, Then, WarmUp

__all__ = ["SGD", "Adam", "AdamW", "Constant", "Cosine", "OneCycle", "Polynomial", "Step", "Then", "WarmUp"]
__all__ += ["Builder", "Own", "register"]
