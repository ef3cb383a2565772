"""Losses as nodes: LogSumExp, elementwise operators and sums, so that every axis may be cut.

Cross entropy, BCE, MSE and L1 are ``torch.nn.functional``'s with mean reduction. All take logits;
labels are whole numbers. Formulas stand with each class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops._broadcast import cure, is_float
from oocdl.ops.ctc import CTC, LENGTHS, add_ctc
from oocdl.ops.own_loss import (
    FORMULAS,
    FileLoss,
    Formula,
    OwnLoss,
    add_file,
    add_own,
    aligned,
    mean,
    sum_of,
    total_of,
)

LEAST = 1e-8
"""Least denominator of a mean over labels that count, as in nnU-Net: without any, the mean is 0."""


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
class DiceCE:
    """Dice plus cross entropy (for one class BCE), as nnU-Net's ``DC_and_CE_loss``.

    Labels that are ``cross_entropy.ignore_index`` count in neither term, whether Dice names them or not;
    where all are ignored, both terms are 0. Class weights are each term's own: nnU-Net weighs the cross
    entropy only, MONAI's ``DiceCELoss(weight=...)`` both.
    """

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


Loss = CrossEntropy | Dice | DiceCE | BCE | MSE | L1 | CTC | OwnLoss | FileLoss
LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "dice": Dice(),
    "dice_ce": DiceCE(),
    "bce": BCE(),
    "mse": MSE(),
    "l1": L1(),
    "ctc": CTC(),
}
"""All losses that there are, by the names that ``fit(loss=...)`` takes."""


def register(name: str) -> Callable[[Formula], Formula]:
    """Return a decorator that makes a function a loss of this name, for ``fit(loss=name)``.

    The function gets a builder and the names of a prediction and of its target, as the model and the dataset
    have them, adds nodes (``build("Mul", x, y)``; ``docs/reference/operators.md`` lists them), and returns
    the name of the loss, of shape (). Gradients, cuts and memory follow from the nodes. ``mean`` and
    ``aligned`` help.

    A run notes the text of the function: a resume without it, or with another, is refused. Workers of a
    client need not have it. Raises InputError for a name that is taken. For example::

        @oocdl.losses.register("squared_hinge")
        def squared_hinge(build, prediction, target):
            product = build("Mul", prediction, oocdl.losses.aligned(build, prediction, target))
            short = build("Relu", build("Sub", build.like(1.0, product), product))
            return oocdl.losses.mean(build, build("Mul", short, short))
    """

    def keep(formula: Formula) -> Formula:
        if not isinstance(LOSSES.get(name, OwnLoss(name, "")), OwnLoss):
            raise InputError(f"there is a loss '{name}' already; give yours another name")
        spec = OwnLoss(name, digest_of(formula))
        LOSSES[name], FORMULAS[name] = spec, (spec, formula)
        return formula

    return keep


@dataclass(frozen=True)
class Head:
    """One loss of several."""

    spec: Loss
    logits: str
    target: str
    weight: float = 1.0
    further: Mapping[str, str] = field(default_factory=dict)
    """Name of a further array (``further_arrays``) -> value."""


def further_arrays(spec: Loss, known: Collection[str]) -> dict[str, str]:
    """Return the arrays that a loss reads beside its target, of the ``known`` ones: what for -> array.

    An array that the loss names has to be there; its usual name counts where it is there.

    >>> further_arrays(CTC(input_lengths="frames"), ["x", "labels", "target_lengths"])
    {'target_lengths': 'target_lengths', 'input_lengths': 'frames'}
    """
    if not isinstance(spec, CTC):
        return {}
    names = {name: getattr(spec, name) or name for name in LENGTHS}
    return {name: array for name, array in names.items() if getattr(spec, name) or array in known}


def reads_labels(spec: Loss) -> bool:
    """Whether the target of a loss is whole numbers."""
    return isinstance(spec, CrossEntropy | Dice | DiceCE | CTC) or (
        isinstance(spec, FileLoss) and spec.labels
    )


def takes_as_it_is(spec: Loss, final: str) -> bool:
    """Whether a loss takes an output that ends in this activation: most take what comes before it.

    Logarithms of probabilities are logits of the same probabilities, which is enough for CTC.
    """
    return isinstance(spec, MSE | L1 | FileLoss) or (isinstance(spec, CTC) and final == "LogSoftmax")


@dataclass(frozen=True)
class Labels:
    """The whole numbers that may stand in the labels of a loss."""

    classes: int
    """Labels are 0 to ``classes - 1``."""
    ignore_index: int | None = None
    """Label that has no part in the loss."""
    padded: bool = False
    """Whether negative labels are padding."""
    what: str = "label"
    """Name of these numbers in messages."""


def labels_of(spec: Loss, logits: Shape, target: Shape) -> Labels | None:
    """Return the labels that a loss of these shapes takes; None if it takes any numbers.

    >>> labels_of(CrossEntropy(), (2, 3, 8, 8), (2, 8, 8)).classes
    3
    """
    if isinstance(spec, CTC):
        return Labels(logits[-1], padded=True)
    if not isinstance(spec, CrossEntropy | Dice | DiceCE):
        return None
    ignored = (spec.cross_entropy if isinstance(spec, DiceCE) else spec).ignore_index
    if not isinstance(spec, CrossEntropy) and len(logits) > 1 and logits[1] == 1:
        return Labels(2, ignored)
    axis = class_axis(logits, target)
    return None if axis is None else Labels(logits[axis], ignored)


def labels_of_head(head: Head, logits: Shape, target: Shape) -> dict[str, Labels]:
    """Return what may stand in each value that a loss of these shapes reads; none for any numbers."""
    found = {head.target: labels_of(head.spec, logits, target)}
    for name, value in head.further.items():
        batch_first = isinstance(head.spec, CTC) and head.spec.batch_first
        most = target[-1] if name == "target_lengths" else logits[1 if batch_first else 0]
        found[value] = Labels(most + 1, what="length")
    return {value: labels for value, labels in found.items() if labels is not None}


def add_loss(
    build: Builder, spec: Loss, logits: str, target: str, further: Mapping[str, str] | None = None
) -> str:
    """Append a loss; returns its value, of shape (). ``further``: see ``Head``."""
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
            product = build("Mul", logits, aligned(build, logits, target))
            return mean(build, build("Sub", build("Softplus", logits), product))
        case MSE():
            error = build("Sub", logits, aligned(build, logits, target))
            return mean(build, build("Mul", error, error))
        case L1():
            return mean(build, build("Abs", build("Sub", logits, aligned(build, logits, target))))
        case CTC():
            return add_ctc(build, spec, logits, target, further or {})
        case FileLoss():
            return add_file(build, spec, logits, target)
        case OwnLoss():
            return add_own(build, spec, logits, target)


def add_losses(build: Builder, heads: Mapping[str, Head]) -> tuple[str, dict[str, str]]:
    """Append several losses; returns their weighted sum, and each (unweighted) by name."""
    if not heads:
        raise InputError("there is no loss: name one, or a mapping output -> (loss, weight)")
    parts = {
        name: add_loss(build, head.spec, head.logits, head.target, head.further)
        for name, head in heads.items()
    }
    weighted = (
        build("Mul", parts[name], build.like(head.weight, parts[name])) for name, head in heads.items()
    )
    return sum_of(build, weighted), parts


def class_axis(logits: Shape, target: Shape) -> int | None:
    """Return the axis of the logits that the labels lack, or have with extent one; 1 where possible."""
    for axis in (1, *reversed(range(len(logits)))):
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


def _cross_entropy(
    build: Builder, spec: CrossEntropy, logits: str, target: str, least: float | None = None
) -> str:
    """Add cross entropy; its denominator is at least ``least``, if that is given."""
    labels, axis = labels_on_axis(build, logits, target)
    classes, dtype = build.shape(logits)[axis], build.dtype(logits)
    zero, nan = build.constant(0.0, dtype), build.constant(float("nan"), dtype)
    here = is_label(build, labels, logits, axis)
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
        weights = build("Where", here, _class_weights(build, spec.class_weights, axis, logits), zero)
        counts = build("Mul", counts, build("ReduceSum", weights, axes=(axis,)))
        surprise = build("Mul", surprise, counts)
    total, number = total_of(build, surprise), total_of(build, counts)
    if least is not None:
        number = build("Max", number, build.like(least, number))
    return build("Div", total, number)


def _dice(build: Builder, spec: Dice, logits: str, target: str) -> str:
    shape = build.shape(logits)
    counts: str | None = None
    if len(shape) > 1 and shape[1] == 1:
        if spec.class_weights is not None:
            raise InputError(f"class weights do not apply to output '{logits}', which has one class")
        axis, truth = 1, aligned(build, logits, target)
        chance = build("Sigmoid", logits)
        if spec.ignore_index is not None:
            counts = aligned(build, logits, _counts(build, target, spec.ignore_index, logits))
    else:
        labels, axis = labels_on_axis(build, logits, target)
        here = is_label(build, labels, logits, axis)
        truth = build("Cast", here, to=build.dtype(logits))
        chance = build("Softmax", logits, axis=axis)
        if spec.ignore_index is not None:
            counts = _counts(build, labels, spec.ignore_index, logits)
    if counts is not None:
        chance, truth = build("Mul", chance, counts), build("Mul", truth, counts)
    others = tuple(place for place in range(len(shape)) if place != axis)
    both = build("ReduceSum", build("Mul", chance, truth), axes=others)
    either = build("ReduceSum", build("Add", chance, truth), axes=others)
    smooth = build.like(spec.smooth, both)
    above = build("Add", build("Add", both, both), smooth)
    scores = build("Div", above, build("Add", either, smooth))
    if spec.class_weights is not None:
        lost = build("Sub", build.like(1.0, scores), scores)
        return mean(build, build("Mul", lost, _class_weights(build, spec.class_weights, axis, logits)))
    score = mean(build, scores)
    return build("Sub", build.like(1.0, score), score)


def _dice_ce(build: Builder, spec: DiceCE, logits: str, target: str) -> str:
    shape = build.shape(logits)
    ignore = spec.cross_entropy.ignore_index
    if spec.dice.ignore_index not in (None, ignore):
        raise InputError(
            f"dice_ce ignores the label {spec.dice.ignore_index} in dice, but {ignore} in cross_entropy; "
            "give cross_entropy's ignore_index, which holds for both"
        )
    dice = _dice(build, replace(spec.dice, ignore_index=ignore), logits, target)
    if len(shape) < 2 or shape[1] > 1:
        return build("Add", dice, _cross_entropy(build, spec.cross_entropy, logits, target, least=LEAST))
    if spec.cross_entropy.class_weights is not None:
        raise InputError(f"class weights do not apply to output '{logits}', which has one class")
    counts = aligned(build, logits, _counts(build, target, ignore, logits))
    counted = build("Mul", aligned(build, logits, target), counts)
    # The ignored label times a logit is not in the sum; Softplus and product as in BCE.
    surprise = build("Sub", build("Mul", build("Softplus", logits), counts), build("Mul", logits, counted))
    total, number = total_of(build, surprise), total_of(build, counts)
    return build("Add", dice, build("Div", total, build("Max", number, build.like(LEAST, number))))


def _counts(build: Builder, labels: str, ignore: int, logits: str) -> str:
    """Add 1 where a label counts, 0 where it is ignored, in the labels' shape and the logits' dtype."""
    ignored = build("Equal", labels, build.constant(ignore, build.dtype(labels)))
    return build("Cast", build("Not", ignored), to=build.dtype(logits))


def _class_weights(build: Builder, weights: tuple[float, ...], axis: int, logits: str) -> str:
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
