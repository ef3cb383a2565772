"""Losses as nodes: LogSumExp, elementwise operators and sums, so that every axis may be cut.

Cross entropy, BCE, MSE and L1 are ``torch.nn.functional``'s with mean reduction. All take logits;
labels are whole numbers. Formulas stand with each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops._broadcast import is_float, size


@dataclass(frozen=True)
class CrossEntropy:
    """``sum w_y (lse(x) - x_y) / sum w_y`` over labels y that are not ``ignore_index``.

    The class axis is 1, or else the one without which the logits have the labels' shape.
    A label outside the classes is refused when it is read; in the formula it makes the loss NaN.
    """

    ignore_index: int = -100
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Dice:
    """``1 - mean over classes of (2 sum p t + smooth) / (sum p + sum t + smooth)``.

    p is the softmax over classes (for one class the sigmoid), t the one-hot label; the sums run
    over batch and space together, the background counts as a class. (Milletari et al. 2016,
    arXiv:1606.04797, with plain sums below, as MONAI's ``DiceLoss(batch=True)``.)
    """

    smooth: float = 1e-5


@dataclass(frozen=True)
class DiceCE:
    """Dice plus cross entropy (for one class BCE), as nnU-Net."""

    dice: Dice = field(default_factory=Dice)
    cross_entropy: CrossEntropy = field(default_factory=CrossEntropy)


@dataclass(frozen=True)
class BCE:
    """Mean of ``max(x, 0) - x y + log(1 + exp(-|x|))``: with logits, stable."""


@dataclass(frozen=True)
class MSE:
    """Mean of ``(x - y)^2``."""


@dataclass(frozen=True)
class L1:
    """Mean of ``|x - y|``."""


Loss = CrossEntropy | Dice | DiceCE | BCE | MSE | L1
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "dice": Dice(),
    "dice_ce": DiceCE(),
    "bce": BCE(),
    "mse": MSE(),
    "l1": L1(),
}


@dataclass(frozen=True)
class Head:
    """One loss of several."""

    spec: Loss
    logits: str
    target: str
    weight: float = 1.0


@dataclass(frozen=True)
class Labels:
    """Which whole numbers may stand in the labels of a loss."""

    classes: int
    """Labels are 0 to ``classes - 1``."""
    ignore_index: int | None = None
    """A label that is none, and has no part in the loss."""


def labels_of(spec: Loss, logits: Shape, target: Shape) -> Labels | None:
    """Return the labels that a loss of these shapes takes; None if it takes any numbers.

    >>> labels_of(CrossEntropy(), (2, 3, 8, 8), (2, 8, 8))
    Labels(classes=3, ignore_index=-100)
    """
    if not isinstance(spec, CrossEntropy | Dice | DiceCE):
        return None
    if not isinstance(spec, CrossEntropy) and len(logits) > 1 and logits[1] == 1:
        return Labels(2)
    axis = class_axis(logits, target)
    if axis is None:
        return None
    cross_entropy = spec.cross_entropy if isinstance(spec, DiceCE) else spec
    ignored = cross_entropy.ignore_index if isinstance(cross_entropy, CrossEntropy) else None
    return Labels(logits[axis], ignored)


def add_loss(build: Builder, spec: Loss, logits: str, target: str) -> str:
    """Append a loss; returns its value, of shape ()."""
    if not is_float(build.dtype(logits)):
        raise InputError(f"output '{logits}' is {build.dtype(logits)}; a loss needs floating point")
    match spec:
        case CrossEntropy():
            return _cross_entropy(build, spec, logits, target)
        case Dice():
            return _dice(build, spec, logits, target)
        case DiceCE():
            return _dice_ce(build, spec, logits, target)
        case BCE():
            # Softplus, not Abs and Max: its gradient is right also at 0, where heads start.
            aligned = _aligned(build, logits, target)
            product = build("Mul", logits, aligned)
            return _mean(build, build("Sub", build("Softplus", logits), product))
        case MSE():
            error = build("Sub", logits, _aligned(build, logits, target))
            return _mean(build, build("Mul", error, error))
        case L1():
            return _mean(build, build("Abs", build("Sub", logits, _aligned(build, logits, target))))


def add_losses(build: Builder, heads: Mapping[str, Head]) -> tuple[str, dict[str, str]]:
    """Append several losses; returns their weighted sum, and each (unweighted) by name."""
    if not heads:
        raise InputError("there is no loss: name one, or a mapping output -> (loss, weight)")
    parts = {name: add_loss(build, head.spec, head.logits, head.target) for name, head in heads.items()}
    total: str | None = None
    for name, head in heads.items():
        part = build("Mul", parts[name], build.like(head.weight, parts[name]))
        if total is not None and build.dtype(part) != build.dtype(total):
            part = build("Cast", part, to=build.dtype(total))
        total = part if total is None else build("Add", total, part)
    assert total is not None
    return total, parts


def _sum(build: Builder, value: str) -> str:
    """Add the sum of all elements, of shape ()."""
    axes = tuple(range(len(build.shape(value))))
    return build("Reshape", build("ReduceSum", value, axes=axes), shape=()) if axes else value


def _mean(build: Builder, value: str) -> str:
    total = _sum(build, value)
    return build("Div", total, build.like(float(size(build.shape(value))), total))


def _aligned(build: Builder, logits: str, target: str) -> str:
    """Return the target in the dtype and shape of the logits; it may lack a channel axis of extent one."""
    shape, wanted = build.shape(target), build.shape(logits)
    if tuple(n for n in shape if n != 1) != tuple(n for n in wanted if n != 1):
        raise InputError(
            f"target '{target}' has shape {list(shape)}, but output '{logits}' has {list(wanted)}"
        )
    if shape != wanted:
        target = build("Reshape", target, shape=wanted)
    if build.dtype(target) != build.dtype(logits):
        target = build("Cast", target, to=build.dtype(logits))
    return target


def class_axis(logits: Shape, target: Shape) -> int | None:
    """Return the axis of the logits that the labels lack, or have with extent one; 1 where possible."""
    for axis in (1, *reversed(range(len(logits)))):
        if axis < len(logits):
            without = logits[:axis] + logits[axis + 1 :]
            if target == without or target == (*logits[:axis], 1, *logits[axis + 1 :]):
                return axis
    return None


def _labels(build: Builder, logits: str, target: str) -> tuple[str, int]:
    """Return the labels as int64 with extent one on the class axis, and that axis."""
    shape = build.shape(logits)
    axis = class_axis(shape, build.shape(target))
    if axis is None:
        raise InputError(
            f"labels '{target}' have shape {list(build.shape(target))}, but output '{logits}' has "
            f"{list(shape)}: labels need this shape without the class axis"
        )
    if is_float(build.dtype(target)) or build.dtype(target) == "bool":
        raise InputError(f"labels '{target}' are {build.dtype(target)}, not whole numbers")
    kept = (*shape[:axis], 1, *shape[axis + 1 :])
    if build.shape(target) != kept:
        target = build("Reshape", target, shape=kept)
    if build.dtype(target) != "int64":
        target = build("Cast", target, to="int64")
    return target, axis


def _is_label(build: Builder, labels: str, logits: str, axis: int) -> str:
    """Add a value of the logits' shape that tells where the class is the label."""
    classes = _along(np.arange(build.shape(logits)[axis]), axis, len(build.shape(logits)))
    index = build.constant(classes, "int64", stem="classes")
    return build("Equal", labels, index)


def _along(vector: Array, axis: int, rank: int) -> Array:
    """Reshape a vector to ``rank`` axes, so that it lies along one of them."""
    return vector.reshape(tuple(-1 if place == axis else 1 for place in range(rank)))


def _cross_entropy(build: Builder, spec: CrossEntropy, logits: str, target: str) -> str:
    labels, axis = _labels(build, logits, target)
    classes, dtype = build.shape(logits)[axis], build.dtype(logits)
    if spec.class_weights is not None and len(spec.class_weights) != classes:
        raise InputError(
            f"cross_entropy has {len(spec.class_weights)} class weights, but output '{logits}' "
            f"has {classes} classes"
        )
    zero, nan = build.constant(0.0, dtype), build.constant(float("nan"), dtype)
    here = _is_label(build, labels, logits, axis)
    # Where, not Mul: a class that is masked by a logit of -inf would give 0 * inf.
    chosen = build("ReduceSum", build("Where", here, logits, zero), axes=(axis,))
    surprise = build("Sub", build("LogSumExp", logits, axes=(axis,)), chosen)
    ignored = build("Equal", labels, build.constant(spec.ignore_index, "int64"))
    below = build("Less", labels, build.constant(0, "int64"))
    above = build("Greater", labels, build.constant(classes - 1, "int64"))
    surprise = build("Where", build("Or", below, above), nan, surprise)
    surprise = build("Where", ignored, zero, surprise)
    counts = build("Cast", build("Not", ignored), to=dtype)
    if spec.class_weights is not None:
        vector = _along(np.asarray(spec.class_weights), axis, len(build.shape(logits)))
        weights = build("Where", here, build.constant(vector, dtype, stem="class_weights"), zero)
        counts = build("Mul", counts, build("ReduceSum", weights, axes=(axis,)))
        surprise = build("Mul", surprise, counts)
    return build("Div", _sum(build, surprise), _sum(build, counts))


def _dice(build: Builder, spec: Dice, logits: str, target: str) -> str:
    shape = build.shape(logits)
    if len(shape) > 1 and shape[1] == 1:
        axis, truth = 1, _aligned(build, logits, target)
        chance = build("Sigmoid", logits)
    else:
        labels, axis = _labels(build, logits, target)
        here = _is_label(build, labels, logits, axis)
        truth = build("Cast", here, to=build.dtype(logits))
        chance = build("Softmax", logits, axis=axis)
    others = tuple(place for place in range(len(shape)) if place != axis)
    both = build("ReduceSum", build("Mul", chance, truth), axes=others)
    either = build("ReduceSum", build("Add", chance, truth), axes=others)
    smooth = build.like(spec.smooth, both)
    above = build("Add", build("Add", both, both), smooth)
    score = _mean(build, build("Div", above, build("Add", either, smooth)))
    return build("Sub", build.like(1.0, score), score)


def _dice_ce(build: Builder, spec: DiceCE, logits: str, target: str) -> str:
    shape = build.shape(logits)
    other: Loss = BCE() if len(shape) > 1 and shape[1] == 1 else spec.cross_entropy
    dice = add_loss(build, spec.dice, logits, target)
    return build("Add", dice, add_loss(build, other, logits, target))
