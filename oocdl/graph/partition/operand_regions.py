"""Computes the region of each operand that a shard needs, by interval arithmetic, one axis at a time.

Shards of a grid share most of their ranges (all axes that a slab does not cut are the same),
so the result for the ranges of an axis is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from oocdl.graph.ir.index import Index, Range, Whole, clip
from oocdl.graph.transforms.factorize import Cell, Factored


@dataclass(frozen=True)
class OwnAxis:
    """One of a node's own axes of an operand, for given ranges of the letters it follows."""

    positions: tuple[int, ...]
    """The stored axes that it consists of."""
    clipped: tuple[Range, ...]
    """For each stored axis the needed range, clipped to the value."""
    own: Range
    """The same as a range of the own axis; empty if only padding is needed."""
    pads: tuple[int, int]
    """How much padding is needed before and after it."""

    @property
    def nothing(self) -> bool:
        """Whether nothing inside the value is needed."""
        return self.clipped[0][0] == self.clipped[0][1]


@dataclass(frozen=True)
class _Layout:
    """The part of an own axis' description that does not depend on ranges."""

    positions: tuple[int, ...]
    indices: tuple[Index | None, ...]
    extents: tuple[int, ...]
    letters: tuple[str, ...]


class Operands:
    """Computes the axes of operands from the ranges of letters, each once."""

    def __init__(self, factored: Factored) -> None:
        self._factored = factored
        self._layouts: dict[tuple[str, int], tuple[_Layout, ...]] = {}
        self._known: dict[object, OwnAxis] = {}

    def axes(self, cell: Cell, number: int, ranges: Mapping[str, Range]) -> list[OwnAxis]:
        """Return the own axes of input ``number`` of a cell; ``ranges``: letter -> range."""
        where = (cell.node.name, number)
        layouts = self._layouts.get(where)
        if layouts is None:
            layouts = self._layouts[where] = self._laid_out(cell, number)
        found = []
        for place, layout in enumerate(layouts):
            key = (where, place, *map(ranges.__getitem__, layout.letters))
            axis = self._known.get(key)
            if axis is None:
                axis = self._known[key] = _own_axis(layout, ranges)
            found.append(axis)
        return found

    def _laid_out(self, cell: Cell, number: int) -> tuple[_Layout, ...]:
        view = cell.inputs[number]
        shape = self._factored.shapes[view.value]
        found = []
        for positions, indices, own in zip(view.positions, view.indices, view.shape, strict=True):
            extents = tuple(shape[position] for position in positions) or (own,)
            letters = tuple(i.letter for i in indices if i is not None and not isinstance(i, Whole))
            found.append(_Layout(positions, indices, extents, letters))
        return tuple(found)


def _own_axis(layout: _Layout, ranges: Mapping[str, Range]) -> OwnAxis:
    wants = [
        _needs(index, ranges, extent) for index, extent in zip(layout.indices, layout.extents, strict=True)
    ]
    clipped = tuple(clip(want, extent) for want, extent in zip(wants, layout.extents, strict=True))
    inner = prod(stop - start for start, stop in clipped[1:])
    (start, stop), (low, high) = clipped[0], wants[0]
    if start == stop:
        start = stop = min(max(low, 0), layout.extents[0])
    return OwnAxis(
        layout.positions,
        clipped,
        (start * inner, stop * inner),
        ((start - low) * inner, (high - stop) * inner),
    )


def _needs(index: Index | None, ranges: Mapping[str, Range], extent: int) -> Range:
    """Return the needed range of a stored axis, not clipped."""
    if index is None:
        return 0, extent
    return index.needs((0, 1) if isinstance(index, Whole) else ranges[index.letter])
