"""Dimensions as lists of factors, so that Reshape disappears and regions stay boxes.

A Reshape that splits an axis of 96 into 12 x 8 says that the axis *is* two
factors. That fact is propagated along the letters of all rules (as Shardy does),
every value is then stored by its factors, axes of extent one are not stored, and
the Reshape becomes another name of the same value. Where factors contradict each
other, or would split an axis that a window slides over, the Reshape stays as an
ordinary node whose split axes are never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

from oocdl.errors import GraphError
from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Graph, Node, Shape
from oocdl.graph.ir.index import AxisRule, Index, Plain, Shifted, Whole
from oocdl.graph.ir.op_rule import Rules

Axis = tuple[str, int]
"""A value and one of its axes."""
Factors = tuple[tuple[int, ...], ...]
"""For each axis its factors, outermost first; an axis of extent one has none."""


@dataclass(frozen=True)
class View:
    """A value as a node reads or makes it: the node's own axes over the stored factors."""

    value: str
    """The stored value (aliases resolved)."""
    shape: Shape
    """Extents of the node's own axes."""
    positions: tuple[tuple[int, ...], ...]
    """For each own axis the stored axes that it consists of; none for an extent of one."""
    indices: tuple[tuple[Index | None, ...], ...]
    """For each own axis an index for each of its stored axes, or one index if there are none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cell:
    """A node with its axis rule (see ``AxisRule``) written in letters of factors."""

    node: Node
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    extents: Mapping[str, int]
    uncut: frozenset[str]
    combine: str | None
    reduced: tuple[str, ...]
    """Letters of inputs that no output has, in order of appearance."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Factored:
    """A graph over stored factors, without the Reshapes that factors make superfluous."""

    graph: Graph
    cells: tuple[Cell, ...]
    shapes: Mapping[str, Shape]
    """Stored value -> extents of its factors."""
    factors: Mapping[str, Factors]
    """Any value -> the factors of its own axes."""
    alias: Mapping[str, str]
    """Value -> the value that is stored in its place."""
    orders: Mapping[str, Order] = field(default_factory=dict)
    """Stored value -> its axes from outermost to innermost in memory, where that is not C order."""

    def stored(self, name: str) -> str:
        """Return the name of the value that is stored in place of ``name``, or ``name`` where itself is."""
        return self.alias.get(name, name)


class _Splits:
    """The splits of each axis, as strides inside the axis, kept consistent along all links."""

    def __init__(self, graph: Graph, rules: Mapping[str, AxisRule]) -> None:
        self.extent: dict[Axis, int] = {
            (name, axis): extent
            for name, value in graph.values.items()
            for axis, extent in enumerate(value.shape)
        }
        self.splits: dict[Axis, set[int]] = {axis: set() for axis in self.extent}
        self.atomic: set[Axis] = set()
        self.links: dict[Axis, list[tuple[Axis, int | None]]] = {axis: [] for axis in self.extent}
        self.segments: dict[Axis, list[list[tuple[Axis, int]]]] = {axis: [] for axis in self.extent}
        for node in graph.nodes:
            if node.op != "Reshape":
                self.add_rule(node, rules[node.name])

    def add_rule(self, node: Node, rule: AxisRule) -> None:
        """Link axes that share a letter; an axis that a window slides over is never split."""
        fixed = set(rule.unsplit)
        letters: dict[str, list[tuple[Axis, int | None]]] = {}
        for names, operands in ((node.inputs, rule.inputs), (node.outputs, rule.outputs)):
            for name, axes in zip(names, operands, strict=True):
                for position, index in enumerate(axes):
                    axis = (name, position)
                    if isinstance(index, Plain):
                        letters.setdefault(index.letter, []).append((axis, None))
                    elif isinstance(index, Shifted) and index.step == 1:
                        letters.setdefault(index.letter, []).append((axis, index.offset))
                    elif index is not None and not isinstance(index, Whole):
                        fixed.add(index.letter)
                        self.atomic.add(axis)
        for letter, members in letters.items():
            if letter in fixed:
                self.atomic.update(axis for axis, _ in members)
            first, first_offset = members[0]
            for axis, offset in members[1:]:
                shift = (
                    None if offset is None and first_offset is None else (offset or 0) - (first_offset or 0)
                )
                self.links[first].append((axis, shift))
                self.links[axis].append((first, shift))

    def try_split(self, axis: Axis, inner: int, journal: list[tuple[Axis, int]]) -> bool:
        """Split ``axis`` at stride ``inner``, and linked axes likewise; False on a contradiction."""
        pending = [(axis, inner)]
        while pending:
            axis, inner = pending.pop()
            extent, known = self.extent[axis], self.splits[axis]
            if inner in known or inner == 1 or inner == extent:
                continue
            if axis in self.atomic or extent % inner or any(max(q, inner) % min(q, inner) for q in known):
                return False
            known.add(inner)
            journal.append((axis, inner))
            for other, shift in self.links[axis]:
                if shift is not None and (shift % inner or inner >= self.extent[other]):
                    return False
                pending.append((other, inner))
            for segment in self.segments[axis]:
                mine = next(stride for member, stride in segment if member == axis)
                for member, stride in segment:
                    place = inner * mine
                    if stride < place < stride * self.extent[member]:
                        if place % stride:
                            return False
                        pending.append((member, place // stride))
        return True

    def add_reshape(self, node: Node, before: Shape, after: Shape) -> bool:
        """Make a Reshape a renaming of factors; False, and nothing is changed, if that is impossible."""
        segments = _segments(node, before, after)
        if segments is None:
            return False
        journal: list[tuple[Axis, int]] = []
        for segment in segments:
            for axis, _ in segment:
                self.segments[axis].append(segment)
        good = True
        for segment in segments:
            places = {stride for _, stride in segment}
            places |= {stride * inner for axis, stride in segment for inner in self.splits[axis]}
            for axis, stride in segment:
                for place in sorted(places):
                    if good and stride < place < stride * self.extent[axis]:
                        good = place % stride == 0 and self.try_split(axis, place // stride, journal)
        if not good:
            for axis, inner in journal:
                self.splits[axis].discard(inner)
            for segment in segments:
                for axis, _ in segment:
                    self.segments[axis].remove(segment)
        return good

    def fix(self, name: str, factors: Factors) -> None:
        """Split the axes of a value into these factors, and never otherwise."""
        for number, parts in enumerate(factors):
            axis = (name, number)
            if not all(self.try_split(axis, prod(parts[place:]), []) for place in range(1, len(parts))):
                raise GraphError(
                    f"axis {number} of '{name}' cannot be split into {parts} in each pass of a step"
                )
            self.atomic.add(axis)

    def factors(self, axis: Axis) -> tuple[int, ...]:
        """Return the factors of an axis, outermost first."""
        extent = self.extent[axis]
        if extent == 1:
            return ()
        if not self.splits[axis]:
            return (extent,)
        strides = [extent, *sorted(self.splits[axis], reverse=True), 1]
        return tuple(a // b for a, b in zip(strides[:-1], strides[1:], strict=True))


def _segments(node: Node, before: Shape, after: Shape) -> list[list[tuple[Axis, int]]] | None:
    """Return the smallest groups of axes of equal product, each axis with its stride inside the group."""
    if 0 in before:
        return None
    sides = [
        [((name, axis), extent) for axis, extent in enumerate(shape)]
        for name, shape in ((node.inputs[0], before), (node.outputs[0], after))
    ]
    segments: list[list[tuple[Axis, int]]] = []
    while any(sides):
        segment: list[tuple[Axis, int]] = []
        stride = [1, 1]
        for side in (0, 1):
            if sides[side]:
                axis, extent = sides[side].pop()
                segment.append((axis, stride[side]))
                stride[side] *= extent
        while stride[0] != stride[1]:
            side = 0 if stride[0] < stride[1] else 1
            axis, extent = sides[side].pop()
            segment.append((axis, stride[side]))
            stride[side] *= extent
        segments.append(segment)
    return segments


def factorize(graph: Graph, rules: Rules, fixed: Mapping[str, Factors] = MappingProxyType({})) -> Factored:
    """Rewrite a canonical graph over factors. No node is added, and Reshapes are dropped where possible.

    ``fixed`` are the factors of values that another graph, which was rewritten before, has stored.
    """
    axis_rules: dict[str, AxisRule] = {}
    known: dict[tuple[object, ...], AxisRule] = {}
    for node in graph.nodes:
        rule = rules[node.op].axes
        assert rule is not None, node.op
        shapes_in = tuple([graph.values[name].shape for name in node.inputs])
        shapes_out = tuple([graph.values[name].shape for name in node.outputs])
        key = rule, shapes_in, shapes_out
        if node.attrs or key not in known:
            axis_rules[node.name] = rule(node, shapes_in, shapes_out)
            if not node.attrs:
                known[key] = axis_rules[node.name]
        else:
            axis_rules[node.name] = known[key]
    splits = _Splits(graph, axis_rules)
    for name in fixed.keys() & graph.values.keys():
        splits.fix(name, fixed[name])
    alias: dict[str, str] = {}
    stays: list[Node] = []
    for node in graph.nodes:
        if node.op == "Reshape":
            source, target = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
            if splits.add_reshape(node, source.shape, target.shape):
                alias[target.name] = alias.get(source.name, source.name)
                continue
            splits.add_rule(node, axis_rules[node.name])
        stays.append(node)
    factors = {
        name: tuple(splits.factors((name, axis)) for axis in range(len(value.shape)))
        for name, value in graph.values.items()
    }
    for node in stays:
        if node.op == "Reshape":
            axis_rules[node.name] = _without_contradictions(node, axis_rules[node.name], factors)
    shapes = {
        name: tuple(f for axis in factors[name] for f in axis) for name in graph.values if name not in alias
    }
    factored = Factored(graph=graph, cells=(), shapes=shapes, factors=factors, alias=alias)
    letters: dict[tuple[object, ...], _Letters] = {}
    cells = tuple([_cell(factored, node, axis_rules[node.name], letters) for node in stays])
    return replace(factored, cells=cells)


def _without_contradictions(node: Node, rule: AxisRule, factors: Mapping[str, Factors]) -> AxisRule:
    """Return the rule of a Reshape that stays, which reads an axis whole if its factors differ afterwards.

    What comes before may have split it for a Reshape that is dropped, and what comes after slide over it.
    """
    written, read = factors[node.outputs[0]], factors[node.inputs[0]]
    sizes = {
        index.letter: parts
        for index, parts in zip(rule.outputs[0], written, strict=True)
        if isinstance(index, Plain)
    }
    apart = {
        index.letter
        for index, parts in zip(rule.inputs[0], read, strict=True)
        if isinstance(index, Plain) and sizes[index.letter] != parts
    }
    operand = tuple(
        Whole(rule.extents[index.letter]) if isinstance(index, Plain) and index.letter in apart else index
        for index in rule.inputs[0]
    )
    return replace(rule, inputs=(operand,), uncut=rule.uncut | apart)


Axes = tuple[tuple[tuple[int, ...], ...], tuple[tuple[Index | None, ...], ...]]
"""``positions`` and ``indices`` of a view."""


class _Letters:
    """A rule with every letter replaced by the letters of its factors: all of a cell but its names."""

    def __init__(self, rule: AxisRule, inputs: Sequence[Factors], outputs: Sequence[Factors]) -> None:
        sizes: dict[str, tuple[int, ...]] = {letter: (extent,) for letter, extent in rule.extents.items()}
        for operands, given in ((rule.outputs, outputs), (rule.inputs, inputs)):
            for axes, factors in zip(operands, given, strict=True):
                for index, parts in zip(axes, factors, strict=True):
                    if isinstance(index, Plain) and parts:
                        sizes[index.letter] = parts
        self.inputs = [_axes(axes, parts, sizes) for axes, parts in zip(rule.inputs, inputs, strict=True)]
        self.outputs = [_axes(axes, parts, sizes) for axes, parts in zip(rule.outputs, outputs, strict=True)]
        self.extents = {part: size for letter in sizes for part, size in _parts(letter, sizes[letter])}
        self.uncut = frozenset(p for letter in rule.uncut for p, _ in _parts(letter, sizes.get(letter, (1,))))
        made, read = (
            [index for _, indices in side for axis in indices for index in axis]
            for side in (self.outputs, self.inputs)
        )
        kept = {index.letter for index in made if isinstance(index, Plain)}
        seen = (index.letter for index in read if index is not None and not isinstance(index, Whole))
        self.reduced = tuple(
            dict.fromkeys(letter for letter in seen if letter not in kept and self.extents[letter] > 1)
        )


def _axes(axes: Sequence[Index | None], factors: Factors, sizes: Mapping[str, tuple[int, ...]]) -> Axes:
    positions: list[tuple[int, ...]] = []
    count = 0
    for parts in factors:
        positions.append(tuple(range(count, count + len(parts))))
        count += len(parts)
    split = (_split_index(index, parts, sizes) for index, parts in zip(axes, factors, strict=True))
    return tuple(positions), tuple(split)


def _cell(factored: Factored, node: Node, rule: AxisRule, known: dict[tuple[object, ...], _Letters]) -> Cell:
    """Return a node as a cell; ``known``: letters of nodes that have the same rule, and the same factors."""
    values, factors = factored.graph.values, factored.factors
    inputs, outputs = ([factors[name] for name in names] for names in (node.inputs, node.outputs))
    key = id(rule), *inputs, *outputs
    if key not in known:
        known[key] = _Letters(rule, inputs, outputs)
    found = known[key]

    def views(names: Sequence[str], axes: Sequence[Axes]) -> tuple[View, ...]:
        several = zip(names, axes, strict=True)
        return tuple([View(factored.stored(name), values[name].shape, *each) for name, each in several])

    return Cell(
        node=node,
        inputs=views(node.inputs, found.inputs),
        outputs=views(node.outputs, found.outputs),
        extents=found.extents,
        uncut=found.uncut,
        combine=rule.combine,
        reduced=found.reduced,
    )


def _parts(letter: str, sizes: tuple[int, ...]) -> list[tuple[str, int]]:
    if len(sizes) <= 1:
        return [(letter, prod(sizes))]
    return [(f"{letter}.{number}", size) for number, size in enumerate(sizes)]


def _split_index(
    index: Index | None, parts: tuple[int, ...], sizes: Mapping[str, tuple[int, ...]]
) -> tuple[Index | None, ...]:
    """Split the index of one axis into an index for each factor."""
    if isinstance(index, Whole):
        return tuple(Whole(part) for part in parts) or (index,)
    if index is None or len(parts) <= 1:
        letter = None if index is None else index.letter
        if letter is None or len(sizes[letter]) <= 1:
            return (index,)
        # An axis of extent one against a letter of several factors is a broadcast of a Shifted axis.
        return (None,)
    names = [name for name, _ in _parts(index.letter, sizes[index.letter])]
    if isinstance(index, Shifted):
        inner = prod(parts[1:])
        return (Shifted(names[0], index.offset // inner), *(Plain(name) for name in names[1:]))
    return tuple(Plain(name) for name in names)
