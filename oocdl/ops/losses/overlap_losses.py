"""Losses of the overlap of predicted and true regions, from sums over batch and space: Dice and Tversky.

Formulas stand with each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from oocdl.errors import InputError
from oocdl.ops.expression import Lifted, apply, equal, sigmoid, softplus
from oocdl.ops.losses.class_losses import (
    CrossEntropy,
    add_cross_entropy,
    class_weights_of,
    classes_of,
    has_one_class,
    labels_on_axis,
    refuse_one_class,
)
from oocdl.ops.losses.number_losses import weighted
from oocdl.ops.own_loss import truth_of

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


def _chances(x: Lifted, ignore: int | None, target: str) -> tuple[Lifted, Lifted, int, tuple[int, ...]]:
    """Add chances and truth of each class, 0 where the label is ignored; returns class axis and others."""
    one = has_one_class(x.shape)
    labels, axis = (x.to(target), 1) if one else labels_on_axis(x, target)
    truth = truth_of(x, target) if one else equal(labels, classes_of(x, axis)).cast(x.dtype)
    chance = sigmoid(x) if one else apply("Softmax", x, axis=axis)
    if ignore is not None:
        counts = _counts(x, labels, ignore)
        chance, truth = chance * counts, truth * counts
    return chance, truth, axis, tuple(place for place in range(len(x.shape)) if place != axis)


def add_dice(x: Lifted, spec: Dice, target: str, further: Mapping[str, str]) -> Lifted:
    """Append Dice; returns its value, of shape ()."""
    if spec.class_weights is not None:
        refuse_one_class(x)
    chance, truth, axis, others = _chances(x, spec.ignore_index, target)
    both, either = (chance * truth).summed(others), (chance + truth).summed(others)
    smooth = both.number(spec.smooth)
    scores: Lifted = (both + both + smooth) / (either + smooth)
    if spec.class_weights is None:
        return 1.0 - scores.mean()
    return ((1.0 - scores) * class_weights_of(x, spec.class_weights, axis)).mean()


def add_tversky(x: Lifted, spec: Tversky, target: str, further: Mapping[str, str]) -> Lifted:
    """Append Tversky; returns its value, of shape ()."""
    chance, truth, _, others = _chances(x, spec.ignore_index, target)
    overlap = chance * truth
    both, wrong, missed = (part.summed(others) for part in (overlap, chance - overlap, truth - overlap))
    wrong, missed = wrong * spec.alpha, missed * spec.beta
    above = both + spec.smooth
    return 1.0 - (above / (above + (wrong + missed))).mean()


def add_dice_ce(x: Lifted, spec: DiceCE, target: str, further: Mapping[str, str]) -> Lifted:
    """Append Dice and cross entropy; returns their sum, of shape ()."""
    ignore = spec.cross_entropy.ignore_index
    if spec.dice.ignore_index not in (None, ignore):
        why = f"dice_ce ignores the label {spec.dice.ignore_index} in dice, but {ignore} in cross_entropy"
        raise InputError(f"{why}; give cross_entropy's ignore_index, which holds for both")
    dice = add_dice(x, replace(spec.dice, ignore_index=ignore), target, further)
    if not has_one_class(x.shape):
        return dice + add_cross_entropy(x, spec.cross_entropy, target, further, least=LEAST)
    if spec.cross_entropy.class_weights is not None or spec.cross_entropy.label_smoothing:
        refuse_one_class(x)
    counts = _counts(x, x.to(target), ignore)
    counted = truth_of(x, target) * counts
    # The ignored label times a logit is not in the sum; Softplus and product as in BCE.
    surprise = softplus(x) * counts - x * counted
    total, number = weighted(surprise, further).total(), counts.total()
    return dice + total / apply("Max", number, LEAST)


def _counts(x: Lifted, labels: Lifted, ignore: int) -> Lifted:
    """Add 1 where a label counts, 0 where it is ignored, to multiply what has the logits' shape and dtype."""
    counts: Lifted = apply("Not", equal(labels, ignore)).cast(x.dtype)
    return truth_of(x, counts.name) if has_one_class(x.shape) else counts
