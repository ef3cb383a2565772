"""Masks of attention that is written out: which scores they let count, and which of them are bands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, prod
from operator import mul

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
    """Return the band that a constant mask lets be seen, if it is one, where every query sees a key.

    That of a mask that hides nothing has no ends.
    """
    array = constants.get(mask.value)
    if array is None:
        return None
    array = np.broadcast_to(array, np.broadcast_shapes(array.shape, mask.size))
    array = array.reshape(-1, *mask.size)
    if not (array == array[0]).all():
        return None
    seen = _seen(array[0], mask)
    return None if seen is None else _band(seen)


def hides_for_good(mask: Mask, constants: Mapping[str, Array]) -> bool:
    """Whether a constant mask puts minus infinity where it hides: nothing that is added brings that back."""
    if mask.unseen is not None:
        return mask.unseen == -inf
    array = constants[mask.value]
    return bool(((array == 0) | (array == -inf)).all())


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


@dataclass(frozen=True)
class Spread:
    """How what broadcasts to [*lead, queries, keys] does so to [batch, groups, heads, queries, keys].

    It is reshaped to ``parts``, expanded to ``whole``, and reshaped to ``made``.
    """

    parts: Shape
    whole: Shape
    made: Shape


def spread(value: Shape, lead: Shape, groups: Shape) -> Spread | None:
    """Return how a value is laid out by ``groups`` [batch, groups, heads]; None if it cannot be.

    >>> spread((4, 1, 7, 7), (2, 4, 3), (8, 3, 1))
    Spread(parts=(1, 4, 1, 7, 7), whole=(2, 4, 1, 7, 7), made=(8, 1, 1, 7, 7))
    """
    value = (*(1,) * (len(lead) + 2 - len(value)), *value)
    first, last = value[:-2], value[-2:]
    if prod(first) == 1:
        return Spread(*[(1, 1, 1, *last)] * 3)
    ends = sorted({*accumulate(lead, mul), *accumulate(groups, mul), 1})
    if any(after % before for before, after in pairwise(ends)):
        return None
    parts, whole, made = list[int](), list[int](), list[int]()
    starts = list(zip(ends, ends[1:], strict=False))
    has = {
        before: any(first[axis] > 1 and start <= before < stop for axis, (start, stop) in _spans(lead))
        for before, _ in starts
    }
    for _, (start, stop) in _spans(groups):
        inner = [(before, after) for before, after in starts if start <= before < stop]
        used = any(has[before] for before, _ in inner)
        parts += [after // before if has[before] else 1 for before, after in inner]
        whole += [after // before if used else 1 for before, after in inner]
        made.append(stop // start if used else 1)
    return Spread((*parts, *last), (*whole, *last), (*made, *last))


def _spans(shape: Shape) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each axis, and from which to which product of extents, counted from the front, it reaches."""
    ends = list(accumulate(shape, mul))
    yield from enumerate(zip([1, *ends], ends, strict=False))


def grouping(leads: Sequence[Shape], masks: Sequence[tuple[Shape, Shape]], repeats: int) -> Shape | None:
    """Return [batch, groups, heads]: heads are ``repeats``, the batch is such that masks are smallest.

    ``leads``: all shapes that batch and heads have, those of the product first. ``masks``: (shape, lead).
    Where it makes no difference the batch is the first axis of the longest.
    """
    total = prod(leads[0])
    if total % repeats:
        return None
    longest = max(leads, key=len)
    firsts = {longest[0] if longest else 1: None}
    firsts |= {end: None for lead in leads for end in accumulate(lead, mul)}
    found = [(first, total // repeats // first, repeats) for first in firsts if not total // repeats % first]

    def size(groups: Shape) -> float:
        made = [spread(shape, lead, groups) for shape, lead in masks]
        return sum(inf if one is None else prod(one.made) for one in made)

    return min(found, key=size, default=None)
