"""Combines partial results of the units of a layer, in their order.

With NumPy, or on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def combine(xp: Any, how: str, total: Sequence[Any], count: int, other: Sequence[Any], elements: int) -> None:
    """Combine partial results into ``total``, in place; ``xp`` is the module that the arrays are of.

    ``moments`` by Chan, Golub and LeVeque (1983), in float64: arrays are mean and
    (biased) variance over ``count`` and ``elements`` elements. ``logsumexp``:
    partial results are themselves log-sum-exps.

    >>> import numpy as np
    >>> total = [np.array([1.0]), np.array([0.0])]
    >>> combine(np, "moments", total, 1, [np.array([4.0]), np.array([0.0])], 2)
    >>> total
    [array([3.]), array([2.])]
    """
    if how == "sum":
        xp.add(total[0], other[0], out=total[0])
    elif how == "max":
        xp.maximum(total[0], other[0], out=total[0])
    elif how == "logsumexp":
        xp.logaddexp(total[0], other[0], out=total[0])
    else:
        mean, var = (xp.asarray(array, dtype=xp.float64) for array in total)
        delta = other[0] - mean
        share = elements / (count + elements)
        total[0][...] = mean + delta * share
        total[1][...] = var * (1 - share) + other[1] * share + delta * delta * share * (1 - share)
