"""Cuts a layer by a grid into units, each with exact regions and a program.

A shard owns a piece of every value its layer stores, and of every letter that is
reduced. Regions flow backwards through the layer's cells by interval arithmetic;
where several consumers want different regions of one value, their hull is
computed and each reads its part. A region is clipped to its value; the rest is
padding at the node that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise, product, zip_longest
from math import prod

from oocdl.graph.ir.graph import Attrs
from oocdl.graph.ir.index import Plain, Range, Region, Whole, hull, is_empty, pieces, region_shape, within
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program import Instruction, Operand, Program, make_program
from oocdl.graph.partition.cut_classes import Classes, find_classes
from oocdl.graph.partition.operand_regions import CellFacts, CellRegions, OperandRegion, Operands
from oocdl.graph.partition.shard_grid import ShardGrid, find_shard_grid
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.unit import Shard, Unit
from oocdl.graph.transforms.factorize import Cell, Factored, View

_Step = tuple[Cell, CellFacts, Mapping[str, Range], CellRegions]
"""A node that a shard computes, with the ranges of its letters."""
Grid = Mapping[int, int]
"""Cut class -> number of pieces."""
Regions = tuple[tuple[str, Region], ...]
OwnedLetter = tuple[str, int, tuple[Range, ...]]
"""A letter that is cut, the place of its class in the grid, and the range of each piece."""


@lru_cache(maxsize=1 << 12)
def boundaries(extent: int, base: int, count: int) -> tuple[Range, ...]:
    """Cut an axis into pieces, aligned with those of the coarsest axis (of extent ``base``) of its class.

    >>> boundaries(7, 3, 3)
    ((0, 2), (2, 4), (4, 7))
    """
    coarse = pieces(base, count)
    ratio = round(extent / base)
    marks = [start * ratio for start, _ in coarse] + [extent]
    if any(a >= b for a, b in pairwise(marks)):
        marks = [extent * number // len(coarse) for number in range(len(coarse) + 1)]
    return tuple(pairwise(marks))


class LayerCutter:
    """Cuts one layer by one grid; ``operands`` are those of the graph."""

    def __init__(
        self, operands: Operands, classes: Classes, rules: Rules, layer: Layer, grid: Grid, threads: int = 1
    ) -> None:
        """``threads``: number of threads that run each unit together."""
        self.operands, self.factored, self.threads = operands, operands.factored, threads
        self.classes, self.rules, self.layer = classes, rules, layer
        self.made, self.partials, self.sinks = layer.makes, frozenset(layer.partials), layer.sinks
        self.known: dict[Shard, Unit] = {}
        """Units that are derived already, here or for an equal layer."""
        self.base = {cut: self._coarsest(cut) for cut in sorted(layer.touched)}
        self.grid = {cut: len(pieces(base, min(grid.get(cut, 1), base))) for cut, base in self.base.items()}

    def _coarsest(self, cut: int) -> int:
        letters = ((cell, self.classes.cut_letter(cell, cut)) for cell in self.sinks)
        return min(cell.extents[letter] for cell, letter in letters if letter is not None)

    @property
    def count(self) -> int:
        """The number of shards."""
        return prod(self.grid.values())

    def shards(self) -> list[Shard]:
        """Return all shards, the last cut class varying fastest."""
        return list(product(*(range(count) for count in self.grid.values())))

    @cached_property
    def _owned(self) -> dict[str, list[OwnedLetter]]:
        """Node that makes what is stored -> its letters that are cut."""
        cuts: dict[str, list[OwnedLetter]] = {}
        for cell in self.sinks:
            owned = cuts[cell.node.name] = []
            for place, (cut, count) in enumerate(self.grid.items()):
                letter = self.classes.cut_letter(cell, cut)
                if letter is not None and count > 1:
                    owned.append((letter, place, boundaries(cell.extents[letter], self.base[cut], count)))
        return cuts

    def unit(self, shard: Shard) -> Unit:
        """Return the regions and the program of one shard."""
        if shard not in self.known:
            first = tuple([first[piece] for first, piece in zip(self._firsts, shard, strict=True)])
            self.known[shard] = self._unit(shard) if first == shard else self._moved(self.unit(first), shard)
        return self.known[shard]

    @cached_property
    def _firsts(self) -> list[Sequence[int]]:
        """For each class and piece, the first piece from which it differs by a shift alone."""
        firsts: list[Sequence[int]] = []
        owned = [marks for cell in self._owned.values() for marks in cell]
        for place, (cut, count) in enumerate(self.grid.items()):
            known: dict[object, int] = {}
            if count > 1 and self._is_plain(cut):
                sizes = zip(*([b - a for a, b in m] for _, at, m in owned if at == place), strict=True)
                firsts.append([known.setdefault(size, piece) for piece, size in enumerate(sizes)])
            else:
                firsts.append(range(count))
        return firsts

    def _is_plain(self, cut: int) -> bool:
        """Whether all nodes read and make, along all axes of a class, exactly a shard's piece."""
        known, key = self.operands.plain, (self.layer, cut)
        if key not in known:
            known[key] = all(self._keeps_piece(cell, cut) for cell in self.layer.cells)
        return known[key]

    def _keeps_piece(self, cell: Cell, cut: int) -> bool:
        """Whether a node does: the letter that is cut runs along whole axes of the class, and no others."""
        letter, shapes = self.classes.cut_letter(cell, cut), self.factored.shapes
        for view in (*cell.inputs, *cell.outputs):
            of_axes = self.classes.of_axes[view.value]
            for positions, indices in zip(view.positions, view.indices, strict=True):
                for position, index in zip_longest(positions, indices):
                    follows = index is not None and not isinstance(index, Whole) and index.letter == letter
                    if position is None or of_axes[position] != cut:
                        if follows:
                            return False
                    elif not (follows and isinstance(index, Plain)):
                        return False
                    elif cell.extents[index.letter] != shapes[view.value][position]:
                        return False  # what is beyond is padding
        return self.rules[cell.node.op].localize is None

    def _moved(self, unit: Unit, shard: Shard) -> Unit:
        """The unit of a shard that differs from another by a shift along some classes alone."""
        steps = zip(self.grid.items(), unit.shard, shard, strict=True)
        by = {cut: (count, piece) for (cut, count), before, piece in steps if before != piece}

        def moved(pair: tuple[str, Region]) -> tuple[str, Region]:
            name, ranges = pair[0], list(pair[1])
            for axis, cut in enumerate(self.classes.of_axes[name]):
                if cut in by:
                    count, piece = by[cut]
                    ranges[axis] = boundaries(self.factored.shapes[name][axis], self.base[cut], count)[piece]
            return name, tuple(ranges)

        reads, makes = tuple(map(moved, unit.reads)), tuple(map(moved, unit.makes))
        return Unit(unit.layer, shard, reads, unit.program, makes, unit.counts)

    def units(self) -> list[Unit]:
        """Return the units of all shards, the last cut class varying fastest."""
        if self._shard_grid is not None:
            return self._shard_grid.units()
        return [self.unit(shard) for shard in self.shards()]

    def distinct_units(self) -> list[Unit]:
        """Return units among which is every program of the layer."""
        return self.units() if self._shard_grid is None else list(self._shard_grid.kinds.values())

    @cached_property
    def _shard_grid(self) -> ShardGrid | None:
        distinct = tuple(len(set(first)) for first in self._firsts)
        return find_shard_grid(tuple(self.grid.values()), distinct, self.unit, self._is_even)

    def _is_even(self, place: int, low: int, high: int) -> bool:
        """Whether from piece ``low`` to ``high`` of a class each is as far from the one before."""
        if any(self.rules[cell.node.op].localize is not None for cell in self.layer.cells):
            return False  # attributes follow from where the piece is, in floating point
        cut, count = list(self.grid.items())[place]
        for cell in self.sinks:
            letter = self.classes.cut_letter(cell, cut)
            if letter is not None:
                marks = boundaries(cell.extents[letter], self.base[cut], count)[low : high + 1]
                if len({(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)}) > 1:
                    return False
        return True

    def _unit(self, shard: Shard) -> Unit:
        wanted: dict[str, Region] = {}
        makes: dict[str, Region] = {}
        steps: list[_Step] = []
        counts: dict[str, int] = {}
        for cell in reversed(self.layer.cells):
            facts = self.operands.facts(cell)
            letters = dict(facts.whole)
            owned = self._owned.get(cell.node.name, ())
            mine = {letter: marks[shard[place]] for letter, place, marks in owned}
            ranges: dict[str, Range] = {}
            seen = False
            for value, stored in facts.outputs:
                if value in self.made:
                    region = tuple([mine.get(letter) or letters[letter] for letter in stored])
                    makes[value] = region
                    wanted[value] = hull(wanted.get(value), region)
                if value in wanted and not is_empty(wanted[value]):
                    _widen(ranges, stored, wanted[value])
                    seen = True
            if not seen:
                continue
            letters |= ranges if not cell.uncut else {k: v for k, v in ranges.items() if k not in cell.uncut}
            partial = self.partials and [value for value, _ in facts.outputs if value in self.partials]
            if mine:
                letters |= mine if partial else {k: v for k, v in mine.items() if k in cell.reduced}
            regions = self.operands.regions(cell, facts, letters)
            wanted |= zip([value for value, _ in facts.outputs], regions.results, strict=True)
            for value in partial:
                counts[value] = prod(letters[k][1] - letters[k][0] for k in cell.reduced)
            joins = self.rules[cell.node.op].joins
            for view, operand in zip(cell.inputs, regions.operands, strict=True):
                if not (joins and operand.nothing):
                    wanted[view.value] = hull(wanted.get(view.value), operand.read)
            steps.append((cell, facts, letters, regions))
        order = [*self.layer.stores, *self.layer.partials]
        reads = tuple(
            (name, wanted[name]) for name in self.layer.reads if name in wanted and not is_empty(wanted[name])
        )
        written = tuple((name, makes[name]) for name in order)
        program = self._program(reads, wanted, steps[::-1], written)
        sizes = tuple(counts[name] if name in self.partials else 1 for name in order)
        return Unit(
            layer=self.layer.index, shard=shard, reads=reads, program=program, makes=written, counts=sizes
        )

    def _program(
        self, reads: Regions, regions: Mapping[str, Region], steps: Sequence[_Step], outputs: Regions
    ) -> Program:
        slots: dict[str, int] = {name: number for number, (name, _) in enumerate(reads)}
        values = self.factored.graph.values
        instructions: list[Instruction] = []
        for step in steps:
            for value, _ in step[1].outputs:
                slots[value] = len(slots)
            instructions.append(self._instruction(*step, regions, slots))
        tails = tuple(
            Operand(slots[name], _crop(region, regions[name]), region_shape(region), None)
            for name, region in outputs
        )
        orders = self.factored.orders
        return make_program(
            tuple(range(len(reads))),
            tuple(region_shape(region) for _, region in reads),
            tuple(values[name].dtype for name, _ in reads),
            tuple(instructions),
            tails,
            tuple((slot, orders[name]) for name, slot in slots.items() if name in orders),
            self.threads,
        )

    def _instruction(
        self,
        cell: Cell,
        facts: CellFacts,
        letters: Mapping[str, Range],
        needed: CellRegions,
        regions: Mapping[str, Region],
        slots: Mapping[str, int],
    ) -> Instruction:
        rule, node = self.rules[cell.node.op], cell.node
        operands = [
            self._operand(cell, view, region, regions[view.value], slots)
            for view, region in zip(cell.inputs, needed.operands, strict=True)
            if not (rule.joins and region.nothing)
        ]
        attrs: Attrs = node.attrs if needed.crop is None else {**node.attrs, "crop": needed.crop}
        if rule.localize is not None:
            out = _own_ranges(cell.outputs[0], letters)
            wholes = [view.shape for view in cell.inputs]
            further = rule.localize(node, out, [region.own for region in needed.operands], wholes)
            attrs = {**attrs, **further}
        return Instruction(
            op=node.op,
            operands=tuple(operands),
            outputs=tuple([slots[value] for value, _ in facts.outputs]),
            kernel_shapes=needed.kernel_shapes,
            shapes=needed.shapes,
            dtypes=facts.dtypes,
            attrs=attrs,
            fill=rule.fill,
        )

    def _operand(
        self, cell: Cell, view: View, needed: OperandRegion, held: Region, slots: Mapping[str, int]
    ) -> Operand:
        """Return an operand as the kernel gets it; ``held`` is the region that there is of its value."""
        part, pads = needed.part, needed.pads
        if needed.nothing:
            # Any empty axis makes an array without elements, which then becomes all padding.
            part, held = part or ((0, 1),), held or ((0, 1),)
            part = tuple(r if r[0] < r[1] else (h[0], h[0]) for r, h in zip(part, held, strict=True))
            part = ((part[0][0], part[0][0]), *part[1:])
        if pads is not None and self.rules[cell.node.op].joins:
            pads = None
        return Operand(slots[view.value], _crop(part, held), needed.shape, pads)


def _widen(ranges: dict[str, Range], letters: Sequence[str], region: Region) -> None:
    """Let ``ranges`` hold those of the letters of a result's stored axes, of which a region is needed."""
    for letter, needed in zip(letters, region, strict=True):
        before = ranges.setdefault(letter, needed)
        if before != needed:
            ranges[letter] = min(before[0], needed[0]), max(before[1], needed[1])


def _own_ranges(view: View, letters: Mapping[str, Range]) -> Region:
    """Return the ranges of a view's own axes; of several factors only the outermost may be cut."""
    ranges: list[Range] = []
    for indices in view.indices:
        inner = 1
        start, stop = 0, 1
        for number, index in enumerate(reversed(indices)):
            low, high = (0, 1) if index is None else letters[index.letter]  # type: ignore[union-attr]
            if number == len(indices) - 1:
                start, stop = low * inner, high * inner
            inner *= high - low
        ranges.append((start, stop))
    return tuple(ranges)


def _crop(part: Region, held: Region) -> tuple[tuple[int, int], ...] | None:
    if part == held:
        return None
    return tuple((cut.start, cut.stop) for cut in within(part, held))


def whole_unit(factored: Factored, rules: Rules, stored: Sequence[str]) -> Unit:
    """Return all nodes of a graph as one unit.

    ``stored`` names values that nodes make, as ``Factored.stored`` has them: the outputs of the program.
    """
    computed = {view.value for cell in factored.cells for view in cell.outputs}
    read = dict.fromkeys(view.value for cell in factored.cells for view in cell.inputs)
    layer = Layer(
        name="whole",
        index=0,
        cells=factored.cells,
        reads=tuple(name for name in read if name not in computed),
        stores=tuple(dict.fromkeys(stored)),
        partials=(),
        touched=frozenset(),
    )
    return LayerCutter(Operands(factored), find_classes(factored), rules, layer, {}).unit(())
