"""Losses of each label by itself: LogSumExp, elementwise operators and sums, so that every axis may be cut.

Labels are whole numbers. Cross entropy is ``torch.nn.functional``'s with mean reduction. Formulas stand with
each class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops._broadcast import cure, is_float, size
from oocdl.ops.losses.number_losses import along_channels, binary_surprise, weighted
from oocdl.ops.own_loss import aligned, mean, total_of


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
            raise InputError(
                f"gamma of focal is at least 0 and alpha from 0 to 1, not {self.gamma} and {self.alpha}"
            )


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


def labels_on_axis(build: Builder, logits: str, target: str) -> tuple[str, int]:
    """Return the labels as int64 with extent one on the class axis, and that axis."""
    shape = build.shape(logits)
    axis = class_axis(shape, build.shape(target))
    if axis is None:
        raise InputError(
            f"labels '{target}' have shape {list(build.shape(target))}, but output '{logits}' has "
            f"{list(shape)}: labels need this shape without the class axis" + cure(build.shape(target), shape)
        )
    if is_float(build.dtype(target)) or build.dtype(target) == "bool":
        raise InputError(f"labels '{target}' are {build.dtype(target)}, not whole numbers")
    kept = (*shape[:axis], 1, *shape[axis + 1 :])
    if build.shape(target) != kept:
        target = build("Reshape", target, shape=kept)
    if build.dtype(target) != "int64":
        target = build("Cast", target, to="int64")
    return target, axis


def is_label(build: Builder, labels: str, logits: str, axis: int) -> str:
    """Add a value of the logits' shape that tells where the class is the label."""
    classes = along(np.arange(build.shape(logits)[axis]), axis, len(build.shape(logits)))
    index = build.constant(classes, "int64", stem="classes")
    return build("Equal", labels, index)


def along(vector: Array, axis: int, rank: int) -> Array:
    """Reshape a vector to ``rank`` axes, so that it lies along one of them."""
    return vector.reshape(tuple(-1 if place == axis else 1 for place in range(rank)))


@dataclass(frozen=True)
class _Places:
    """Labels and logits of the places of a loss of classes, as values with extent one on the class axis."""

    axis: int
    here: str
    """Where the class is the label, in the logits' shape."""
    level: str
    """LogSumExp of the logits."""
    ignored: str | None
    """Where the label is ignored, if one may be."""
    surprise: str
    """Minus the logarithm of the chance of the label; NaN where that is no class."""

    def of_label(self, build: Builder, numbers: str) -> str:
        """Add the number of each place's label, of ``numbers`` along the class axis."""
        zero = build.like(0.0, numbers)
        return build("ReduceSum", build("Where", self.here, numbers, zero), axes=(self.axis,))


def _places(build: Builder, logits: str, target: str, ignore: int | None = None) -> _Places:
    """Add the surprise of each place; a label that is ignored is no class and has no NaN."""
    labels, axis = labels_on_axis(build, logits, target)
    classes, dtype = build.shape(logits)[axis], build.dtype(logits)
    zero, nan = build.constant(0.0, dtype), build.constant(float("nan"), dtype)
    here = is_label(build, labels, logits, axis)
    # Where, not Mul: a class that is masked by a logit of -inf would give 0 * inf.
    chosen = build("ReduceSum", build("Where", here, logits, zero), axes=(axis,))
    level = build("LogSumExp", logits, axes=(axis,))
    surprise = build("Sub", level, chosen)
    ignored = None if ignore is None else build("Equal", labels, build.constant(ignore, "int64"))
    below = build("Less", labels, build.constant(0, "int64"))
    above = build("Greater", labels, build.constant(classes - 1, "int64"))
    surprise = build("Where", build("Or", below, above), nan, surprise)
    if ignored is not None:
        surprise = build("Where", ignored, zero, surprise)
    return _Places(axis, here, level, ignored, surprise)


def add_cross_entropy(
    build: Builder,
    spec: CrossEntropy,
    logits: str,
    target: str,
    weights: str | None,
    *,
    least: float | None = None,
) -> str:
    """Append cross entropy, whose denominator is at least ``least``; returns its value, of shape ()."""
    places = _places(build, logits, target, spec.ignore_index)
    assert places.ignored is not None
    each, vector = places.surprise, None
    counts = build("Cast", build("Not", places.ignored), to=build.dtype(logits))
    if spec.class_weights is not None:
        vector = class_weights_of(build, spec.class_weights, places.axis, logits)
        counts = build("Mul", counts, places.of_label(build, vector))
        each = build("Mul", each, counts)
    if spec.label_smoothing:
        each = _smoothed(build, spec.label_smoothing, places, logits, each, vector)
    total, number = total_of(build, weighted(build, each, weights)), total_of(build, counts)
    if least is not None:
        number = build("Max", number, build.like(least, number))
    return build("Div", total, number)


def _smoothed(
    build: Builder, share: float, places: _Places, logits: str, each: str, vector: str | None
) -> str:
    """Add the loss of each place with a share for all classes, which have the weights ``vector``."""
    below = build("Sub", places.level, logits)
    below = below if vector is None else build("Mul", below, vector)
    spread = build("ReduceSum", below, axes=(places.axis,))
    assert places.ignored is not None
    spread = build("Where", places.ignored, build.like(0.0, spread), spread)
    spread = build("Mul", spread, build.like(share / build.shape(logits)[places.axis], spread))
    return build("Add", build("Mul", each, build.like(1 - share, each)), spread)


def add_focal(build: Builder, spec: Focal, logits: str, target: str, weights: str | None) -> str:
    """Append the focal loss; returns its value, of shape (). ``weights``: see ``weighted``."""
    shape, vector = build.shape(logits), None
    if has_one_class(shape) or not spec.use_softmax:
        if spec.class_weights is not None:
            refuse_one_class(shape, logits)
            numbers = along_channels(np.asarray(spec.class_weights), build, logits, "class_weights")
            vector = build.constant(numbers, build.dtype(logits), stem="class_weights")
        each = _binary_focal(build, spec, logits, aligned(build, logits, target))
        each = each if vector is None else build("Mul", each, vector)
        return mean(build, weighted(build, each, weights))
    places = _places(build, logits, target)
    each, count = places.surprise, shape[places.axis]
    if spec.gamma:
        missed = build("Sub", build.like(1.0, each), build("Exp", build("Neg", each)))
        if spec.gamma < 1:  # the slope of the power at 0 is infinite, and that of the loss is 0
            missed = build("Max", missed, build.like(1e-30, each))
        each = build("Mul", each, build("Pow", missed, build.like(spec.gamma, each)))
    factors = (1.0,) * count if spec.class_weights is None else spec.class_weights
    if spec.alpha is not None:
        first, others = (factor for factor in (1 - spec.alpha, spec.alpha))
        factors = tuple(factor * (others if place else first) for place, factor in enumerate(factors))
    if any(factor != 1 for factor in factors) or len(factors) != count:
        vector = class_weights_of(build, factors, places.axis, logits)
        each = build("Mul", each, places.of_label(build, vector))
    total = total_of(build, weighted(build, each, weights))
    return build("Div", total, build.like(float(size(shape)), total))


def _binary_focal(build: Builder, spec: Focal, logits: str, truth: str) -> str:
    """Add the loss of each element: its surprise times ``sigmoid(-x)`` or, for 0, ``sigmoid(x)`` to gamma."""
    one = build.like(1.0, logits)
    each = binary_surprise(build, logits, truth)
    signed = build("Mul", logits, build("Sub", build("Add", truth, truth), one))
    slack = build("Mul", build("Softplus", signed), build.like(-spec.gamma, logits))
    each = build("Mul", each, build("Exp", slack))
    if spec.alpha is not None:
        rises = build("Mul", truth, build.like(2 * spec.alpha - 1, logits))
        each = build("Mul", each, build("Add", rises, build.like(1 - spec.alpha, logits)))
    return each


def refuse_one_class(shape: Shape, logits: str) -> None:
    """Raise InputError where logits are of one class."""
    if has_one_class(shape):
        raise InputError(
            f"class weights and label smoothing do not apply to output '{logits}', which has one class"
        )


def class_weights_of(build: Builder, weights: tuple[float, ...], axis: int, logits: str) -> str:
    """Add class weights as a constant along the class axis; InputError if they do not apply."""
    shape = build.shape(logits)
    if len(weights) != shape[axis]:
        raise InputError(
            f"the loss has {len(weights)} class weights, but output '{logits}' has {shape[axis]} classes"
        )
    vector = np.asarray(weights, np.float64)
    if not (np.isfinite(vector).all() and (vector >= 0).all() and vector.any()):
        raise InputError(f"class weights must be finite, at least 0, and not all 0, got {list(weights)}")
    placed = along(vector, axis, len(shape))
    return build.constant(placed, build.dtype(logits), stem="class_weights")
