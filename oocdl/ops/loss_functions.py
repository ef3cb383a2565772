"""All losses by name, what each reads, and how they are put together; their nodes stand in ``losses/``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.graph import Role, Shape, is_float
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.ctc import CTC, LENGTHS, add_ctc
from oocdl.ops.expression import Lifted, lift
from oocdl.ops.losses.class_losses import (
    CrossEntropy,
    Focal,
    add_cross_entropy,
    add_focal,
    class_axis,
    has_one_class,
)
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.ops.losses.number_losses import BCE, L1, MSE, SAMPLE_WEIGHTS, Huber, NumberLoss, add_number_loss
from oocdl.ops.losses.overlap_losses import Dice, DiceCE, Tversky, add_dice, add_dice_ce, add_tversky
from oocdl.ops.own_loss import FORMULAS, FileLoss, Formula, OwnLoss, add_file, add_own, sum_of

ClassLoss = CrossEntropy | Focal | Dice | Tversky | DiceCE
Loss = ClassLoss | NumberLoss | CTC | OwnLoss | FileLoss | DeepSupervision
LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(), "dice": Dice(), "dice_ce": DiceCE(), "focal": Focal(),
    "tversky": Tversky(), "bce": BCE(), "mse": MSE(), "l1": L1(), "huber": Huber(), "ctc": CTC(),
    "deep_supervision": DeepSupervision(),
}  # fmt: skip
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

    An array that the loss names has to be there; the usual name of lengths counts where it is there.

    >>> further_arrays(CTC(input_lengths="frames"), ["x", "labels", "target_lengths"])
    {'target_lengths': 'target_lengths', 'input_lengths': 'frames'}
    >>> further_arrays(BCE(sample_weights="age"), ["x", "y", "age"])
    {'sample_weights': 'age'}
    """
    if isinstance(spec, CTC):
        names = {name: getattr(spec, name) or name for name in LENGTHS}
        return {name: array for name, array in names.items() if getattr(spec, name) or array in known}
    named = getattr(spec.cross_entropy if isinstance(spec, DiceCE) else spec, SAMPLE_WEIGHTS, None)
    return {} if named is None else {SAMPLE_WEIGHTS: named}


def reads_labels(spec: Loss) -> bool:
    """Whether the target of a loss is whole numbers."""
    if isinstance(spec, Focal):
        return spec.use_softmax
    return isinstance(spec, ClassLoss | CTC) or (isinstance(spec, FileLoss) and spec.labels)


def takes_as_it_is(spec: Loss, final: str) -> bool:
    """Whether a loss takes an output that ends in this activation: most take what comes before it.

    Logarithms of probabilities are logits of the same probabilities, which is enough for CTC.
    """
    return isinstance(spec, MSE | L1 | Huber | FileLoss) or (isinstance(spec, CTC) and final == "LogSoftmax")


ACTIVATION_OF = {True: "Softmax", False: "Sigmoid"}
"""Whether classes exclude each other -> the activation that a loss of such contains."""


def are_exclusive(spec: Loss, logits: Shape) -> bool | None:
    """Return whether classes of a loss exclude each other; None if it has no classes."""
    if not isinstance(spec, ClassLoss | BCE | CTC):
        return None
    one = not isinstance(spec, CrossEntropy | CTC) and has_one_class(logits)
    return not (one or isinstance(spec, BCE)) and reads_labels(spec)


def check_dropped(spec: Loss, final: str, output: str, logits: Shape) -> None:
    """Raise InputError where a loss does not contain the final activation that is dropped of an output."""
    exclusive = are_exclusive(spec, logits)
    contained = ACTIVATION_OF[bool(exclusive)]
    if exclusive is not None and contained not in final:  # LogSoftmax is a Softmax to it
        why = f"output '{output}' ends in {final}, but the loss contains a {contained}"
        way_out = "choose another loss, or export the model without it"
        raise InputError(f"{why}: predictions would not be what is trained; {way_out}")


def check_axes(build: Builder, output: str, head: Head, axes: Collection[int]) -> None:
    """Raise InputError where an output ends in a softmax over other ``axes`` than the classes of its loss."""
    logits, spec = build.shape(head.logits), head.spec
    axis = len(logits) - 1 if isinstance(spec, CTC) else class_axis(logits, build.shape(head.target))
    if not axes or axis is None or not are_exclusive(spec, logits):
        return
    if any(logits[other] > 1 for other in {*axes} ^ {axis}):
        why = f"over axes {sorted(axes)}, but the classes of its loss are axis {axis}"
        cure = "predictions would not be what is trained; export the model without it"
        raise InputError(f"output '{output}' ends in a softmax {why}: {cure}")


@dataclass(frozen=True)
class Labels:
    """The whole numbers that may stand in the labels of a loss: 0 to ``classes - 1``."""

    classes: int
    ignore_index: int | None = None
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
    if not isinstance(spec, ClassLoss) or not reads_labels(spec):
        return None
    ignored = getattr(spec.cross_entropy if isinstance(spec, DiceCE) else spec, "ignore_index", None)
    if not isinstance(spec, CrossEntropy) and has_one_class(logits):
        return Labels(2, ignored)
    axis = class_axis(logits, target)
    return None if axis is None else Labels(logits[axis], ignored)


def labels_of_head(build: Builder, head: Head) -> dict[str, Labels]:
    """Return what may stand in each value of the dataset that a loss reads; none for any numbers."""
    logits, target = build.shape(head.logits), build.shape(head.target)
    found = {head.target: labels_of(head.spec, logits, target)}
    if are_exclusive(head.spec, logits) is False and not reads_labels(head.spec):
        found[head.target] = Labels(2, what="target")  # chances: of 255, the loss falls without end
    for name, value in head.further.items():
        if isinstance(head.spec, CTC):
            most = target[-1] if name == "target_lengths" else logits[1 if head.spec.batch_first else 0]
            found[value] = Labels(most + 1, what="length")
    of_dataset = {value for value in found if build.values[value].role is Role.TARGET}
    return {value: labels for value, labels in found.items() if labels is not None and value in of_dataset}


ADDED_BY: Mapping[type, Callable[..., Lifted]] = {
    CrossEntropy: add_cross_entropy, Focal: add_focal, Dice: add_dice, Tversky: add_tversky,
    DiceCE: add_dice_ce, BCE: add_number_loss, MSE: add_number_loss, L1: add_number_loss,
    Huber: add_number_loss, CTC: add_ctc, FileLoss: add_file, OwnLoss: add_own,
}  # fmt: skip
"""Loss -> what adds it: (output, loss, target, further arrays by ``Head.further``) -> its value."""


def add_loss(
    build: Builder, spec: Loss, logits: str, target: str, further: Mapping[str, str] | None = None
) -> str:
    """Append a loss of one output; returns its value, of shape (). ``further``: see ``Head``."""
    if not is_float(build.dtype(logits)):
        raise InputError(f"output '{logits}' is {build.dtype(logits)}; a loss needs floating point")
    if type(spec) not in ADDED_BY:
        raise InputError("deep supervision is a loss of all outputs together: give it as loss= itself")
    return ADDED_BY[type(spec)](lift(build, logits), spec, target, further or {}).name


def add_losses(
    build: Builder, heads: Mapping[str, Head], arrays: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, dict[str, str]]:
    """Append several losses; returns their weighted sum, and each (unweighted) by name.

    Errors call outputs by their names, and targets by those of the ``arrays`` that they are read from.
    """
    if not heads:
        raise InputError("there is no loss: name one, or a mapping output -> (loss, weight)")
    parts = dict[str, str]()
    for name, head in heads.items():
        try:
            parts[name] = add_loss(build, head.spec, head.logits, head.target, head.further)
        except InputError as error:
            text = f"{error}".replace(f"output '{head.logits}'", f"output '{name}'")
            error.args = (text.replace(f"'{head.target}'", f"'{arrays.get(head.target, head.target)}'"),)
            raise
    total = sum_of(lift(build, parts[name]) * head.weight for name, head in heads.items())
    return total.name, parts
