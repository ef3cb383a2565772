"""Finds layers that are equal but for the names of their nodes and values.

Blocks of a network repeat, and so do their layers. Units of equal layers have equal programs and regions, so
what they are, and what they take, is found once for all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oocdl.graph.ir.graph import Attrs
from oocdl.graph.ir.index import Region
from oocdl.graph.partition.cut_classes import Classes
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.unit import Shard, Unit
from oocdl.graph.transforms.factorize import Cell, Factored


@dataclass(frozen=True, eq=False)
class LayerKind:
    """A layer without names, and its names."""

    number: int
    """Equal for equal layers."""
    names: tuple[str, ...]
    """Names of its values; corresponding values of equal layers stand at equal places."""


Cut = tuple[int, tuple[tuple[int, int], ...]]
"""The number of a layer's kind; for each class in several pieces, what it cuts as a number, and how many.
Units of equal cuts are equal but for names."""


class LayerKinds:
    """Numbers the kinds of the layers of one graph."""

    def __init__(self, factored: Factored, classes: Classes) -> None:
        self.factored, self.classes = factored, classes
        self._cells: dict[str, int] = {}
        """Node -> what it computes, as a number."""
        self._axes: dict[tuple[int, ...], int] = {}
        self._numbers: dict[object, int] = {}
        self._kinds: dict[Layer, LayerKind] = {}
        self._cut_letters: dict[tuple[Layer, int], int] = {}

    def cut_of(self, layer: Layer, grid: Mapping[int, int]) -> Cut:
        """All that the units of a layer depend on but names; ``grid``: class -> number of pieces."""
        cuts = ((self._letters(layer, cut), count) for cut, count in grid.items() if count > 1)
        return self.kind_of(layer).number, tuple(cuts)

    def _letters(self, layer: Layer, cut: int) -> int:
        if (layer, cut) not in self._cut_letters:
            letters = tuple(self.classes.cut_letter(cell, cut) for cell in layer.cells)
            self._cut_letters[layer, cut] = self._number(letters)
        return self._cut_letters[layer, cut]

    def kind_of(self, layer: Layer) -> LayerKind:
        """The kind of a layer, whatever cuts it."""
        if layer not in self._kinds:
            self._kinds[layer] = self._find(layer)
        return self._kinds[layer]

    def _find(self, layer: Layer) -> LayerKind:
        places: dict[str, int] = {}

        def places_of(names: Sequence[str]) -> tuple[int, ...]:
            return tuple(places.setdefault(name, len(places)) for name in names)

        cells = tuple(
            (self._number_of(cell), places_of([view.value for view in (*cell.inputs, *cell.outputs)]))
            for cell in layer.cells
        )
        ends = tuple(places_of(names) for names in (layer.reads, layer.stores, layer.partials))
        shapes, orders, values = self.factored.shapes, self.factored.orders, self.factored.graph.values
        facts = tuple((shapes[name], values[name].dtype, orders.get(name)) for name in places)
        return LayerKind(self._number((cells, ends, facts)), tuple(places))

    def _number_of(self, cell: Cell) -> int:
        if cell.node.name not in self._cells:
            self._cells[cell.node.name] = self._number(self._facts(cell))
        return self._cells[cell.node.name]

    def _facts(self, cell: Cell) -> object:
        """All of a node but names: which values it reads and makes is said by the layer."""
        views = (*cell.inputs, *cell.outputs)
        key = id(cell.extents), *(id(view.indices) for view in views)  # nodes alike share them
        if key not in self._axes:
            axes = tuple((view.shape, view.positions, view.indices) for view in views)
            self._axes[key] = self._number((axes, tuple(cell.extents.items()), cell.uncut))
        return cell.node.op, _attrs(cell.node.attrs), len(cell.inputs), self._axes[key], cell.combine

    def _number(self, facts: object) -> int:
        return self._numbers.setdefault(facts, len(self._numbers))


def _attrs(attrs: Attrs) -> object:
    return tuple(
        (name, attr.dtype.str, attr.shape, attr.tobytes())
        if isinstance(attr, np.ndarray)
        else (name, repr(attr))
        for name, attr in sorted(attrs.items())
    )


def renamed(
    units: Sequence[Unit], layer: int, shards: Sequence[Shard], before: LayerKind, after: LayerKind
) -> list[Unit]:
    """The units of a layer of kind ``before`` as those of an equally cut one of kind ``after``.

    ``layer`` and ``shards`` are its number and what its shards are called, in order.
    """
    names = dict(zip(before.names, after.names, strict=True))
    known: dict[int, tuple[str, Region]] = {}  # by identity: units have in common what they read alike

    def named(regions: Sequence[tuple[str, Region]]) -> tuple[tuple[str, Region], ...]:
        pairs = []
        for pair in regions:
            if id(pair) not in known:
                known[id(pair)] = names[pair[0]], pair[1]
            pairs.append(known[id(pair)])
        return tuple(pairs)

    return [
        Unit(layer, shard, named(unit.reads), unit.program, named(unit.makes), unit.counts)
        for unit, shard in zip(units, shards, strict=True)
    ]
