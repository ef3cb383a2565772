"""Groups nodes into layers, each of which runs as one task for each shard.

Some nodes are *anchors*: heavy ones (many FLOP for a byte) run once, and nodes whose
result is partial under the cut must be combined before anyone reads them. Each
anchor belongs to one layer. All other nodes are cheap: they are recomputed in the
prologue or epilogue of whichever layer needs them, from values that are stored;
``storage_cut`` chooses these values.

Heavy nodes share a layer where they read the same value (both gradients of one
convolution), or where what lies between them is needed nowhere else (the last
matrix product, cross-entropy and its gradient). A reduction joins the layer that
makes its input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from oocdl.graph.ir.index import Whole
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.partition.cut_classes import Classes, is_local
from oocdl.graph.partition.wiring import Wiring
from oocdl.graph.transforms.factorize import Cell, Factored, View

HEAVY_FLOP_PER_BYTE = 10.0
"""A node of at least this intensity runs once and is never recomputed."""
LARGE_MATRIX_BYTES = 8 << 20
"""A product that reads so much for a small result is not recomputed: its matrix would be read again."""
SHARED_LAYER_BYTES = 1 << 20
"""Final values up to this size share layers, so that tasks are worth their overhead."""
CONE_VALUES = 40
"""The number of values before a reduction that are searched for a layer that reads the same."""

Ready = tuple[int, bool]
"""(layer, inside): inside, the value is made in that layer; else it is complete only after it."""


@dataclass
class Group:
    """A layer that is being formed."""

    index: int
    touched: frozenset[int]
    """Cut classes that every anchor and output of the layer has."""
    anchors: list[Cell] = field(default_factory=list)
    finals: list[str] = field(default_factory=list)
    """Values that must be stored although no anchor makes them: graph outputs."""
    values: set[str] = field(default_factory=set)
    """Values that the layer computes or reads, as far as they are known yet."""
    heavy_inputs: set[str] = field(default_factory=set)
    """Values that its heavy anchors read."""
    heavy_results: int = 0
    """Results of its heavy anchors, as a set of bits (``_Reach``)."""


def flop_per_byte(cell: Cell, rules: Rules, factored: Factored) -> float:
    """Return the arithmetic intensity of a node: operations for each byte of operands and results."""
    values = factored.graph.values
    inputs = [values[name].shape for name in cell.node.inputs]
    outputs = [values[name].shape for name in cell.node.outputs]
    moved = sum(values[name].nbytes for name in (*cell.node.inputs, *cell.node.outputs))
    return rules[cell.node.op].flops(cell.node, inputs, outputs) / max(moved, 1)


def heavy_nodes(factored: Factored, rules: Rules) -> frozenset[str]:
    """Return the names of the nodes that run once and are never recomputed, however the pass is cut."""
    return frozenset(cell.node.name for cell in factored.cells if _is_heavy(cell, rules, factored))


def _is_heavy(cell: Cell, rules: Rules, factored: Factored) -> bool:
    """Whether a node runs once: for its many operations, as a convolution of groups, whose few are slow, or
    where its attribute ``runs_once`` says so, to be stored in its place.

    Of convolutions of groups, a chain that is recomputed to save bytes would soon take longer than the step.
    """
    product = rules[cell.node.op].product
    of_groups = product is not None and bool(product.data) and bool(cell.node.attrs.get("grouped"))
    enough = flop_per_byte(cell, rules, factored) >= HEAVY_FLOP_PER_BYTE
    return bool(cell.node.attrs.get("runs_once")) or of_groups or enough or _reads_much(cell, rules, factored)


def _reads_much(cell: Cell, rules: Rules, factored: Factored) -> bool:
    """Whether a matrix product mostly reads a matrix, as one of few rows with large weights does."""
    product = rules[cell.node.op].product
    if product is None or product.data:
        return False
    values = factored.graph.values
    read = sum(values[view.value].nbytes for view in cell.inputs)
    written = sum(values[view.value].nbytes for view in cell.outputs)
    return read >= LARGE_MATRIX_BYTES and read > 4 * written


class Grouping:
    """Anchors in their layers, and the layer from which each value can first be read."""

    def __init__(self, wiring: Wiring, classes: Classes, cuts: Iterable[int]) -> None:
        self.wiring, self.classes, self.heavy = wiring, classes, wiring.heavy
        self.cuts = frozenset(cuts)
        self.partial: set[str] = set()
        """Values of which shards make partial results."""
        self.anchors = set(wiring.heavy)
        """Nodes that are heavy, or of which shards make partial results."""
        for cell in wiring.factored.cells:
            partial = classes.partial_outputs(cell, self.cuts)
            if partial:
                self.partial |= partial
                self.anchors.add(cell.node.name)
        self.touched = {name: self.cuts.intersection(cut) for name, cut in classes.letters.items()}
        """Node -> the cut classes that cut it."""
        self.groups: list[Group] = []
        self.ready: dict[str, Ready] = {}
        self.layer_of: dict[str, int] = {}
        """Anchor output or final value -> layer."""
        self.deferred: dict[str, Cell] = {}
        """Outputs of reductions that have no layer yet."""
        self.reach = _Reach(wiring, self.anchors)
        self.anchored = {value for name in self.anchors for value in wiring.makes[name]}
        """Values that anchors make."""
        self._cones: dict[str, frozenset[str]] = {}
        self._ends: dict[str, tuple[list[tuple[str, int]], int]] = {}

    def earliest(self, cell: Cell) -> Ready:
        """Return the first layer in which all inputs can be read; inside it only if no halo is read there."""
        layer, inside = -1, False
        for view in cell.inputs:
            maker, within = self.ready.get(view.value, (-1, False))
            if maker < layer:
                continue
            within = within and self.reads_same_piece(cell, view)
            inside = within and (inside or maker > layer)
            layer = maker
        return layer, inside

    def reads_same_piece(self, cell: Cell, view: View) -> bool:
        """Whether a shard of ``cell`` needs of ``view`` only what the same shard made."""
        if self.cuts.isdisjoint(self.classes.of_axes[view.value]):
            return True
        for positions, indices in zip(view.positions, view.indices, strict=True):
            for position, index in zip(positions, indices, strict=False):
                cut = self.classes.of_axes[view.value][position]
                if cut not in self.cuts:
                    continue
                if not is_local(index) or isinstance(index, Whole):
                    return False
                if index is not None and self.classes.cut_letter(cell, cut) != index.letter:
                    return False
        return True

    def place_awaited(self, cell: Cell) -> None:
        """Give the reductions that ``cell`` reads a layer, if they have none yet."""
        if not self.deferred:
            return
        for view in cell.inputs:
            if view.value in self.deferred:
                self.place(self.deferred[view.value])

    def home(self, cell: Cell) -> Group | None:
        """Return the layer that an anchor can share now; None if it needs one of its own."""
        layer, inside = self.earliest(cell)
        return self.find_group(cell, layer if inside else layer + 1, inside)

    def place(self, cell: Cell) -> None:
        """Give an anchor its layer."""
        for view in cell.outputs:
            self.deferred.pop(view.value, None)
        group = self.home(cell)
        if group is None:
            group = Group(len(self.groups), self.touched[cell.node.name])
            self.groups.append(group)
        group.anchors.append(cell)
        group.values |= self.cone(cell) | {view.value for view in cell.outputs}
        if cell.node.name in self.heavy:
            group.heavy_inputs |= {view.value for view in cell.inputs}
            group.heavy_results |= self.reach.results_of(cell)
        for view in cell.outputs:
            self.ready[view.value] = (group.index, view.value not in self.partial)
            self.layer_of[view.value] = group.index

    def cone(self, cell: Cell) -> frozenset[str]:
        """Return the large values among the inputs of an anchor, and before them through cheap nodes."""
        if cell.node.name not in self._cones:
            self._cones[cell.node.name] = frozenset(self._find_cone(cell))
        return self._cones[cell.node.name]

    def _find_cone(self, cell: Cell) -> set[str]:
        cone: set[str] = set()
        pending, large = deque(self.wiring.reads[cell.node.name]), self.wiring.large
        while pending and len(cone) < CONE_VALUES:
            value = pending.popleft()
            if value in cone or value not in large:
                continue
            cone.add(value)
            if value not in self.anchored:
                pending += self.wiring.sources.get(value, ())
        return cone

    def find_group(self, cell: Cell, floor: int, inside: bool) -> Group | None:
        """Return an existing layer, ``floor`` or later, that the anchor can share; None if there is none."""
        touched = self.touched[cell.node.name]
        heavy = cell.node.name in self.heavy
        shared = {view.value for view in cell.inputs if view.value in self.wiring.large}
        for index in range(max(floor, 0), len(self.groups)):
            group = self.groups[index]
            if group.touched != touched:
                continue
            if index == floor and inside and (not heavy or self.can_chain(cell, group)):
                return group
            if heavy and not shared.isdisjoint(group.heavy_inputs):
                return group
            if not heavy and self.costs_less_here(cell, group):
                return group
        return None

    def costs_less_here(self, cell: Cell, group: Group) -> bool:
        """Whether a layer reads or computes most of the bytes that a reduction has to read."""
        ends, total = self.ends(cell)
        return 2 * sum([nbytes for name, nbytes in ends if name in group.values]) > total

    def ends(self, cell: Cell) -> tuple[list[tuple[str, int]], int]:
        """The values, with their bytes, that a reduction has to read in the end; and the bytes of all."""
        found = self._ends.get(cell.node.name)
        if found is None:
            cone, sources = self.cone(cell), self.wiring.sources
            ends = [name for name in cone if name in self.anchored or name not in sources] or list(cone)
            pairs = [(name, self.wiring.nbytes[name]) for name in ends]
            found = self._ends[cell.node.name] = pairs, sum([nbytes for _, nbytes in pairs])
        return found

    def can_chain(self, cell: Cell, group: Group) -> bool:
        """Whether ``cell`` can run in the layer, because values between them are needed nowhere else."""
        reach, starts = self.reach, group.heavy_results
        between = reach.sources_of(cell) & starts
        sources = 0
        for anchor in reach.anchors_after(between):
            if self.touched[anchor.node.name] != group.touched:
                return False
            sources |= reach.sources_of(anchor)
        for source in reach.results(sources & ~starts):
            maker, complete = self.ready.get(source, (len(self.groups), False))
            if maker > group.index or (maker == group.index and not complete):
                return False
        return between != 0


class _Reach:
    """Dependencies of anchors on each other through cheap nodes, as sets of bits, a bit for each result."""

    def __init__(self, wiring: Wiring, anchors: Set[str]) -> None:
        self._results: list[str] = []
        self._anchors: list[Cell] = []
        """Number of a result's bit -> the anchor that makes it."""
        self._before: dict[str, int] = {}
        """Value -> the results of anchors that it is, or is computed from by cheap nodes."""
        self._after: dict[str, int] = {}
        """Value -> (first results of) the anchors that are computed from it, by cheap nodes at most."""
        before, after, cells = self._before, self._after, wiring.factored.cells
        for cell in cells:
            name = cell.node.name
            if name in anchors:
                for value in wiring.makes[name]:
                    before[value] = 1 << len(self._results)
                    self._results.append(value)
                    self._anchors.append(cell)
                continue
            bits = 0
            for value in wiring.reads[name]:
                bits |= before.get(value, 0)
            before |= dict.fromkeys(wiring.makes[name], bits)
        for cell in reversed(cells):
            name = cell.node.name
            results = wiring.makes[name]
            if name in anchors:
                bits = before[results[0]]
            else:
                bits = 0
                for value in results:
                    bits |= after.get(value, 0)
            for value in wiring.reads[name]:
                after[value] = after.get(value, 0) | bits

    def sources_of(self, cell: Cell) -> int:
        """The results of anchors that a node depends on."""
        return reduce(or_, (self._before.get(view.value, 0) for view in cell.inputs), 0)

    def results_of(self, anchor: Cell) -> int:
        return reduce(or_, (self._before[view.value] for view in anchor.outputs))

    def results(self, bits: int) -> Iterator[str]:
        return (self._results[bit] for bit in _set_bits(bits))

    def anchors_after(self, results: int) -> Iterator[Cell]:
        """The anchors that depend on one of ``results``, each once."""
        bits = reduce(or_, (self._after.get(value, 0) for value in self.results(results)), 0)
        return (self._anchors[bit] for bit in _set_bits(bits))


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def group(wiring: Wiring, classes: Classes, cuts: Iterable[int]) -> Grouping:
    """Put every anchor, in one walk over the cells, and every value the graph must deliver into a layer."""
    grouping = Grouping(wiring, classes, cuts)
    for cell in wiring.early_first:
        grouping.place_awaited(cell)
        if cell.node.name not in grouping.anchors:
            ready = grouping.earliest(cell)
            for view in cell.outputs:
                grouping.ready[view.value] = ready
        elif cell.node.name in grouping.heavy or grouping.home(cell) is not None:
            grouping.place(cell)
        else:
            grouping.deferred.update({view.value: cell for view in cell.outputs})
    while grouping.deferred:  # nobody waits for these, and by now a layer may make their input anyway
        grouping.place(next(iter(grouping.deferred.values())))
    _place_finals(grouping)
    return grouping


def _place_finals(grouping: Grouping) -> None:
    """Give the outputs that no anchor makes (updates, the loss) a layer."""
    small: dict[frozenset[int], Group] = {}
    filled: dict[int, int] = {}
    for value in grouping.wiring.finals:
        maker = grouping.wiring.maker.get(value)
        if maker is None or maker.node.name in grouping.anchors:
            continue
        layer, inside = grouping.ready[value]
        touched = grouping.touched[maker.node.name]
        if inside and grouping.groups[layer].touched == touched:
            grouping.groups[layer].finals.append(value)
            grouping.layer_of[value] = layer
            continue
        home = small.get(touched)
        size = grouping.wiring.nbytes[value]
        if home is None or size > SHARED_LAYER_BYTES or filled[home.index] + size > SHARED_LAYER_BYTES:
            home = Group(len(grouping.groups), touched)
            grouping.groups.append(home)
            filled[home.index] = 0
            if size <= SHARED_LAYER_BYTES:
                small[touched] = home
        home.finals.append(value)
        filled[home.index] += size
        grouping.layer_of[value] = home.index
