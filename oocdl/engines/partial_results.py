"""Combines partial results of the units of a layer, or of the blocks of a chain, in their order.

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


def combine_moments(xp: Any, parts: Sequence[Any], counts: Any, axes: tuple[int, ...]) -> list[Any]:
    """Combine means and variances of ``counts`` elements each, in float64 (Chan, Golub and LeVeque, 1983)."""
    means, variances = (xp.asarray(part, dtype=xp.float64) for part in parts)
    shares = counts / counts.sum()
    mean = (means * shares).sum(axes, keepdims=True)
    variance = ((variances + (means - mean) ** 2) * shares).sum(axes, keepdims=True)
    return [xp.asarray(total, dtype=parts[0].dtype) for total in (mean, variance)]
