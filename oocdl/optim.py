"""Optimizers and learning-rate schedules, as ``fit(optimizer=...)`` takes them."""

from oocdl.ops.optimizers import SGD, Adam, AdamW
from oocdl.ops.schedules import Constant, Cosine, OneCycle, Polynomial, Step, WarmUp

__all__ = ["SGD", "Adam", "AdamW", "Constant", "Cosine", "OneCycle", "Polynomial", "Step", "WarmUp"]
