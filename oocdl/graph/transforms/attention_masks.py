"""Masks of attention that is written out: which scores they let count, and which of them are bands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.score_tiles import Band

UNSEEN = -1e30
"""A score so low, beside one that is not, has a weight of exactly 0, as if it were minus infinity."""


@dataclass(frozen=True)
class Mask:
    """A mask of scores [*lead, queries, keys]: a number to add, or a bool with a number where it is false."""

    value: str
    lead: Shape
    size: Shape
    """How many queries and keys there are; the mask itself may broadcast."""
    unseen: float | None = None
    negated: bool = False


def band_of(mask: Mask, constants: Mapping[str, Array]) -> Band | None:
    """Return the band that a constant mask lets be seen, if it is one, where every query sees a key."""
    array = constants.get(mask.value)
    if array is None or array.shape[-2:] != mask.size or prod(array.shape[:-2]) != 1:
        return None
    seen = _seen(array.reshape(array.shape[-2:]), mask)
    return None if seen is None else _band(seen)


def _seen(array: Array, mask: Mask) -> Array | None:
    """Return which scores of a constant mask count; None if it says more than that."""
    if array.dtype == bool:
        if mask.unseen is None or mask.unseen > UNSEEN:
            return None
        return ~array if mask.negated else array
    seen: Array = array == 0
    return seen if mask.unseen is None and bool((seen | (array <= UNSEEN)).all()) else None


def _band(seen: Array) -> Band | None:
    queries, keys = seen.shape
    if not seen.any(1).all():
        return None
    first, last = seen.argmax(1), keys - 1 - seen[:, ::-1].argmax(1)
    if not (seen.sum(1) == last - first + 1).all():
        return None
    places = np.arange(queries)
    high, low = int((last - places).max()), int((first - places).min())
    expected = np.minimum(places + high, keys - 1), np.maximum(places + low, 0)
    if not (expected[0] == last).all() or not (expected[1] == first).all():
        return None
    return low if (first > 0).any() else None, high if (last < keys - 1).any() else None


def by_group(mask: Shape, lead: Shape, groups: Shape) -> Shape | None:
    """Return the shape [batch, groups, heads, queries, keys] of a mask of scores [*lead, queries, keys]."""
    mask = (*(1,) * (len(lead) + 2 - len(mask)), *mask)
    first, last = mask[:-2], mask[-2:]
    if prod(first) == 1:
        return (1, 1, 1, *last)
    if first == lead:
        return (*groups, *last)
    if lead == groups:
        return (*first, *last)
    if len(lead) == 2 and lead[0] == groups[0]:
        return (first[0], *(groups[1:] if first[1] > 1 else (1, 1)), *last)
    return None
