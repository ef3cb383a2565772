"""Finds attention that is written out, as exporters do it: ``written_out`` has the form.

The products are Einsums. What follows is looked for from the end: each step is what is done to scores. Of
masks it is found which scores they let count, and which of them are bands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf, prod
from operator import mul

import numpy as np

from oocdl.graph.ir.graph import Array, Graph, Node, Shape
from oocdl.graph.ir.score_tiles import Band

UNSEEN = -1e30
"""A score so low, beside one that is not, has a weight of exactly 0, as if it were minus infinity."""


@dataclass(frozen=True)
class Mask:
    """A mask of scores [*lead, queries, keys]: a number to add, or a bool with a number where it is false."""

    value: str
    lead: Shape
    size: Shape
    """Numbers of queries and keys; the mask itself may broadcast."""
    unseen: float | None = None
    negated: bool = False


@dataclass(frozen=True)
class Operand:
    """q, k or v as matrices [.., rows, columns], by the value that they are moved and scaled from."""

    value: str
    turned: bool = False
    """Whether the value has columns before rows."""
    scale: float = 1.0
    repeats: int = 1
    """Number of consecutive heads that are equal; the value has them once."""


@dataclass(frozen=True)
class RowScale:
    """A number for each query, or fewer, by which scores [*lead, queries, keys] are multiplied or divided."""

    value: str
    lead: Shape
    op: str
    """"Mul" or "Div"."""


Step = tuple[str, "float | RowScale | Mask"]
"""Scores before a node, and what it does to them: it multiplies by a number, or by one a query, or masks."""


@dataclass(frozen=True)
class Weights:
    """The steps from the Softmax of scores to the product with v."""

    softmax: Node
    cleaned: bool = False
    """Whether a query that sees nothing has the result 0, and not NaN."""
    uniform: str | None = None
    """The numbers by which weights are dropped."""
    ratio: float = 0.0


@dataclass(frozen=True)
class Found:
    """The attention that one node is to compute: product of q and k, further steps, and product with v."""

    scores: Node
    weights: str
    """The operand of the product with v."""
    end: Weights
    scale: float
    row_scales: tuple[RowScale, ...]
    masks: tuple[Mask, ...]
    """The last applied first."""


class Finder:
    """Walks back from a product to what it is made of."""

    def __init__(self, graph: Graph, kept: Collection[str]) -> None:
        self.graph, self.kept = graph, kept
        self.maker = {name: node for node in graph.nodes for name in node.outputs}
        self.readers = graph.consumers()

    def shape(self, value: str) -> Shape:
        return self.graph.values[value].shape

    def number(self, value: str) -> float | None:
        """Return the number that a value is, if it is one constant."""
        array = self.graph.constants.get(value)
        return float(array.reshape(())) if array is not None and array.size == 1 else None

    def only_for(self, value: str, *readers: Node) -> bool:
        """Whether only these nodes read a value."""
        return value not in self.kept and all(
            any(node is known for known in readers) for node in self.readers.get(value, ())
        )

    def find(self, node: Node) -> Found | None:
        """Return the attention that ends in this product, if it is one."""
        for weights in node.inputs:
            end = self._weights(weights, node)
            if end is not None:
                return self._scores(weights, end)
        return None

    def _weights(self, value: str, reader: Node) -> Weights | None:
        """Return the Softmax over the last axis that a value is, and what was done behind it."""
        made = self.maker.get(value)
        if made is None or not self.only_for(value, reader):
            return None
        if made.op == "Reshape" and self.shape(made.inputs[0])[-2:] == self.shape(value)[-2:]:
            return self._weights(made.inputs[0], made)
        if made.op == "Dropout":
            end = self._weights(made.inputs[0], made)
            alone = end is not None and end.uniform is None
            return replace(end, uniform=made.inputs[1], ratio=made.attrs["ratio"]) if end and alone else None
        if made.op == "Softmax":
            return Weights(made) if made.attrs["axis"] == len(self.shape(value)) - 1 else None
        return self._cleaned(made) if made.op == "Where" else None

    def _cleaned(self, made: Node) -> Weights | None:
        """Return the Softmax that a Where takes, but 0 where it is not a number."""
        other = self.maker.get(made.inputs[0])
        equal = self.maker.get(other.inputs[0]) if other is not None and other.op == "Not" else None
        softmax = self.maker.get(made.inputs[2])
        if other is None or equal is None or softmax is None or softmax.op != "Softmax":
            return None
        good = self.number(made.inputs[1]) == 0
        good = good and equal.op == "Equal" and set(equal.inputs) == {made.inputs[2]}
        good = good and softmax.attrs["axis"] == len(self.shape(made.inputs[2])) - 1
        return Weights(softmax, True) if good and self.only_for(made.inputs[2], equal, made) else None

    def _scores(self, weights: str, end: Weights) -> Found | None:
        """Return the product before a Softmax, and what is between; None where a mask is scaled."""
        scale, row_scales, masks = 1.0, tuple[RowScale, ...](), tuple[Mask, ...]()
        reader, value = end.softmax, end.softmax.inputs[0]
        while self.only_for(value, reader):
            node = self.maker.get(value)
            if node is not None and node.op == "Einsum":
                return Found(node, weights, end, scale, row_scales, masks)
            step = None if node is None else self._step(node)
            if node is None or step is None:
                return None
            (value, done), reader = step, node
            if isinstance(done, float):
                scale *= done
            elif isinstance(done, RowScale):
                row_scales += (done,)
            elif scale != 1 or row_scales:
                return None
            else:
                masks += (done,)
        return None

    def _step(self, node: Node) -> Step | None:
        """Return what a node does to scores, if it is one of the things that are known."""
        made = self.shape(node.outputs[0])
        if node.op == "Reshape":
            return (node.inputs[0], 1.0) if self.shape(node.inputs[0])[-2:] == made[-2:] else None
        scaled = self.scaled(node)
        if scaled is not None:
            return scaled
        if node.op in ("Mul", "Div", "Add"):
            # The operands in the orders in which the first may be scores.
            for before, other in (node.inputs, node.inputs[::-1])[: 1 if node.op == "Div" else 2]:
                if self.shape(before) != made or not self.leads_to_product(before):
                    continue
                if node.op == "Add":
                    return before, Mask(other, made[:-2], made[-2:])
                if self.shape(other)[-1:] in ((), (1,)):
                    return before, RowScale(other, made[:-2], node.op)
        if node.op == "Where":
            mask, *sides = node.inputs
            for place, (before, other) in enumerate((sides, sides[::-1])):
                number = self.number(other)
                if number is not None and self.shape(before) == made:
                    return before, Mask(mask, made[:-2], made[-2:], number, negated=place == 1)
        return None

    def scaled(self, node: Node) -> tuple[str, float] | None:
        """Return the operand that a node multiplies by a number or divides by it, and that factor."""
        if node.op not in ("Mul", "Div"):
            return None
        for place, (value, other) in enumerate((node.inputs, node.inputs[::-1])):
            number = self.number(other)
            if number is not None and self.shape(value) == self.shape(node.outputs[0]):
                if node.op == "Mul":
                    return value, number
                if place == 0 and number != 0:
                    return value, 1 / number
        return None

    def leads_to_product(self, value: str) -> bool:
        """Whether a value is scores, and no mask: a product, but for scales, masks and other shapes."""
        node = self.maker.get(value)
        while node is not None and node.op in ("Reshape", "Mul", "Div", "Add", "Where"):
            step = self._step(node)
            node = None if step is None else self.maker.get(step[0])
        return node is not None and node.op == "Einsum"

    def operand(self, value: str, past_repeats: bool) -> Operand:
        """Return matrices as what they were before they were moved, scaled, and repeated."""
        found = Operand(value)
        while (node := self.maker.get(found.value)) is not None:
            before, made = node.inputs[0], self.shape(found.value)
            was, scaled = self.shape(before), self.scaled(node)
            if node.op == "Reshape" and len(was) > 1 and was[-2:] == made[-2:]:
                found = replace(found, value=before)
            elif node.op == "Transpose" and turns(node.attrs["perm"]):
                found = replace(found, value=before, turned=not found.turned)
            elif scaled is not None:
                found = replace(found, value=scaled[0], scale=found.scale * scaled[1])
            elif past_repeats and found.repeats == 1 and _repeats(node, was, made):
                found = replace(found, value=before, repeats=made[-3])
            else:
                break
        return found


def turns(perm: tuple[int, ...]) -> bool:
    """Whether a Transpose changes the last two axes alone."""
    rank = len(perm)
    return tuple(perm) == (*range(rank - 2), rank - 1, rank - 2)


def _repeats(node: Node, was: Shape, made: Shape) -> bool:
    """Whether a node repeats matrices, the copies of each side by side."""
    same = len(was) == len(made) > 2 and (*was[:-3], *was[-2:]) == (*made[:-3], *made[-2:])
    return node.op == "Expand" and same and was[-3] == 1


# Masks ---------------------------------------------------------------------------------------


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


def spread(value: Shape, lead: Shape, groups: Shape) -> tuple[Shape, Shape, Shape] | None:
    """Return how what broadcasts to [*lead, queries, keys] is laid out by ``groups`` [batch, groups, heads].

    It is reshaped to the first of the shapes, expanded to the second, and reshaped to the third. None if it
    cannot be.

    >>> spread((4, 1, 7, 7), (2, 4, 3), (8, 3, 1))
    ((1, 4, 1, 7, 7), (2, 4, 1, 7, 7), (8, 1, 1, 7, 7))
    """
    value = (*(1,) * (len(lead) + 2 - len(value)), *value)
    first, last = value[:-2], value[-2:]
    if prod(first) == 1:
        return ((1, 1, 1, *last),) * 3
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
    return (*parts, *last), (*whole, *last), (*made, *last)


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
        return sum(inf if one is None else prod(one[-1]) for one in made)

    return min(found, key=size, default=None)
