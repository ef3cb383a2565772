"""Finds the stored axes that are cut together, and what such a cut means for each node.

Axes that share a letter anywhere belong to one *cut class*: all depths of a
U-Net, at every resolution, are one class. A plan cuts classes; how many pieces
is chosen layer by layer. In a node at most one letter of a class is cut: a kept
one if there is one (its output is then made piece by piece), else a reduced one
(its output is then a partial result). Of several outputs some may have the letter, others not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import Index, Inverse, Plain, Shifted, Whole, Window
from oocdl.graph.transforms.factorize import Cell, Factored, View


@dataclass(frozen=True, eq=False)
class Classes:
    """The cut class of every stored axis, and what a cut of it cuts in each node."""

    of_axes: Mapping[str, tuple[int, ...]]
    """Stored value -> the classes of its axes."""
    letters: Mapping[str, Mapping[int, str]]
    """Node name -> class -> the letter that a cut of the class cuts."""
    names: Mapping[int, str]
    """Class -> ``batch``, ``space0``.., or ``channels`` with a number."""
    extents: Mapping[int, int]
    """Class -> largest extent of its axes."""

    def cut_letter(self, cell: Cell, cut: int) -> str | None:
        """Return the letter of ``cell`` that a cut of class ``cut`` cuts; None if it cuts none."""
        return self.letters[cell.node.name].get(cut)

    def partial_outputs(self, cell: Cell, cuts: Iterable[int]) -> frozenset[str]:
        """Return the outputs of ``cell`` that are partial results if ``cuts`` are cut.

        They lack a letter that is cut, which other outputs may have.
        """
        if cell.combine is None:
            return frozenset()
        letters = self.letters[cell.node.name]
        cut = {letters[number] for number in cuts if number in letters}
        return frozenset(view.value for view in cell.outputs if cut - _letters(view)) if cut else frozenset()


def find_classes(factored: Factored) -> Classes:
    """Put all axes that share a letter into one class."""
    axes = [(name, axis) for name, shape in factored.shapes.items() for axis in range(len(shape))]
    parent = list(range(len(axes)))
    first: dict[str, int] = {}
    for place, (name, axis) in enumerate(axes):
        first.setdefault(name, place - axis)

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    anchors: list[dict[str, int]] = []
    """For each cell: letter -> the place of an axis that has it."""
    for cell in factored.cells:
        mine: dict[str, int] = {}
        for view in (*cell.outputs, *cell.inputs):
            for positions, indices in zip(view.positions, view.indices, strict=True):
                for position, index in zip(positions, indices, strict=False):
                    if index is None or isinstance(index, Whole):
                        continue
                    place = first[view.value] + position
                    anchor = mine.setdefault(index.letter, place)
                    if anchor != place:
                        parent[root(place)] = root(anchor)
        anchors.append(mine)
    numbers: dict[int, int] = {}
    of_place = [numbers.setdefault(root(place), len(numbers)) for place in range(len(axes))]
    extents: dict[int, int] = {}
    for (name, position), number in zip(axes, of_place, strict=True):
        extents[number] = max(extents.get(number, 0), factored.shapes[name][position])
    letters = {
        cell.node.name: _cut_letters(cell, {letter: of_place[place] for letter, place in mine.items()})
        for cell, mine in zip(factored.cells, anchors, strict=True)
    }
    of_axes = {
        name: tuple(of_place[first[name] : first[name] + len(shape)]) if shape else ()
        for name, shape in factored.shapes.items()
    }
    return Classes(of_axes, letters, _names(factored, of_axes), extents)


def _cut_letters(cell: Cell, of_letter: Mapping[str, int]) -> dict[int, str]:
    kept = (
        index.letter
        for view in cell.outputs
        for axis in view.indices
        for index in axis
        if isinstance(index, Plain)
    )
    cut: dict[int, str] = {}
    for letter in (*kept, *(cell.reduced if cell.combine else ())):
        if letter not in cell.uncut and cell.extents[letter] > 1:
            number = of_letter.get(letter)
            if number is not None:
                cut.setdefault(number, letter)
    return cut


def _names(factored: Factored, of_axes: Mapping[str, tuple[int, ...]]) -> dict[int, str]:
    """Name classes after the axes of the model's inputs; all other classes are channels."""
    names: dict[int, str] = {}
    inputs = factored.graph.of_role(Role.INPUT, Role.TARGET)
    for value in inputs:
        classes = of_axes[factored.stored(value.name)]
        position = 0
        for axis, parts in enumerate(factored.factors[value.name]):
            for number, _ in enumerate(parts):
                label = "batch" if axis == 0 else f"space{axis - 2}"
                if value.role is Role.INPUT and axis == 1 and len(value.shape) > 2:
                    label = "channels"
                elif len(value.shape) == 2 and axis == 1:
                    label = "space0" if value.dtype.startswith("int") else "channels"
                elif value.role is Role.TARGET and axis > 0:
                    label = ""
                if label and number == 0 and label != "channels":
                    names.setdefault(classes[position], label)
                position += 1
    count = 0
    for number in dict.fromkeys(chain.from_iterable(of_axes.values())):
        if number not in names:
            names[number] = f"channels{count}"
            count += 1
    return names


def _letters(view: View) -> set[str]:
    return {index.letter for axis in view.indices for index in axis if isinstance(index, Plain)}


def is_local(index: Index | None) -> bool:
    """Whether a shard reads, along a cut axis, only the piece that the same shard made, without a halo."""
    if isinstance(index, (Window, Inverse)):
        return index.kernel <= index.stride and index.pad == 0
    return (
        index is None
        or isinstance(index, (Plain, Whole))
        or (isinstance(index, Shifted) and index.offset == 0 and index.step == 1)
    )
