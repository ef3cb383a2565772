"""Optimizers and schedules, as ``fit(optimizer=...)`` takes them, and ``register`` for those of your own."""

from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.optimizers import LAMB, SGD, Adam, AdamW, Lion, Own, RMSprop, average_of, register
from oocdl.ops.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    MultiStep,
    OneCycle,
    Polynomial,
    Step,
    Then,
    WarmUp,
)

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Constant", "Cosine", "CosineRestarts", "Exponential", "Lion"]
__all__ += ["MultiStep", "OneCycle", "Polynomial", "RMSprop", "Step", "Then", "WarmUp"]
__all__ += ["Builder", "Own", "average_of", "register"]
