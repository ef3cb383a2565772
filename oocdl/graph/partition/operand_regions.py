"""Computes the region of each operand that a shard needs, by interval arithmetic, one axis at a time.

Shards of a grid share most of their ranges (all axes that a slab does not cut are the same), and so do
nodes that repeat: what follows from equal ranges of equal axes is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.index import Around, Index, Inverse, Plain, Range, Region, Whole, clip, is_empty
from oocdl.graph.transforms.factorize import Cell, Factored, View

MOST_KNOWN = 1 << 14
"""Known regions (some hundred bytes each) at which all are forgotten: a layer may have thousands."""


class OperandRegion(NamedTuple):
    """The region of an operand that a shard needs, for given ranges of the letters that it follows."""

    part: Region
    """The needed ranges of the stored axes, clipped to the value."""
    read: Region
    """The same; where only padding is wanted one element, so that there is an array to pad."""
    own: Region
    """``part`` as ranges of the node's own axes; empty if only padding is needed."""
    shape: Shape
    """Extents of ``own``."""
    pads: tuple[tuple[int, int], ...] | None
    """Padding needed before and after each own axis; None: none."""
    nothing: bool
    """Whether nothing inside the value is needed."""


class _Axis(NamedTuple):
    """One of a node's own axes of an operand."""

    positions: tuple[int, ...]
    """The stored axes that it consists of."""
    indices: tuple[Index | None, ...]
    extents: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Operand:
    """An operand, as far as it does not depend on ranges."""

    number: int
    """Equal for equal operands."""
    axes: tuple[_Axis, ...]
    letters: tuple[str, ...]
    """Letters that it follows, each once."""
    rank: int
    """Rank of the stored value."""
    inverse: bool
    """Whether one of its axes is the inverse of a window."""


class CellFacts(NamedTuple):
    """Facts that determine the regions of a node, beside ranges."""

    whole: Mapping[str, Range]
    """Letter -> its whole range."""
    outputs: tuple[tuple[str, tuple[str, ...]], ...]
    """Stored value of each result, and the letters of its stored axes."""
    inputs: tuple[_Operand, ...]
    dtypes: tuple[str, ...]
    """Types of the results."""
    has_crop: bool
    """Whether an operand's axis is the inverse of a window."""


class Operands:
    """Computes the regions of operands from the ranges of letters; shared by all layers of a graph."""

    def __init__(self, factored: Factored) -> None:
        self.factored = factored
        self._facts: dict[str, CellFacts] = {}
        self._operands: dict[tuple[int, Shape], _Operand] = {}
        """(id of a view's indices, which equal nodes share; shape of its stored value) -> operand."""
        self._stored: dict[int, tuple[str, ...]] = {}
        """Id of a view's indices -> letters of the stored axes."""
        self._whole: dict[int, Mapping[str, Range]] = {}
        """Id of the extents of a node's letters, which equal nodes share -> whole range of each letter."""
        self._numbers: dict[tuple[_Axis, ...], int] = {}
        self._known: dict[tuple[object, ...], OperandRegion] = {}

    def facts(self, cell: Cell) -> CellFacts:
        """Return the facts that determine the regions of a node."""
        facts = self._facts.get(cell.node.name)
        if facts is None:
            facts = self._facts[cell.node.name] = self._find(cell)
        return facts

    def region(self, operand: _Operand, ranges: Mapping[str, Range]) -> OperandRegion:
        """Return the region of an operand that is needed; ``ranges``: letter -> range."""
        key = (operand.number, *[ranges[letter] for letter in operand.letters])
        needed = self._known.get(key)
        if needed is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            needed = self._known[key] = _region(operand, ranges)
        return needed

    def _find(self, cell: Cell) -> CellFacts:
        values = self.factored.graph.values
        whole = self._whole.get(id(cell.extents))
        if whole is None:
            whole = {letter: (0, extent) for letter, extent in cell.extents.items()}
            self._whole[id(cell.extents)] = whole
        inputs = tuple([self._operand(view) for view in cell.inputs])
        return CellFacts(
            whole=whole,
            outputs=tuple([(view.value, self._letters(view)) for view in cell.outputs]),
            inputs=inputs,
            dtypes=tuple([values[name].dtype for name in cell.node.outputs]),
            has_crop=any([operand.inverse for operand in inputs]),
        )

    def _letters(self, view: View) -> tuple[str, ...]:
        key = id(view.indices)
        if key not in self._stored:
            self._stored[key] = _stored_letters(view)
        return self._stored[key]

    def _operand(self, view: View) -> _Operand:
        shape = self.factored.shapes[view.value]
        key = id(view.indices), shape
        if key not in self._operands:
            self._operands[key] = self._new_operand(view, shape)
        return self._operands[key]

    def _new_operand(self, view: View, shape: Shape) -> _Operand:
        axes = tuple(
            _Axis(positions, indices, tuple(shape[position] for position in positions) or (extent,))
            for positions, indices, extent in zip(view.positions, view.indices, view.shape, strict=True)
        )
        letters = dict.fromkeys(
            index.letter
            for axis in axes
            for index in axis.indices
            if index is not None and not isinstance(index, Whole)
        )
        number = self._numbers.setdefault(axes, len(self._numbers))
        inverse = any(isinstance(index, (Inverse, Around)) for axis in axes for index in axis.indices)
        return _Operand(number, axes, tuple(letters), len(shape), inverse)


def _stored_letters(view: View) -> tuple[str, ...]:
    letters = []
    for positions, indices in zip(view.positions, view.indices, strict=True):
        for _, index in zip(positions, indices, strict=False):
            assert isinstance(index, Plain)
            letters.append(index.letter)
    return tuple(letters)


def _region(operand: _Operand, ranges: Mapping[str, Range]) -> OperandRegion:
    part: list[Range] = [(0, 0)] * operand.rank
    needed, pads, nothing = [], [], False
    for axis in operand.axes:
        wants = [_needs(index, ranges, n) for index, n in zip(axis.indices, axis.extents, strict=True)]
        clipped = [clip(want, extent) for want, extent in zip(wants, axis.extents, strict=True)]
        for position, inside in zip(axis.positions, clipped, strict=False):
            part[position] = inside
        inner = prod(stop - start for start, stop in clipped[1:])
        (start, stop), (low, high) = clipped[0], wants[0]
        if start == stop:
            nothing = True
            start = stop = min(max(low, 0), axis.extents[0])
        needed.append((start * inner, stop * inner))
        pads.append(((start - low) * inner, (high - stop) * inner))
    region = tuple(part)
    return OperandRegion(
        part=region,
        read=tuple(r if r[0] < r[1] else (0, 1) for r in region) if is_empty(region) else region,
        own=tuple(needed),
        shape=tuple(stop - start for start, stop in needed),
        pads=tuple(pads) if any(pad != (0, 0) for pad in pads) else None,
        nothing=nothing,
    )


def _needs(index: Index | None, ranges: Mapping[str, Range], extent: int) -> Range:
    """Return the needed range of a stored axis, not clipped."""
    if index is None:
        return 0, extent
    return index.needs((0, 1) if isinstance(index, Whole) else ranges[index.letter])
