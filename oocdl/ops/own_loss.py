"""What losses are made of, and those that a user writes of it, known by name and by their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops._broadcast import cure, is_float, size


@dataclass(frozen=True)
class OwnLoss:
    """A loss that ``register`` has been given. A run that was begun with it needs it again, and the same."""

    name: str
    digest: str
    """Digest of the formula's text (``digest_of``)."""


Formula = Callable[[Builder, str, str], str]
"""(builder, prediction, target) -> the loss, all but the builder names of values; the loss has shape ()."""
FORMULAS: dict[str, tuple[OwnLoss, Formula]] = {}
"""What was registered, by name."""


def total_of(build: Builder, value: str) -> str:
    """Add the sum of all elements, of shape ()."""
    axes = tuple(range(len(build.shape(value))))
    return build("Reshape", build("ReduceSum", value, axes=axes), shape=()) if axes else value


def mean(build: Builder, value: str) -> str:
    """Add the mean of all elements, of shape ()."""
    total = total_of(build, value)
    return build("Div", total, build.like(float(size(build.shape(value))), total))


def aligned(build: Builder, logits: str, target: str) -> str:
    """Return the target in the dtype and shape of the logits; it may lack a channel axis of extent one."""
    shape, wanted = build.shape(target), build.shape(logits)
    if tuple(n for n in shape if n != 1) != tuple(n for n in wanted if n != 1):
        raise InputError(
            f"target '{target}' has shape {list(shape)}, but output '{logits}' has {list(wanted)}"
            + cure(shape, wanted)
        )
    if shape != wanted:
        target = build("Reshape", target, shape=wanted)
    if build.dtype(target) != build.dtype(logits):
        target = build("Cast", target, to=build.dtype(logits))
    return target


def known_as(name: str, formula: Formula) -> OwnLoss:
    """Keep a formula under a name, in the place of one that was registered before."""
    spec = OwnLoss(name, digest_of(formula))
    FORMULAS[name] = spec, formula
    return spec


def add_own(build: Builder, spec: OwnLoss, prediction: str, target: str) -> str:
    """Append a loss of the user's; InputError if it is not registered, is another, or gives no number."""
    known, formula = FORMULAS.get(spec.name, (None, None))
    if known != spec or formula is None:
        how = "is not known here" if known is None else "is another than the run's"
        raise InputError(
            f"the loss '{spec.name}' {how}: import what registers it with oocdl.losses.register first"
        )
    loss = formula(build, prediction, target)
    if loss not in build.values or build.shape(loss) or not is_float(build.dtype(loss)):
        made = f"a value of shape {list(build.shape(loss))}" if loss in build.values else "no value"
        raise InputError(f"the loss '{spec.name}' gave {made}; it has to be a floating-point number")
    return loss
