"""Losses that compare numbers, element by element: BCE, MSE, L1 and Huber, with weights of samples.

    BCE    softplus(x) - x y;  with pos_weight q: (1 - y) x + (1 + (q - 1) y) softplus(-x)
    Huber  e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2), for e = x - y

They are ``torch.nn.functional``'s with mean reduction. BCE takes logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array
from oocdl.ops.expression import Lifted, apply, minimum, softplus
from oocdl.ops.own_loss import truth_of

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


def add_number_loss(x: Lifted, spec: NumberLoss, target: str, further: Mapping[str, str]) -> Lifted:
    """Append a loss of numbers; returns its value, of shape ()."""
    truth = truth_of(x, target)
    if isinstance(spec, BCE):
        return weighted(binary_surprise(x, truth, spec.pos_weight), further).mean()
    error = x - truth
    each = error * error if isinstance(spec, MSE) else apply("Abs", error)
    if isinstance(spec, Huber):
        small = minimum(each, spec.delta)
        each = small * small * 0.5 + (each - small) * spec.delta
    return weighted(each, further).mean()


def binary_surprise(x: Lifted, truth: Lifted, pos_weight: float | tuple[float, ...] | None = None) -> Lifted:
    """Add the binary cross entropy of each element; ``truth`` has the shape and dtype of the logits."""
    # Softplus, not Abs and Max: its gradient is right also at 0, where heads start.
    if pos_weight is None:
        return softplus(x) - x * truth
    vector = np.asarray(pos_weight, np.float64)
    if vector.ndim:
        vector = along_channels(vector, x, "pos_weight")
    if not (np.isfinite(vector).all() and (vector >= 0).all()):
        raise InputError(f"pos_weight must be finite and not negative, got {pos_weight}")
    one, more = x.number(1.0), x.to(x.build.constant(vector - 1, x.dtype, stem="pos_weight"))
    positive = one + more * truth
    return (one - truth) * x + positive * softplus(-x)


def along_channels(vector: Array, x: Lifted, what: str) -> Array:
    """Reshape numbers, one for each channel, to lie along axis 1 of the logits. Raises InputError."""
    if len(x.shape) < 2 or len(vector) != x.shape[1]:
        raise InputError(f"{what} has {len(vector)} numbers, but output '{x.name}' has shape {list(x.shape)}")
    return vector.reshape((-1,) + (1,) * (len(x.shape) - 2))


def weighted(each: Lifted, further: Mapping[str, str]) -> Lifted:
    """Add the loss of each element times its weight: [N] or [N, 1], one a sample, or of the loss's own shape.

    The mean still divides by what it would divide by without weights: it is Keras's ``sample_weight`` and
    ``torch.nn.BCEWithLogitsLoss(weight=...)``. So weights of 1 change nothing, batches of one sample are
    weighed too, and the gradients of several batches add up to those of one large batch.

    Raises InputError for weights of another shape.
    """
    if SAMPLE_WEIGHTS not in further:
        return each
    weights = each.to(further[SAMPLE_WEIGHTS])
    shape, given = each.shape, weights.shape
    if given[:1] == shape[:1] and all(extent == 1 for extent in given[1:]):
        wanted = (shape[0], *(1 for _ in shape[1:]))
    elif [n for n in given if n != 1] == [n for n in shape if n != 1]:
        wanted = shape
    else:
        needed = f"they need [{shape[0]}], one a sample, or {list(shape)}, as the loss has"
        raise InputError(f"weights '{weights.name}' have shape {list(given)}; {needed}")
    return each * (weights if given == wanted else apply("Reshape", weights, shape=wanted))
