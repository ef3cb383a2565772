"""Losses of each label by itself: LogSumExp, elementwise operators and sums, so that every axis may be cut.

Labels are whole numbers. Cross entropy is ``torch.nn.functional``'s with mean reduction. Formulas stand with
each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array, Shape, is_float
from oocdl.ops._broadcast import cure, size
from oocdl.ops.expression import Lifted, apply, equal, exp, softplus, where
from oocdl.ops.losses.number_losses import along_channels, binary_surprise, weighted
from oocdl.ops.own_loss import truth_of
from oocdl.ops.reduce import below_largest


@dataclass(frozen=True)
class CrossEntropy:
    """``sum w_y (lse(x) - x_y) / sum w_y`` over labels y that are not ``ignore_index``.

    The class axis is 1, or else the one without which the logits have the labels' shape.
    A label outside the classes is refused when it is read; in the formula it makes the loss NaN.

    ``label_smoothing`` s takes the share s from each label and gives it to all C classes alike, as
    ``torch.nn.CrossEntropyLoss`` does: a place has ``(1 - s) w_y (lse - x_y) + s / C sum_c w_c (lse - x_c)``.
    ``sample_weights`` names an array of the dataset with a weight for each sample (or each label), which
    multiplies the loss there and not the sum of ``w_y``: see ``weighted`` in ``number_losses``.
    """

    ignore_index: int = -100
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise InputError(f"label_smoothing must be from 0 to 1, not {self.label_smoothing}")


@dataclass(frozen=True)
class Focal:
    """``mean of (1 - p_y)^gamma (lse(x) - x_y)``: cross entropy that counts easy places less.

    It is MONAI's ``FocalLoss`` (Lin et al. 2017, arXiv:1708.02002). With ``use_softmax`` p is the softmax, y
    the label, and the mean divides by places times classes, as there. ``alpha`` is the factor of all classes
    but the first, which has ``1 - alpha``; ``class_weights`` are further factors.

    For one class, or without ``use_softmax``, each channel is a binary decision, as in torchvision's
    ``sigmoid_focal_loss``, whose defaults are gamma 2 and alpha 0.25. Without ``use_softmax`` targets are
    numbers of the logits' shape. ``sample_weights`` is as in ``CrossEntropy``.
    """

    gamma: float = 2.0
    alpha: float | None = None
    use_softmax: bool = True
    class_weights: tuple[float, ...] | None = None
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        if not self.gamma >= 0 or not 0 <= (self.alpha or 0) <= 1:
            given = f"{self.gamma} and {self.alpha}"
            raise InputError(f"gamma of focal is at least 0 and alpha from 0 to 1, not {given}")


def has_one_class(logits: Shape) -> bool:
    """Whether logits are of one class, for which losses take the sigmoid."""
    return len(logits) > 1 and logits[1] == 1


def class_axis(logits: Shape, target: Shape) -> int | None:
    """Return the axis of the logits that the labels lack, or have with extent one; 1 where it can be."""
    for axis in (1, *reversed(range(2, len(logits)))):
        if axis < len(logits):
            without = logits[:axis] + logits[axis + 1 :]
            if target == without or target == (*logits[:axis], 1, *logits[axis + 1 :]):
                return axis
    return None


def labels_on_axis(x: Lifted, target: str) -> tuple[Lifted, int]:
    """Return the labels as int64 with extent one on the class axis of the logits, and that axis."""
    shape, labels = x.shape, x.to(target)
    axis = class_axis(shape, labels.shape)
    if axis is None:
        why = f"labels '{target}' have shape {list(labels.shape)}, but output '{x.name}' has {list(shape)}"
        way_out = (
            "; of one-hot labels, take the argmax" if labels.shape == shape else cure(labels.shape, shape)
        )
        raise InputError(f"{why}: labels need this shape without the class axis{way_out}")
    if is_float(labels.dtype) or labels.dtype == "bool":
        raise InputError(f"labels '{target}' are {labels.dtype}, not whole numbers")
    kept = (*shape[:axis], 1, *shape[axis + 1 :])
    if labels.shape != kept:
        labels = apply("Reshape", labels, shape=kept)
    return labels.cast("int64"), axis


def along_classes(
    x: Lifted, numbers: Array, axis: int, stem: str = "classes", dtype: str = "int64"
) -> Lifted:
    """Add a constant of a number for each class, to broadcast with the logits."""
    placed = numbers.reshape(tuple(-1 if place == axis else 1 for place in range(len(x.shape))))
    return x.to(x.build.constant(placed, dtype, stem=stem))


def classes_of(x: Lifted, axis: int) -> Lifted:
    """Add the numbers of the classes, along their axis."""
    return along_classes(x, np.arange(x.shape[axis]), axis, "classes")


@dataclass(frozen=True)
class _Places:
    """Labels and logits of the places of a loss of classes, as values with extent one on the class axis."""

    axis: int
    here: Lifted
    """Where the class is the label, in the logits' shape."""
    below: Lifted
    """The logits less the largest of their place, next to which log n would be lost."""
    level: Lifted
    """LogSumExp of these."""
    ignored: Lifted | None
    """Where the label is ignored, if one may be."""
    surprise: Lifted
    """Minus the logarithm of the chance of the label; NaN where that is no class."""

    def of_label(self, numbers: Lifted) -> Lifted:
        """Add the number of each place's label, of ``numbers`` along the class axis."""
        return apply("ReduceSum", where(self.here, numbers, numbers.number(0.0)), axes=(self.axis,))


def _places(x: Lifted, target: str, ignore: int | None = None) -> _Places:
    """Add the surprise of each place; a label that is ignored is no class and has no NaN."""
    labels, axis = labels_on_axis(x, target)
    zero, nan = x.number(0.0), x.number(float("nan"))
    here = equal(labels, classes_of(x, axis))
    # Where, not Mul: a class that is masked by a logit of -inf would give 0 * inf.
    below = below_largest(x, axis)
    chosen = apply("ReduceSum", where(here, below, zero), axes=(axis,))
    level = apply("LogSumExp", below, axes=(axis,))
    surprise = level - chosen
    ignored = None if ignore is None else equal(labels, ignore)
    outside = apply("Or", labels < 0, labels > x.shape[axis] - 1)
    surprise = where(outside, nan, surprise)
    if ignored is not None:
        surprise = where(ignored, zero, surprise)
    return _Places(axis, here, below, level, ignored, surprise)


def add_cross_entropy(
    x: Lifted, spec: CrossEntropy, target: str, further: Mapping[str, str], *, least: float | None = None
) -> Lifted:
    """Append cross entropy, whose denominator is at least ``least``; returns its value, of shape ()."""
    places = _places(x, target, spec.ignore_index)
    assert places.ignored is not None
    each, vector = places.surprise, None
    counts = apply("Not", places.ignored).cast(x.dtype)
    if spec.class_weights is not None:
        vector = class_weights_of(x, spec.class_weights, places.axis)
        counts = counts * places.of_label(vector)
        each = each * counts
    if spec.label_smoothing:
        each = _smoothed(spec.label_smoothing, places, x, each, vector)
    total, number = weighted(each, further).total(), counts.total()
    return total / (number if least is None else apply("Max", number, least))


def _smoothed(share: float, places: _Places, x: Lifted, each: Lifted, vector: Lifted | None) -> Lifted:
    """Add the loss of each place with a share for all classes, which have the weights ``vector``."""
    each_class = places.level - places.below
    each_class = each_class if vector is None else each_class * vector
    spread = apply("ReduceSum", each_class, axes=(places.axis,))
    assert places.ignored is not None
    spread = where(places.ignored, spread.number(0.0), spread) * (share / x.shape[places.axis])
    return each * (1 - share) + spread


def add_focal(x: Lifted, spec: Focal, target: str, further: Mapping[str, str]) -> Lifted:
    """Append the focal loss; returns its value, of shape ()."""
    vector = None
    if has_one_class(x.shape) or not spec.use_softmax:
        if spec.class_weights is not None:
            refuse_one_class(x)
            numbers = along_channels(np.asarray(spec.class_weights), x, "class_weights")
            vector = x.to(x.build.constant(numbers, x.dtype, stem="class_weights"))
        each = _binary_focal(x, spec, truth_of(x, target))
        return weighted(each if vector is None else each * vector, further).mean()
    places = _places(x, target)
    each, count = places.surprise, x.shape[places.axis]
    if spec.gamma:
        missed = each.number(1.0) - exp(-each)
        if spec.gamma < 1:  # the slope of the power at 0 is infinite, and that of the loss is 0
            missed = apply("Max", missed, 1e-30)
        each = each * apply("Pow", missed, spec.gamma)
    factors = (1.0,) * count if spec.class_weights is None else spec.class_weights
    if spec.alpha is not None:
        first, others = 1 - spec.alpha, spec.alpha
        factors = tuple(factor * (others if place else first) for place, factor in enumerate(factors))
    if any(factor != 1 for factor in factors) or len(factors) != count:
        each = each * places.of_label(class_weights_of(x, factors, places.axis))
    return weighted(each, further).total() / float(size(x.shape))


def _binary_focal(x: Lifted, spec: Focal, truth: Lifted) -> Lifted:
    """Add the loss of each element: its surprise times ``sigmoid(-x)`` or, for 0, ``sigmoid(x)`` to gamma."""
    one = x.number(1.0)
    each = binary_surprise(x, truth)
    each = each * exp(softplus(x * (truth + truth - one)) * -spec.gamma)
    if spec.alpha is not None:
        each = each * (truth * (2 * spec.alpha - 1) + (1 - spec.alpha))
    return each


def refuse_one_class(x: Lifted) -> None:
    """Raise InputError where logits are of one class."""
    if has_one_class(x.shape):
        its = f"output '{x.name}', which has one class"
        raise InputError(f"class weights and label smoothing do not apply to {its}")


def class_weights_of(x: Lifted, weights: tuple[float, ...], axis: int) -> Lifted:
    """Add class weights as a constant along the class axis; InputError if they do not apply."""
    if len(weights) != x.shape[axis]:
        its = f"output '{x.name}' has {x.shape[axis]} classes"
        raise InputError(f"the loss has {len(weights)} class weights, but {its}")
    vector = np.asarray(weights, np.float64)
    if not (np.isfinite(vector).all() and (vector >= 0).all() and vector.any()):
        raise InputError(f"class weights must be finite, at least 0, and not all 0, got {list(weights)}")
    return along_classes(x, vector, axis, "class_weights", x.dtype)
