"""Losses, as ``fit(loss=...)`` takes them, and ``register`` for those of your own."""

from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.ctc import CTC
from oocdl.ops.loss_functions import register
from oocdl.ops.losses.class_losses import CrossEntropy, Focal
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.ops.losses.number_losses import BCE, L1, MSE, Huber
from oocdl.ops.losses.overlap_losses import Dice, DiceCE, Tversky
from oocdl.ops.own_loss import OwnLoss, aligned, mean

__all__ = ["BCE", "CTC", "L1", "MSE", "Builder", "CrossEntropy", "DeepSupervision", "Dice", "DiceCE", "Focal"]
__all__ += ["Huber", "OwnLoss", "Tversky", "aligned", "mean", "register"]
