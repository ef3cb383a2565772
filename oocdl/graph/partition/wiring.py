"""Finds the values that the nodes of a graph read and make, which are the same for every choice of cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from oocdl.graph.ir.graph import Role
from oocdl.graph.transforms.factorize import Cell, Factored

LEAST_COMPARED_BYTES = 1 << 10
"""Values of fewer bytes do not count when layers are compared by what they read."""
SMALL_ROLES = (Role.WEIGHT, Role.STATE, Role.SUM, Role.CONSTANT, Role.SCALAR)
DATASET_ROLES = (Role.INPUT, Role.TARGET)
DATASET_READ_COST = 8
"""Bytes that could move between layers while one of the dataset is read: chunks are decoded one at a time, at
some 0.5 GB/s, and arrays are copied by each thread at several."""


class Wiring:
    """A graph by its values; those of one node are in the order of its operands or results."""

    def __init__(self, factored: Factored, heavy: Set[str]) -> None:
        """``heavy``: nodes that run once and are never recomputed (``heavy_nodes``)."""
        self.factored, self.heavy = factored, heavy
        cells, values = factored.cells, factored.graph.values
        self.place = {cell.node.name: place for place, cell in enumerate(cells)}
        """Node -> its number."""
        self.reads = {cell.node.name: tuple([view.value for view in cell.inputs]) for cell in cells}
        """Node -> the value of each operand."""
        self.makes = {cell.node.name: tuple([view.value for view in cell.outputs]) for cell in cells}
        """Node -> the value of each result."""
        self.maker = {value: cell for cell in cells for value in self.makes[cell.node.name]}
        """Value -> the node that makes it."""
        read = ((value, self.reads[cell.node.name]) for value, cell in self.maker.items())
        self.sources = {value: tuple(dict.fromkeys(names)) for value, names in read}
        """Value that a node makes -> what that node reads, each once."""
        self.nbytes = {name: value.nbytes for name, value in values.items()}
        narrow = {
            result: self.reads[cell.node.name][0]
            for result, cell in self.maker.items()
            if cell.node.op == "Cast" and self.nbytes[self.reads[cell.node.name][0]] < self.nbytes[result]
        }
        self.wide = narrow.keys()
        """Values that are Casts of narrower ones, which always cost less to read."""
        self.uses = Counter(value for names in self.reads.values() for value in names)
        """Value -> how many operands it is; one that is a Cast of a narrower value counts as that value."""
        for value, source in narrow.items():
            self.uses[source] += self.uses.pop(value, 0)
        self.finals = final_values(factored)
        """Stored values that must exist when the pass is over."""
        self.costs = {
            name: self.nbytes[name] * (DATASET_READ_COST if value.role in DATASET_ROLES else 1)
            for name, value in values.items()
        }
        """Value -> bytes that could move between layers while it is read."""
        passed_on = self.maker.keys() - set(self.finals)
        self.first_costs = self.costs | {name: 2 * self.costs[name] for name in passed_on}
        """The same for the first layer that reads it, for which another writes it, too."""
        self.large = {
            name
            for name, value in values.items()
            if value.role not in SMALL_ROLES and self.nbytes[name] >= LEAST_COMPARED_BYTES
        }
        """Values that count when layers are compared by what they read."""
        self.early_first = self._early_first()
        """Cells that depend on no heavy node first: sums over targets are then ready for the loss."""

    def _early_first(self) -> tuple[Cell, ...]:
        late: set[str] = set()
        early: list[Cell] = []
        rest: list[Cell] = []
        for cell in self.factored.cells:
            name = cell.node.name
            is_late = name in self.heavy or not late.isdisjoint(self.reads[name])
            if is_late:
                late.update(self.makes[name])
            (rest if is_late else early).append(cell)
        return (*early, *rest)


def final_values(factored: Factored) -> list[str]:
    """Return the stored values that must exist when the pass is over."""
    graph = factored.graph
    wanted = [*graph.outputs, *graph.updates.values()]
    return list(dict.fromkeys(factored.stored(name) for name in wanted))
