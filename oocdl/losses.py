"""Losses, as ``fit(loss=...)`` takes them, and ``register`` for those of your own."""

from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.ctc import CTC
from oocdl.ops.loss_functions import BCE, L1, MSE, CrossEntropy, Dice, DiceCE, register
from oocdl.ops.own_loss import OwnLoss, aligned, mean

__all__ = ["BCE", "CTC", "L1", "MSE", "Builder", "CrossEntropy", "Dice", "DiceCE", "OwnLoss"]
__all__ += ["aligned", "mean", "register"]
