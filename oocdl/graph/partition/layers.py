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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import Whole
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.partition.cut_classes import Classes, is_local
from oocdl.graph.transforms.factorize import Cell, Factored, View

HEAVY_FLOP_PER_BYTE = 10.0
"""A node of at least this intensity runs once and is never recomputed."""
LARGE_MATRIX_BYTES = 8 << 20
"""A product that reads so much for a small result is not recomputed: its matrix would be read again."""
SHARED_LAYER_BYTES = 1 << 20
"""Final values up to this size share layers, so that tasks are worth their overhead."""

LEAST_COMPARED_BYTES = 1 << 10
"""Values of fewer bytes do not count when layers are compared by what they read."""
CONE_VALUES = 40
"""The number of values before a reduction that are searched for a layer that reads the same."""
SMALL_ROLES = (Role.WEIGHT, Role.STATE, Role.SUM, Role.CONSTANT, Role.SCALAR)

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Grouping:
    """Anchors in their layers, and the layer from which each value can first be read."""

    groups: tuple[Group, ...]
    layer_of: dict[str, int]
    """Anchor output or final value -> layer."""
    ready: dict[str, Ready]
    partial: frozenset[str]
    """Values of which shards make partial results."""
    heavy: frozenset[str]


def flop_per_byte(cell: Cell, rules: Rules, factored: Factored) -> float:
    """Return the arithmetic intensity of a node: operations for each byte of operands and results."""
    values = factored.graph.values
    inputs = [values[name].shape for name in cell.node.inputs]
    outputs = [values[name].shape for name in cell.node.outputs]
    moved = sum(values[name].nbytes for name in (*cell.node.inputs, *cell.node.outputs))
    return rules[cell.node.op].flops(cell.node, inputs, outputs) / max(moved, 1)


def _is_heavy(cell: Cell, rules: Rules, factored: Factored) -> bool:
    """Whether a node runs once: for its many operations, or as a convolution of groups, whose few are slow.

    Of those, a chain that is recomputed to save bytes would soon take longer than the step.
    """
    product = rules[cell.node.op].product
    of_groups = product is not None and bool(product.data) and bool(cell.node.attrs.get("grouped"))
    enough = flop_per_byte(cell, rules, factored) >= HEAVY_FLOP_PER_BYTE
    return of_groups or enough or _reads_much(cell, rules, factored)


def _reads_much(cell: Cell, rules: Rules, factored: Factored) -> bool:
    """Whether a matrix product mostly reads a matrix, as one of few rows with large weights does."""
    values = factored.graph.values
    read = sum(values[view.value].nbytes for view in cell.inputs)
    made = sum(values[view.value].nbytes for view in cell.outputs)
    product = rules[cell.node.op].product
    is_matrix_product = product is not None and not product.data
    return is_matrix_product and read >= LARGE_MATRIX_BYTES and read > 4 * made


class _Grouper:
    """Gives each anchor its layer, in one walk over the cells."""

    def __init__(self, factored: Factored, classes: Classes, rules: Rules, cuts: Iterable[int]) -> None:
        self.factored, self.classes = factored, classes
        self.cuts = tuple(cuts)
        cells = factored.cells
        self.heavy = {c.node.name for c in cells if _is_heavy(c, rules, factored)}
        self.partial = {value for c in cells for value in classes.partial_outputs(c, self.cuts)}
        self.touched = {c.node.name: classes.touched(c, self.cuts) for c in cells}
        self.groups: list[Group] = []
        self.ready: dict[str, Ready] = {}
        self.layer_of: dict[str, int] = {}
        self.deferred: dict[str, Cell] = {}
        """Outputs of reductions that have no layer yet."""
        self.users: dict[str, list[Cell]] = {}
        for cell in cells:
            for view in cell.inputs:
                self.users.setdefault(view.value, []).append(cell)

    def is_anchor(self, cell: Cell) -> bool:
        return cell.node.name in self.heavy or any(view.value in self.partial for view in cell.outputs)

    def earliest(self, cell: Cell) -> Ready:
        """Return the first layer in which all inputs can be read; inside it only if no halo is read there."""
        layer, inside = -1, False
        for view in cell.inputs:
            made, within = self.ready.get(view.value, (-1, False))
            if within and not self.reads_same_piece(cell, view):
                within = False
            if made > layer:
                layer, inside = made, within
            elif made == layer:
                inside = inside and within
        return layer, inside

    def reads_same_piece(self, cell: Cell, view: View) -> bool:
        """Whether a shard of ``cell`` needs of ``view`` only what the same shard made."""
        for positions, indices in zip(view.positions, view.indices, strict=True):
            for position, index in zip(positions, indices, strict=False):
                cut = self.classes.of_axis[view.value, position]
                if cut not in self.cuts:
                    continue
                if not is_local(index) or isinstance(index, Whole):
                    return False
                if index is not None and self.classes.cut_letter(cell, cut) != index.letter:
                    return False
        return True

    def place_awaited(self, cell: Cell) -> None:
        """Give the reductions that ``cell`` reads a layer, if they have none yet."""
        for view in cell.inputs:
            if view.value in self.deferred:
                self.place(self.deferred[view.value])

    def place_all(self) -> None:
        """Place the reductions that nobody waits for; by now a layer may make their input anyway."""
        while self.deferred:
            self.place(next(iter(self.deferred.values())))

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
        for view in cell.outputs:
            self.ready[view.value] = (group.index, view.value not in self.partial)
            self.layer_of[view.value] = group.index

    def cone(self, cell: Cell) -> set[str]:
        """Return the large values among the inputs of an anchor, and before them through cheap nodes."""
        found: set[str] = set()
        pending = [view.value for view in cell.inputs]
        while pending and len(found) < CONE_VALUES:
            value = pending.pop(0)
            if value in found or not self.is_large(value):
                continue
            found.add(value)
            maker = self.factored_makers.get(value)
            if maker is not None and not self.is_anchor(maker):
                pending.extend(view.value for view in maker.inputs)
        return found

    @property
    def factored_makers(self) -> dict[str, Cell]:
        if not hasattr(self, "_makers"):
            self._makers = {view.value: cell for cell in self.factored.cells for view in cell.outputs}
        return self._makers

    def find_group(self, cell: Cell, floor: int, inside: bool) -> Group | None:
        """Return an existing layer, ``floor`` or later, that the anchor can share; None if there is none."""
        touched = self.touched[cell.node.name]
        heavy = cell.node.name in self.heavy
        for group in self.groups[max(floor, 0) :]:
            if group.touched != touched:
                continue
            if group.index == floor and inside and (not heavy or self.can_chain(cell, group)):
                return group
            shared = {v.value for v in cell.inputs if self.is_large(v.value)}
            if heavy and self.shares_input(shared, group):
                return group
            if not heavy and self.costs_less_here(cell, group):
                return group
        return None

    def shares_input(self, shared: set[str], group: Group) -> bool:
        """Whether a heavy anchor of the layer reads one of the ``shared`` values."""
        return any(
            view.value in shared
            for anchor in group.anchors
            if anchor.node.name in self.heavy
            for view in anchor.inputs
        )

    def costs_less_here(self, cell: Cell, group: Group) -> bool:
        """Whether a layer reads or computes most of the bytes that a reduction has to read."""
        cone, values = self.cone(cell), self.factored.graph.values
        ends = [name for name in cone if self.is_end(name)] or list(cone)
        shared = sum(values[name].nbytes for name in ends if name in group.values)
        return 2 * shared > sum(values[name].nbytes for name in ends)

    def is_end(self, value: str) -> bool:
        maker = self.factored_makers.get(value)
        return maker is None or self.is_anchor(maker)

    def is_large(self, value: str) -> bool:
        """Whether a value counts when layers are compared by what they read."""
        found = self.factored.graph.values[value]
        return found.role not in SMALL_ROLES and found.nbytes >= LEAST_COMPARED_BYTES

    def can_chain(self, cell: Cell, group: Group) -> bool:
        """Whether ``cell`` can run in the layer, because values between them are needed nowhere else."""
        starts = {v.value for a in group.anchors if a.node.name in self.heavy for v in a.outputs}
        between = self.heavy_sources(cell) & starts
        if not between:
            return False
        for start in between:
            for anchor in self.anchors_after(start):
                for source in self.anchor_sources(anchor):
                    made, complete = self.ready.get(source, (len(self.groups), False))
                    if source not in starts and (
                        made > group.index or (made == group.index and not complete)
                    ):
                        return False
                if self.touched[anchor.node.name] != group.touched:
                    return False
        return True

    def heavy_sources(self, cell: Cell) -> set[str]:
        return {s for s in self.anchor_sources(cell) if self.factored_makers[s].node.name in self.heavy}

    def anchor_sources(self, cell: Cell) -> set[str]:
        """Return the outputs of anchors that ``cell`` depends on through cheap nodes."""
        found: set[str] = set()
        pending = [view.value for view in cell.inputs]
        seen: set[str] = set()
        while pending:
            value = pending.pop()
            maker = self.factored_makers.get(value)
            if value in seen or maker is None:
                continue
            seen.add(value)
            if self.is_anchor(maker):
                found.add(value)
            else:
                pending.extend(view.value for view in maker.inputs)
        return found

    def anchors_after(self, value: str) -> list[Cell]:
        """Return the anchors that depend on ``value`` through cheap nodes."""
        found: dict[str, Cell] = {}
        pending, seen = [value], set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for cell in self.users.get(name, []):
                if self.is_anchor(cell):
                    found[cell.node.name] = cell
                else:
                    pending.extend(view.value for view in cell.outputs)
        return list(found.values())


def _early_first(factored: Factored, heavy: set[str]) -> list[Cell]:
    """Return cells that depend on no heavy node first: sums over targets are then ready for the loss."""
    late: set[str] = set()
    early: list[Cell] = []
    rest: list[Cell] = []
    for cell in factored.cells:
        is_late = cell.node.name in heavy or any(view.value in late for view in cell.inputs)
        if is_late:
            late.update(view.value for view in cell.outputs)
        (rest if is_late else early).append(cell)
    return early + rest


def group(factored: Factored, classes: Classes, rules: Rules, cuts: Sequence[int]) -> Grouping:
    """Put every anchor, and every value the graph must deliver, into a layer."""
    grouper = _Grouper(factored, classes, rules, cuts)
    for cell in _early_first(factored, grouper.heavy):
        grouper.place_awaited(cell)
        if not grouper.is_anchor(cell):
            ready = grouper.earliest(cell)
            for view in cell.outputs:
                grouper.ready[view.value] = ready
        elif cell.node.name in grouper.heavy or grouper.home(cell) is not None:
            grouper.place(cell)
        else:
            grouper.deferred.update({view.value: cell for view in cell.outputs})
    grouper.place_all()
    _place_finals(grouper)
    return Grouping(
        groups=tuple(grouper.groups),
        layer_of=grouper.layer_of,
        ready=grouper.ready,
        partial=frozenset(grouper.partial),
        heavy=frozenset(grouper.heavy),
    )


def final_values(factored: Factored) -> list[str]:
    """Return the stored values that must exist when the pass is over."""
    graph = factored.graph
    wanted = [*graph.outputs, *graph.updates.values()]
    return list(dict.fromkeys(factored.stored(name) for name in wanted))


def _place_finals(grouper: _Grouper) -> None:
    """Give the outputs that no anchor makes (updates, the loss) a layer."""
    small: dict[frozenset[int], Group] = {}
    filled: dict[int, int] = {}
    values = grouper.factored.graph.values
    for value in final_values(grouper.factored):
        maker = grouper.factored_makers.get(value)
        if maker is None or grouper.is_anchor(maker):
            continue
        layer, inside = grouper.ready[value]
        touched = grouper.touched[maker.node.name]
        if inside and grouper.groups[layer].touched == touched:
            grouper.groups[layer].finals.append(value)
            grouper.layer_of[value] = layer
            continue
        home = small.get(touched)
        size = values[value].nbytes
        if home is None or size > SHARED_LAYER_BYTES or filled[home.index] + size > SHARED_LAYER_BYTES:
            home = Group(len(grouper.groups), touched)
            grouper.groups.append(home)
            filled[home.index] = 0
            if size <= SHARED_LAYER_BYTES:
                small[touched] = home
        home.finals.append(value)
        filled[home.index] += size
        grouper.layer_of[value] = home.index
