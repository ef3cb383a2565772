"""Losses, as ``fit(loss=...)`` takes them."""

from oocdl.ops.losses import BCE, L1, MSE, CrossEntropy, Dice, DiceCE

__all__ = ["BCE", "L1", "MSE", "CrossEntropy", "Dice", "DiceCE"]
