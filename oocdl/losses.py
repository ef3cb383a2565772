"""Losses, as ``fit(loss=...)`` takes them."""

from oocdl.ops.ctc import CTC
from oocdl.ops.losses import BCE, L1, MSE, CrossEntropy, Dice, DiceCE

__all__ = ["BCE", "CTC", "L1", "MSE", "CrossEntropy", "Dice", "DiceCE"]
