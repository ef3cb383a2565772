"""Makes attention that is written out one node, which stores no scores.

    q k^T -> [scales, masks] -> Softmax over keys -> [0 where that is not a number] -> [Dropout] -> times v

Scales are numbers anywhere before the Softmax, on q, k or the scores, or a value for each query or head;
masks are added, or put a number where they are false. Heads of keys that are repeated for several heads of
queries are read once. Where anything else reads the scores or their Softmax, or stands between, all stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf, nan, prod

from oocdl.graph.ir.graph import Graph, Node, Shape
from oocdl.graph.ir.op_rule import Builder, Rules
from oocdl.graph.ir.score_tiles import MOST_MASKS, Band
from oocdl.ops.einsum import parse
from oocdl.ops.sequences.finder import Finder, Found, Mask, band_of, grouping, hides_for_good, spread, turns


def with_attention(graph: Graph, rules: Rules, kept: Collection[str] = ()) -> Graph:
    """Return the graph with one node for each attention that is written out; values ``kept`` stay."""
    finder = Finder(graph, {*kept, *graph.outputs, *graph.updates.values()})
    build = Builder(rules, graph)
    build.nodes = []
    for node in graph.nodes:
        found = finder.find(node) if node.op == "Einsum" else None
        build.role = graph.values[node.outputs[0]].role
        build.scope = f"{node.name.rpartition('/')[0] or node.name}/"
        if found is None or not _rewrite(build, finder, node, found):
            build.nodes.append(node)
    return build.graph()


# Rewriting -----------------------------------------------------------------------------------


def _rewrite(build: Builder, finder: Finder, node: Node, found: Found) -> bool:
    """Add the nodes that take the place of ``node``; False, and nothing is added, if they cannot."""
    asked, told = _asked(found.scores), _told(node, found.weights)
    if asked is None or told is None:
        return False
    v, letters, wanted = told
    if _is_of_channels(finder, found, asked[0], v):
        return False
    before, known = len(build.nodes), set(build.values)
    operands = tuple(_in_order(build, *one) for one in (*asked, v))
    made = _attend(build, finder, found, operands)
    if made is None:
        del build.nodes[before:]
        for name in build.values.keys() - known:
            del build.values[name]
            build.constants.pop(name, None)
        return False
    shape = (*finder.shape(found.weights)[:-2], *build.shape(made)[3:])
    perm = tuple(letters.index(letter) for letter in wanted)
    if perm == tuple(range(len(perm))):
        build.node("Reshape", [made], {"shape": shape}, node.outputs)
    else:
        build.node("Transpose", [build("Reshape", made, shape=shape)], {"perm": perm}, node.outputs)
    return True


LARGEST_SIZE = 256
"""The largest size of a head that is usual."""
Ordered = tuple[str, str, str]
"""A value, the letters of its axes, and these in the order [batch.., rows, columns]."""


def _asked(scores: Node) -> tuple[Ordered, Ordered] | None:
    """Return q and k of a product, if it is [batch.., queries, keys] of the two over one axis."""
    first, second, out = parse(scores)
    batch, query, key = out[:-2], out[-2:-1], out[-1:]
    given = list(zip(scores.inputs, (first, second), strict=True))
    given = given if query in first else given[::-1]
    (q, asking), (k, asked) = given
    inner = "".join(letter for letter in asking if letter not in out)
    if len(inner) != 1 or {*asking} != {*batch, query, inner} or {*asked} != {*batch, key, inner}:
        return None
    return (q, asking, batch + query + inner), (k, asked, batch + key + inner)


def _told(node: Node, weights: str) -> tuple[Ordered, str, str] | None:
    """Return v and the letters of the result, as matrices and as wanted, of a product over the keys."""
    first, second, out = parse(node)
    place = node.inputs.index(weights)
    mine, term = (first, second) if place == 0 else (second, first)
    batch, query, key = mine[:-2], mine[-2:-1], mine[-1:]
    own = "".join(letter for letter in term if letter not in mine)
    if len(own) != 1 or {*term} != {*batch, key, own} or {*out} != {*batch, query, own}:
        return None
    return (node.inputs[1 - place], term, batch + key + own), batch + query + own, out


def _is_of_channels(finder: Finder, found: Found, q: Ordered, v: Ordered) -> bool:
    """Whether sizes are longer than there are keys, as where channels attend to each other.

    Their scores are few, and what is long may be space: it is cut in products, and never in attention.
    """
    extents = [finder.shape(value)[term.index(order[-1])] for value, term, order in (q, v)]
    return max(extents) > max(LARGEST_SIZE, finder.shape(found.weights)[-1])


def _in_order(build: Builder, value: str, term: str, wanted: str) -> tuple[str, bool]:
    """Return a value with its axes as ``wanted``, and whether it is still to be turned to be so."""
    perm = tuple(term.index(letter) for letter in wanted)
    if perm == tuple(range(len(perm))):
        return value, False
    if turns(perm):
        return value, True
    return build("Transpose", value, perm=perm), False


def _attend(
    build: Builder, finder: Finder, found: Found, operands: tuple[tuple[str, bool], ...]
) -> str | None:
    """Add the node; returns its result [batch, groups, heads, queries, size], None if a mask does not fit."""
    for past_repeats in (True, False):
        q, k, v = (
            finder.operand(value, past_repeats and place > 0) for place, (value, _) in enumerate(operands)
        )
        if k.repeats == v.repeats:
            break
    band, masks = _split(finder, found)
    # Batch and heads may be one axis of the product, and more where masks are added.
    leads = [finder.shape(found.scores.outputs[0])[:-2], *(mask.lead for mask in masks)]
    leads += [scale.lead for scale in found.row_scales]
    groups = grouping(leads, [(build.shape(mask.value), mask.lead) for mask in masks], k.repeats)
    if groups is None or not _is_in_order(masks):
        return None
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
    for scale in found.row_scales:
        by = _spread(build, scale.value, scale.lead, groups)
        if by is None:
            return None
        laid[0] = build(scale.op, laid[0], by)
    values = _masks(build, masks, groups)
    if values is None or len(values) >= MOST_MASKS:
        return None
    unseen = next((mask.unseen for mask in masks if mask.unseen is not None), -inf)
    sees = found.end.cleaned or not values  # a band lets every query see a key
    attrs = {"scale": found.scale * q.scale * k.scale, "band": band, "unseen": unseen}
    attrs["blind"] = 0.0 if sees else nan
    if found.end.uniform is not None:
        shape = (*groups, *finder.shape(found.weights)[-2:])
        values.append(build("Reshape", found.end.uniform, shape=shape))
        attrs["ratio"] = found.end.ratio
    return build("Attend", *laid, *values, **attrs)


def _split(finder: Finder, found: Found) -> tuple[Band, list[Mask]]:
    """Return the band that one of the masks is, and the other masks.

    A band hides what nothing brings back. So no mask that may be a number where it is false comes later, and
    where the band is of numbers that are not infinite no other mask may hide all that it lets be seen.
    """
    for place, mask in enumerate(found.masks):
        rest = [*found.masks[:place], *found.masks[place + 1 :]]
        band = band_of(mask, finder.graph.constants)
        later = [one for one in found.masks[:place] if one.unseen not in (None, -inf)]
        if band is not None and not later and (not rest or hides_for_good(mask, finder.graph.constants)):
            return band, rest
    return (None, None), list(found.masks)


def _is_in_order(masks: Sequence[Mask]) -> bool:
    """Whether it is the same if numbers are added first, and bools applied then, by one number for all."""
    numbers = {mask.unseen for mask in masks if mask.unseen is not None}
    added = [place for place, mask in enumerate(masks) if mask.unseen is None]
    bools = [place for place, mask in enumerate(masks) if mask.unseen is not None]
    return not numbers or numbers == {-inf} or len(numbers) == 1 and (not added or max(bools) < min(added))


def _spread(build: Builder, value: str, lead: Shape, groups: Shape) -> str | None:
    """Lay out by ``groups`` what broadcasts to scores [*lead, queries, keys]; None if it cannot be."""
    found = spread(build.shape(value), lead, groups)
    if found is None:
        return None
    parts, whole, made = found
    value = build("Reshape", value, shape=parts)
    if whole != parts:
        value = build("Expand", value, shape=whole)
    return value if made == whole else build("Reshape", value, shape=made)


def _masks(build: Builder, masks: Sequence[Mask], groups: Shape) -> list[str] | None:
    """Return masks of rank 5: sums of those that may be trained or not, by their shapes, and one bool."""
    added, seen = dict[tuple[bool, Shape], str](), list[str]()
    for mask in masks:
        value = _spread(build, mask.value, mask.lead, groups)
        if value is None:
            return None
        key = build.may_be_trained(value), build.shape(value)
        if mask.unseen is not None:
            value = build("Not", value) if mask.negated else value
            seen = [build("And", seen[0], value)] if seen else [value]
        else:
            added[key] = build("Add", added[key], value) if key in added else value
    return [*added.values(), *seen]
