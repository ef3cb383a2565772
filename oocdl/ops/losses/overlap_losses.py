"""Losses of the overlap of predicted and true regions, from sums over batch and space: Dice and Tversky.

Formulas stand with each class.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from oocdl.errors import InputError
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.losses.class_losses import (
    CrossEntropy,
    add_cross_entropy,
    class_weights_of,
    has_one_class,
    is_label,
    labels_on_axis,
    refuse_one_class,
)
from oocdl.ops.losses.number_losses import weighted
from oocdl.ops.own_loss import aligned, mean, total_of

LEAST = 1e-8
"""Least denominator of a mean over labels that count, as in nnU-Net: without any, the mean is 0."""


@dataclass(frozen=True)
class Dice:
    """``mean over classes of w (1 - (2 sum p t + smooth) / (sum p + sum t + smooth))``.

    p is the softmax over classes (for one class the sigmoid), t the one-hot label; the sums run
    over batch and space together, the background counts as a class. (Milletari et al. 2016,
    arXiv:1606.04797, with plain sums below, as MONAI's ``DiceLoss(batch=True)``.)

    Places whose label is ``ignore_index`` are in none of the sums, as in nnU-Net's
    ``MemoryEfficientSoftDiceLoss`` with its ``loss_mask``. ``class_weights`` are the factors w, as
    MONAI's ``DiceLoss(weight=...)``: their mean is not divided by their sum.
    """

    smooth: float = 1e-5
    ignore_index: int | None = None
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Tversky:
    """``mean over classes of 1 - (tp + smooth) / (tp + alpha fp + beta fn + smooth)``.

    With p and t as in ``Dice``, ``tp = sum p t``, ``fp = sum p (1 - t)`` and ``fn = sum (1 - p) t``, over
    batch and space together: MONAI's ``TverskyLoss(batch=True)`` with softmax, for one class with sigmoid.
    (Salehi et al. 2017, arXiv:1706.05721.) A larger ``beta`` finds more; both 0.5 are Dice. ``ignore_index``
    is as in ``Dice``.
    """

    alpha: float = 0.5
    beta: float = 0.5
    smooth: float = 1e-5
    ignore_index: int | None = None


@dataclass(frozen=True)
class DiceCE:
    """Dice plus cross entropy (for one class BCE), as nnU-Net's ``DC_and_CE_loss``.

    Labels that are ``cross_entropy.ignore_index`` count in neither term, whether Dice names them or not;
    where all are ignored, both terms are 0. Class weights are each term's own: nnU-Net weighs the cross
    entropy only, MONAI's ``DiceCELoss(weight=...)`` both. Sample weights are those of cross entropy.
    """

    dice: Dice = field(default_factory=Dice)
    cross_entropy: CrossEntropy = field(default_factory=CrossEntropy)


def _chances(
    build: Builder, ignore: int | None, logits: str, target: str
) -> tuple[str, str, int, tuple[int, ...]]:
    """Add chances and truth of each class, 0 where the label is ignored; returns class axis and others."""
    shape = build.shape(logits)
    counts: str | None = None
    if has_one_class(shape):
        axis, truth = 1, aligned(build, logits, target)
        chance = build("Sigmoid", logits)
        if ignore is not None:
            counts = aligned(build, logits, _counts(build, target, ignore, logits))
    else:
        labels, axis = labels_on_axis(build, logits, target)
        truth = build("Cast", is_label(build, labels, logits, axis), to=build.dtype(logits))
        chance = build("Softmax", logits, axis=axis)
        if ignore is not None:
            counts = _counts(build, labels, ignore, logits)
    if counts is not None:
        chance, truth = build("Mul", chance, counts), build("Mul", truth, counts)
    return chance, truth, axis, tuple(place for place in range(len(shape)) if place != axis)


def add_dice(build: Builder, spec: Dice, logits: str, target: str) -> str:
    """Append Dice; returns its value, of shape ()."""
    if spec.class_weights is not None:
        refuse_one_class(build.shape(logits), logits)
    chance, truth, axis, others = _chances(build, spec.ignore_index, logits, target)
    both = build("ReduceSum", build("Mul", chance, truth), axes=others)
    either = build("ReduceSum", build("Add", chance, truth), axes=others)
    smooth = build.like(spec.smooth, both)
    above = build("Add", build("Add", both, both), smooth)
    scores = build("Div", above, build("Add", either, smooth))
    if spec.class_weights is not None:
        lost = build("Sub", build.like(1.0, scores), scores)
        return mean(build, build("Mul", lost, class_weights_of(build, spec.class_weights, axis, logits)))
    score = mean(build, scores)
    return build("Sub", build.like(1.0, score), score)


def add_tversky(build: Builder, spec: Tversky, logits: str, target: str) -> str:
    """Append Tversky; returns its value, of shape ()."""
    chance, truth, _, others = _chances(build, spec.ignore_index, logits, target)
    overlap = build("Mul", chance, truth)
    both, wrong, missed = (
        build("ReduceSum", value, axes=others)
        for value in (overlap, build("Sub", chance, overlap), build("Sub", truth, overlap))
    )
    wrong = build("Mul", wrong, build.like(spec.alpha, wrong))
    missed = build("Mul", missed, build.like(spec.beta, missed))
    above = build("Add", both, build.like(spec.smooth, both))
    score = mean(build, build("Div", above, build("Add", above, build("Add", wrong, missed))))
    return build("Sub", build.like(1.0, score), score)


def add_dice_ce(build: Builder, spec: DiceCE, logits: str, target: str, weights: str | None) -> str:
    """Append Dice and cross entropy; returns their sum, of shape (). ``weights``: see ``weighted``."""
    ignore = spec.cross_entropy.ignore_index
    if spec.dice.ignore_index not in (None, ignore):
        raise InputError(
            f"dice_ce ignores the label {spec.dice.ignore_index} in dice, but {ignore} in cross_entropy; "
            "give cross_entropy's ignore_index, which holds for both"
        )
    dice = add_dice(build, replace(spec.dice, ignore_index=ignore), logits, target)
    if not has_one_class(build.shape(logits)):
        surprise = add_cross_entropy(build, spec.cross_entropy, logits, target, weights, least=LEAST)
        return build("Add", dice, surprise)
    if spec.cross_entropy.class_weights is not None or spec.cross_entropy.label_smoothing:
        refuse_one_class(build.shape(logits), logits)
    counts = aligned(build, logits, _counts(build, target, ignore, logits))
    counted = build("Mul", aligned(build, logits, target), counts)
    # The ignored label times a logit is not in the sum; Softplus and product as in BCE.
    surprise = build("Sub", build("Mul", build("Softplus", logits), counts), build("Mul", logits, counted))
    total, number = total_of(build, weighted(build, surprise, weights)), total_of(build, counts)
    return build("Add", dice, build("Div", total, build("Max", number, build.like(LEAST, number))))


def _counts(build: Builder, labels: str, ignore: int, logits: str) -> str:
    """Add 1 where a label counts, 0 where it is ignored, in the labels' shape and the logits' dtype."""
    ignored = build("Equal", labels, build.constant(ignore, build.dtype(labels)))
    return build("Cast", build("Not", ignored), to=build.dtype(logits))
