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
from oocdl.graph.partition.storage_cut import Layer
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
    positions: tuple[int, ...]
    """The stored axes that it consists of."""
    indices: tuple[Index | None, ...]
    extents: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Operand:
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

    number: int
    """Equal for nodes that are equal but for names and attributes."""
    whole: Mapping[str, Range]
    """Letter -> its whole range."""
    outputs: tuple[tuple[str, tuple[str, ...]], ...]
    """Stored value of each result, and the letters of its stored axes."""
    inputs: tuple[_Operand, ...]
    dtypes: tuple[str, ...]
    """Types of the results."""
    has_crop: bool
    """Whether an operand's axis is the inverse of a window."""


class CellRegions(NamedTuple):
    """The regions of a node, for given ranges of its letters."""

    operands: tuple[OperandRegion, ...]
    results: tuple[Region, ...]
    """The region of each result, along the axes that it is stored with."""
    shapes: tuple[Shape, ...]
    """The extents of these regions."""
    kernel_shapes: tuple[Shape, ...]
    """The extents of the same regions along the node's own axes."""
    crop: tuple[int, ...] | None
    """See ``Instruction.attrs``; None where no operand's axis is the inverse of a window."""


class Operands:
    """Computes the regions of operands from the ranges of letters; shared by all layers of a graph."""

    def __init__(self, factored: Factored) -> None:
        self.factored = factored
        self._facts: dict[str, CellFacts] = {}
        self._operands: dict[tuple[int, Shape], _Operand] = {}
        """(id of a view's indices, which equal nodes share; shape of its stored value) -> operand."""
        self._whole: dict[int, Mapping[str, Range]] = {}
        """Id of the extents of a node's letters, which equal nodes share -> whole range of each letter."""
        self._numbers: dict[object, int] = {}
        self.plain: dict[tuple[Layer, int], bool] = {}
        """Layer and class -> whether its shards differ by a shift alone along the class (``tiling``)."""
        self._known: dict[tuple[object, ...], CellRegions] = {}
        self._needed: dict[tuple[object, ...], OperandRegion] = {}

    def facts(self, cell: Cell) -> CellFacts:
        """Return the facts that determine the regions of a node."""
        facts = self._facts.get(cell.node.name)
        if facts is None:
            facts = self._facts[cell.node.name] = self._find(cell)
        return facts

    def regions(self, cell: Cell, facts: CellFacts, ranges: Mapping[str, Range]) -> CellRegions:
        """Return the regions of a node; ``ranges``: letter -> range."""
        key = (facts.number, *ranges.values())
        regions = self._known.get(key)
        if regions is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
                self._needed.clear()
            regions = self._known[key] = self._regions(cell, facts, ranges)
        return regions

    def _regions(self, cell: Cell, facts: CellFacts, ranges: Mapping[str, Range]) -> CellRegions:
        results = tuple([tuple([ranges[letter] for letter in stored]) for _, stored in facts.outputs])
        shapes = tuple([tuple([stop - start for start, stop in region]) for region in results])
        return CellRegions(
            operands=tuple([self._region(operand, ranges) for operand in facts.inputs]),
            results=results,
            shapes=shapes,
            kernel_shapes=tuple(
                tuple([prod([shape[position] for position in positions]) for positions in view.positions])
                for view, shape in zip(cell.outputs, shapes, strict=True)
            ),
            crop=_crop(cell, ranges) if facts.has_crop else None,
        )

    def _region(self, operand: _Operand, ranges: Mapping[str, Range]) -> OperandRegion:
        key = (operand.number, *[ranges[letter] for letter in operand.letters])
        region = self._needed.get(key)
        if region is None:
            region = self._needed[key] = _region(operand, ranges)
        return region

    def _find(self, cell: Cell) -> CellFacts:
        values = self.factored.graph.values
        whole = self._whole.get(id(cell.extents))
        if whole is None:
            whole = {letter: (0, extent) for letter, extent in cell.extents.items()}
            self._whole[id(cell.extents)] = whole
        inputs = tuple([self._operand(view) for view in cell.inputs])
        stored = [(view.value, _stored_letters(view)) for view in cell.outputs]
        makes = [(letters, view.positions) for view, (_, letters) in zip(cell.outputs, stored, strict=True)]
        alike = *whole.items(), *makes, *[operand.number for operand in inputs]
        return CellFacts(
            number=self._numbers.setdefault(alike, len(self._numbers)),
            whole=whole,
            outputs=tuple(stored),
            inputs=inputs,
            dtypes=tuple([values[name].dtype for name in cell.node.outputs]),
            has_crop=any([operand.inverse for operand in inputs]),
        )

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


def _crop(cell: Cell, ranges: Mapping[str, Range]) -> tuple[int, ...]:
    """Return where the region starts in the uncropped result, for Inverse and Around axes."""
    crop = [0] * len(cell.outputs[0].shape)
    outputs = {
        index.letter: axis
        for axis, indices in enumerate(cell.outputs[0].indices)
        for index in indices
        if isinstance(index, Plain)
    }
    for index in (index for view in cell.inputs for indices in view.indices for index in indices):
        if isinstance(index, (Inverse, Around)) and index.letter in outputs:
            wanted = ranges[index.letter]
            first = Inverse(**vars(index)).needs(wanted)[0]
            crop[outputs[index.letter]] = wanted[0] + index.pad - index.stride * first
    return tuple(crop)


def _region(operand: _Operand, ranges: Mapping[str, Range]) -> OperandRegion:
    part: list[Range] = [(0, 0)] * operand.rank
    needed, pads, nothing = [], [], False
    for positions, indices, extents in operand.axes:
        inner, (low, high) = 1, _needs(indices[0], ranges, extents[0])
        start, stop = clip((low, high), extents[0])
        if positions:
            part[positions[0]] = start, stop
        for position, index, extent in zip(positions[1:], indices[1:], extents[1:], strict=True):
            first, last = part[position] = clip(_needs(index, ranges, extent), extent)
            inner *= last - first
        if start == stop:
            nothing = True
            start = stop = min(max(low, 0), extents[0])
        needed.append((start * inner, stop * inner))
        pads.append(((start - low) * inner, (high - stop) * inner))
    region = tuple(part)
    return OperandRegion(
        part=region,
        read=tuple(r if r[0] < r[1] else (0, 1) for r in region) if is_empty(region) else region,
        own=tuple(needed),
        shape=tuple([stop - start for start, stop in needed]),
        pads=tuple(pads) if any(pad != (0, 0) for pad in pads) else None,
        nothing=nothing,
    )


def _needs(index: Index | None, ranges: Mapping[str, Range], extent: int) -> Range:
    """Return the needed range of a stored axis, not clipped."""
    if index is None:
        return 0, extent
    return index.needs((0, 1) if isinstance(index, Whole) else ranges[index.letter])
