"""Losses that compare numbers, element by element: BCE, MSE, L1 and Huber, with weights of samples.

    BCE    softplus(x) - x y;  with pos_weight q: (1 - y) x + (1 + (q - 1) y) softplus(-x)
    Huber  e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2), for e = x - y

They are ``torch.nn.functional``'s with mean reduction. BCE takes logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.own_loss import aligned, mean

SAMPLE_WEIGHTS = "sample_weights"
"""The further array of a loss that weighs samples, by the name of its field."""


@dataclass(frozen=True)
class BCE:
    """Binary cross entropy with logits: the mean of ``max(x, 0) - x y + log(1 + exp(-|x|))``, stable.

    ``pos_weight`` multiplies the part of positive targets, as in ``torch.nn.BCEWithLogitsLoss``: one number,
    or one for each channel (axis 1). ``sample_weights`` names an array of the dataset: see ``weighted``.

    >>> BCE(pos_weight=(1.0, 8.0)).pos_weight
    (1.0, 8.0)
    """

    pos_weight: float | tuple[float, ...] | None = None
    sample_weights: str | None = None


@dataclass(frozen=True)
class MSE:
    """Mean of ``(x - y)^2``. ``sample_weights`` names an array of the dataset: see ``weighted``."""

    sample_weights: str | None = None


@dataclass(frozen=True)
class L1:
    """Mean of ``|x - y|``. ``sample_weights`` names an array of the dataset: see ``weighted``."""

    sample_weights: str | None = None


@dataclass(frozen=True)
class Huber:
    """Mean of the squared error up to ``delta``, of the absolute error beyond: ``torch.nn.HuberLoss``.

    ``sample_weights`` names an array of the dataset: see ``weighted``.
    """

    delta: float = 1.0
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise InputError(f"delta of huber must be positive, not {self.delta}")


NumberLoss = BCE | MSE | L1 | Huber


def add_number_loss(
    build: Builder, spec: NumberLoss, output: str, target: str, weights: str | None = None
) -> str:
    """Append a loss of numbers; returns its value, of shape (). ``weights``: see ``weighted``."""
    truth = aligned(build, output, target)
    if isinstance(spec, BCE):
        each = binary_surprise(build, output, truth, spec.pos_weight)
    else:
        error = build("Sub", output, truth)
        each = build("Mul", error, error) if isinstance(spec, MSE) else build("Abs", error)
        if isinstance(spec, Huber):
            small = build("Min", each, build.like(spec.delta, each))
            half = build("Mul", build("Mul", small, small), build.like(0.5, small))
            beyond = build("Mul", build("Sub", each, small), build.like(spec.delta, each))
            each = build("Add", half, beyond)
    return mean(build, weighted(build, each, weights))


def binary_surprise(
    build: Builder, logits: str, truth: str, pos_weight: float | tuple[float, ...] | None = None
) -> str:
    """Add the binary cross entropy of each element; ``truth`` has the shape and dtype of the logits."""
    # Softplus, not Abs and Max: its gradient is right also at 0, where heads start.
    if pos_weight is None:
        return build("Sub", build("Softplus", logits), build("Mul", logits, truth))
    vector = np.asarray(pos_weight, np.float64)
    if vector.ndim:
        vector = along_channels(vector, build, logits, "pos_weight")
    if not (np.isfinite(vector).all() and (vector >= 0).all()):
        raise InputError(f"pos_weight must be finite and not negative, got {pos_weight}")
    one, more = build.like(1.0, logits), build.constant(vector - 1, build.dtype(logits), stem="pos_weight")
    positive = build("Add", one, build("Mul", more, truth))
    rest = build("Mul", build("Sub", one, truth), logits)
    return build("Add", rest, build("Mul", positive, build("Softplus", build("Neg", logits))))


def along_channels(vector: Array, build: Builder, logits: str, what: str) -> Array:
    """Reshape numbers, one for each channel, to lie along axis 1 of the logits. Raises InputError."""
    shape = build.shape(logits)
    if len(shape) < 2 or len(vector) != shape[1]:
        raise InputError(f"{what} has {len(vector)} numbers, but output '{logits}' has shape {list(shape)}")
    return vector.reshape((-1,) + (1,) * (len(shape) - 2))


def weighted(build: Builder, each: str, weights: str | None) -> str:
    """Add the loss of each element times its weight: [N] or [N, 1], one a sample, or of the loss's own shape.

    The mean still divides by what it would divide by without weights: it is Keras's ``sample_weight`` and
    ``torch.nn.BCEWithLogitsLoss(weight=...)``. So weights of 1 change nothing, batches of one sample are
    weighed too, and the gradients of several batches add up to those of one large batch.

    Raises InputError for weights of another shape.
    """
    if weights is None:
        return each
    shape, given = build.shape(each), build.shape(weights)
    if given[:1] == shape[:1] and all(extent == 1 for extent in given[1:]):
        wanted = (shape[0], *(1 for _ in shape[1:]))
    elif tuple(n for n in given if n != 1) == tuple(n for n in shape if n != 1):
        wanted = shape
    else:
        raise InputError(
            f"weights '{weights}' have shape {list(given)}; they need [{shape[0]}], one a sample, "
            f"or {list(shape)}, as the loss has"
        )
    if given != wanted:
        weights = build("Reshape", weights, shape=wanted)
    return build("Mul", each, weights)
