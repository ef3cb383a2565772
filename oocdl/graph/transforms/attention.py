"""Finds attention that is written out, as exporters do it, and makes it one node.

    q k^T -> [scale, masks] -> Softmax over keys -> [0 where that is not a number] -> times v

The products are Einsums; scales are numbers anywhere before the Softmax, on q, k or the scores; masks are
added, or put a number where they are false. Heads of keys that are repeated for several heads of queries are
read once. Where anything else reads the scores or their Softmax, or stands between (as dropout), all stays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import inf, nan, prod

from oocdl.graph.ir.graph import Graph, Node, Shape
from oocdl.graph.ir.op_rule import Builder, Rules
from oocdl.graph.ir.score_tiles import Band
from oocdl.graph.transforms.attention_masks import Mask, band_of, by_group


@dataclass(frozen=True)
class _Operand:
    """q, k or v as matrices [.., rows, columns], by the value that they are moved and scaled from."""

    value: str
    turned: bool = False
    """Whether the value has columns before rows."""
    scale: float = 1.0
    repeats: int = 1
    """How many heads that follow each other are equal; the value has them once."""


@dataclass(frozen=True)
class _Found:
    """What one node is to compute: the product of q and k, what follows it, and the product with v."""

    scores: Node
    weights: str
    cleaned: bool
    """Whether a query that sees nothing has the result 0, and not NaN."""
    scale: float
    masks: tuple[Mask, ...] = field(default_factory=tuple)


def with_attention(graph: Graph, rules: Rules, kept: Collection[str] = ()) -> Graph:
    """Return the graph with one node for each attention that is written out; values ``kept`` stay."""
    finder = _Finder(graph, {*kept, *graph.outputs, *graph.updates.values()})
    build = Builder(rules, graph)
    build.nodes = []
    for node in graph.nodes:
        found = finder.find(node) if node.op == "Einsum" else None
        build.role = graph.values[node.outputs[0]].role
        build.scope = f"{node.name.rpartition('/')[0] or node.name}/"
        if found is None or not _rewrite(build, finder, node, found):
            build.nodes.append(node)
    return build.graph()


class _Finder:
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

    def find(self, node: Node) -> _Found | None:
        """Return the attention that ends in this product, if it is one."""
        for weights in node.inputs:
            softmax, cleaned = self._softmax(weights, node)
            if softmax is not None:
                found = self._scores(softmax)
                return None if found is None else replace(found, weights=weights, cleaned=cleaned)
        return None

    def _softmax(self, value: str, reader: Node) -> tuple[Node | None, bool]:
        """Return the Softmax over the last axis that a value is, and whether NaN became 0 behind it."""
        made = self.maker.get(value)
        if made is None or not self.only_for(value, reader):
            return None, False
        if made.op == "Reshape" and self.shape(made.inputs[0])[-2:] == self.shape(value)[-2:]:
            return self._softmax(made.inputs[0], made)
        if made.op == "Softmax":
            return (made if made.attrs["axis"] == len(self.shape(value)) - 1 else None), False
        if made.op != "Where" or self.number(made.inputs[1]) != 0:
            return None, False
        other = self.maker.get(made.inputs[0])
        equal = self.maker.get(other.inputs[0]) if other is not None and other.op == "Not" else None
        softmax = self.maker.get(made.inputs[2])
        if other is None or equal is None or softmax is None or softmax.op != "Softmax":
            return None, False
        good = equal.op == "Equal" and set(equal.inputs) == {made.inputs[2]}
        good = good and softmax.attrs["axis"] == len(self.shape(value)) - 1
        return (softmax, True) if good and self.only_for(made.inputs[2], equal, made) else (None, False)

    def _scores(self, softmax: Node) -> _Found | None:
        """Return the product before a Softmax, with the scale and the masks between them."""
        scale, masks, reader, value = 1.0, list[Mask](), softmax, softmax.inputs[0]
        while self.only_for(value, reader):
            node = self.maker.get(value)
            if node is None:
                return None
            if node.op == "Einsum":
                return _Found(node, "", False, scale, tuple(masks))
            step = self._step(node)
            if step is None:
                return None
            before, factor, mask = step
            if mask is not None and scale != 1:
                return None  # a mask that is scaled
            scale *= factor
            masks += [] if mask is None else [mask]
            reader, value = node, before
        return None

    def _step(self, node: Node) -> tuple[str, float, Mask | None] | None:
        """Return what scores were before a node, its scale, and its mask."""
        made = self.shape(node.outputs[0])
        if node.op == "Reshape" and self.shape(node.inputs[0])[-2:] == made[-2:]:
            return node.inputs[0], 1.0, None
        scaled = self.scaled(node)
        if scaled is not None:
            return (*scaled, None)
        if node.op == "Add":
            for before, mask in (node.inputs, node.inputs[::-1]):
                if self.leads_to_product(before) and self.shape(before) == made:
                    return before, 1.0, Mask(mask, made[:-2], made[-2:])
        if node.op == "Where":
            mask, *sides = node.inputs
            for place, (before, other) in enumerate((sides, sides[::-1])):
                number = self.number(other)
                if number is not None and self.shape(before) == made:
                    return before, 1.0, Mask(mask, made[:-2], made[-2:], number, negated=place == 1)
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

    def operand(self, value: str, past_repeats: bool) -> _Operand:
        """Return matrices as what they were before they were moved, scaled, and repeated."""
        found = _Operand(value)
        while (node := self.maker.get(found.value)) is not None:
            before, made = node.inputs[0], self.shape(found.value)
            was, scaled = self.shape(before), self.scaled(node)
            if node.op == "Reshape" and len(was) > 1 and was[-2:] == made[-2:]:
                found = replace(found, value=before)
            elif node.op == "Transpose" and _turns(node.attrs["perm"]):
                found = replace(found, value=before, turned=not found.turned)
            elif scaled is not None:
                found = replace(found, value=scaled[0], scale=found.scale * scaled[1])
            elif past_repeats and found.repeats == 1 and _repeats(node, was, made):
                found = replace(found, value=before, repeats=made[-3])
            else:
                break
        return found


def _turns(perm: tuple[int, ...]) -> bool:
    """Whether a Transpose changes the last two axes alone."""
    rank = len(perm)
    return tuple(perm) == (*range(rank - 2), rank - 1, rank - 2)


def _repeats(node: Node, was: Shape, made: Shape) -> bool:
    """Whether a node repeats matrices, the copies of each side by side."""
    same = len(was) == len(made) > 2 and (*was[:-3], *was[-2:]) == (*made[:-3], *made[-2:])
    return node.op == "Expand" and same and was[-3] == 1


# Rewriting -----------------------------------------------------------------------------------


def _terms(node: Node) -> tuple[str, str, str]:
    left, _, out = str(node.attrs["equation"]).partition("->")
    first, second = left.split(",")
    return first, second, out


def _rewrite(build: Builder, finder: _Finder, node: Node, found: _Found) -> bool:
    """Add the nodes that take the place of ``node``; False, and nothing is added, if they cannot."""
    asked, told = _asked(found.scores), _told(node, found.weights)
    if asked is None or told is None:
        return False
    before, known = len(build.nodes), set(build.values)
    operands = tuple(_in_order(build, *one) for one in (*asked, told.values))
    made = _attend(build, finder, found, operands)
    if made is None:
        del build.nodes[before:]
        for name in build.values.keys() - known:
            del build.values[name]
            build.constants.pop(name, None)
        return False
    lead = finder.shape(found.weights)[:-2]
    _finish(build, made, (*lead, *build.shape(made)[3:]), told, node.outputs[0])
    return True


Ordered = tuple[str, str, str]
"""A value, the letters of its axes, and these in the order [batch.., rows, columns]."""


def _asked(scores: Node) -> tuple[Ordered, Ordered] | None:
    """Return q and k of a product, if it is [batch.., queries, keys] of the two over one axis."""
    first, second, out = _terms(scores)
    batch, query, key = out[:-2], out[-2:-1], out[-1:]
    given = list(zip(scores.inputs, (first, second), strict=True))
    given = given if query in first else given[::-1]
    (q, asking), (k, asked) = given
    inner = "".join(letter for letter in asking if letter not in out)
    if len(inner) != 1 or {*asking} != {*batch, query, inner} or {*asked} != {*batch, key, inner}:
        return None
    return (q, asking, batch + query + inner), (k, asked, batch + key + inner)


@dataclass(frozen=True)
class _Told:
    """v, and the letters of the result: as matrices, and as it is wanted."""

    values: Ordered
    made: str
    wanted: str


def _told(node: Node, weights: str) -> _Told | None:
    """Return what the product with v is, if it is one over the keys, matrix by matrix."""
    first, second, out = _terms(node)
    place = node.inputs.index(weights)
    mine, term = (first, second) if place == 0 else (second, first)
    batch, query, key = mine[:-2], mine[-2:-1], mine[-1:]
    own = "".join(letter for letter in term if letter not in mine)
    if len(own) != 1 or {*term} != {*batch, key, own} or {*out} != {*batch, query, own}:
        return None
    return _Told((node.inputs[1 - place], term, batch + key + own), batch + query + own, out)


def _in_order(build: Builder, value: str, term: str, wanted: str) -> tuple[str, bool]:
    """Return a value with its axes as ``wanted``, and whether it is still to be turned to be so."""
    perm = tuple(term.index(letter) for letter in wanted)
    if perm == tuple(range(len(perm))):
        return value, False
    if _turns(perm):
        return value, True
    return build("Transpose", value, perm=perm), False


def _attend(
    build: Builder,
    finder: _Finder,
    found: _Found,
    operands: tuple[tuple[str, bool], ...],
) -> str | None:
    """Add the node; returns its result [batch, groups, heads, queries, size], None if a mask does not fit."""
    # Batch and heads may be one axis of the product, and two where the mask is added.
    lead = max((build.shape(operands[0][0])[:-2], *(mask.lead for mask in found.masks)), key=len)
    for past_repeats in (True, False):
        q, k, v = (
            finder.operand(value, past_repeats and place > 0) for place, (value, _) in enumerate(operands)
        )
        if k.repeats == v.repeats:
            break
    batch = lead[0] if lead else 1
    heads = prod(lead[1:])
    if heads % k.repeats:
        return None
    groups: Shape = (batch, heads // k.repeats, k.repeats)
    laid = []
    for operand, (_, turned), extents in zip(
        (q, k, v), operands, (groups, groups[:2], groups[:2]), strict=True
    ):
        value = operand.value
        shape = build.shape(value)
        if prod(shape[:-2]) != prod(extents):
            return None
        if operand.turned != turned:
            value = build("Transpose", value, perm=(*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
        shape = (*extents, *build.shape(value)[-2:])
        laid.append(value if build.shape(value) == shape else build("Reshape", value, shape=shape))
    if v.scale != 1:
        laid[2] = build("Mul", laid[2], build.like(v.scale, laid[2]))
    masks = _masks(build, finder, found, groups)
    if masks is None:
        return None
    values, band, unseen = masks
    attrs = {"scale": found.scale * q.scale * k.scale, "band": band, "unseen": unseen}
    sees = found.cleaned or not values  # a band lets every query see a key
    return build("Attend", *laid, *values, **attrs, blind=0.0 if sees else nan)


def _masks(
    build: Builder, finder: _Finder, found: _Found, groups: Shape
) -> tuple[list[str], Band, float] | None:
    """Return the mask of rank 5, if there is one, the band, and the number where a bool is false."""
    band: Band = (None, None)
    rest = []
    for mask in found.masks:
        known = band_of(mask, finder.graph.constants)
        if known is None or band != (None, None):
            rest.append(mask)
        else:
            band = known
    if sum(mask.unseen is not None for mask in rest) and len(rest) > 1:
        return None
    total: list[str] = []
    unseen = -inf
    for mask in rest:
        shape = by_group(build.shape(mask.value), mask.lead, groups)
        if shape is None:
            return None
        value = build("Reshape", mask.value, shape=shape)
        if mask.unseen is not None:
            unseen = mask.unseen
            value = build("Not", value) if mask.negated else value
        total = [build("Add", total[0], value)] if total else [value]
    return total, band, unseen


def _finish(build: Builder, made: str, shape: Shape, told: _Told, name: str) -> None:
    """Put the result in the shape and order of the product's, under its name."""
    perm = tuple(told.made.index(letter) for letter in told.wanted)
    if perm == tuple(range(len(perm))):
        build.node("Reshape", [made], {"shape": shape}, [name])
    else:
        build.node("Transpose", [build("Reshape", made, shape=shape)], {"perm": perm}, [name])
