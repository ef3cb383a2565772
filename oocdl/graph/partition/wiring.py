"""Finds the values that the nodes of a graph read and make, which are the same for every choice of cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from oocdl.graph.ir.graph import Role
from oocdl.graph.transforms.factorize import Cell, Factored

LEAST_COMPARED_BYTES = 1 << 10
"""Values of fewer bytes do not count when layers are compared by what they read."""
SMALL_ROLES = (Role.WEIGHT, Role.STATE, Role.SUM, Role.CONSTANT, Role.SCALAR)
DATASET_ROLES = (Role.INPUT, Role.TARGET)
DATASET_READ_COST = 8
"""Bytes that could move between layers while one of the dataset is read: chunks are decoded one at a time, at
some 0.5 GB/s, and arrays are copied by each thread at several."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Wiring:
    """A graph by its values; those of one node are in the order of its operands or results."""

    factored: Factored
    heavy: Set[str]
    """Nodes that run once and are never recomputed."""
    early_first: tuple[Cell, ...]
    """Cells that depend on no heavy node first: sums over targets are then ready for the loss."""
    place: Mapping[str, int]
    """Node -> its number."""
    reads: Mapping[str, tuple[str, ...]]
    """Node -> the value of each operand."""
    makes: Mapping[str, tuple[str, ...]]
    """Node -> the value of each result."""
    maker: Mapping[str, Cell]
    """Value -> the node that makes it."""
    sources: Mapping[str, tuple[str, ...]]
    """Value that a node makes -> what that node reads, each once."""
    uses: Mapping[str, int]
    """Value -> how many operands it is; one that is a Cast of a narrower value counts as that value."""
    wide: Set[str]
    """Values that are Casts of narrower ones, which always cost less to read."""
    nbytes: Mapping[str, int]
    costs: Mapping[str, int]
    """Value -> bytes that could move between layers while it is read."""
    first_costs: Mapping[str, int]
    """The same for the first layer that reads it, for which another writes it, too."""
    large: Set[str]
    """Values that count when layers are compared by what they read."""
    finals: tuple[str, ...]
    """Stored values that must exist when the pass is over."""


def wire(factored: Factored, heavy: Set[str]) -> Wiring:
    """The wiring of a graph; ``heavy``: ``heavy_nodes``."""
    cells, values = factored.cells, factored.graph.values
    reads = {cell.node.name: tuple([view.value for view in cell.inputs]) for cell in cells}
    makes = {cell.node.name: tuple([view.value for view in cell.outputs]) for cell in cells}
    maker = {value: cell for cell in cells for value in makes[cell.node.name]}
    nbytes = {name: value.nbytes for name, value in values.items()}
    narrow = {
        result: reads[cell.node.name][0]
        for result, cell in maker.items()
        if cell.node.op == "Cast" and nbytes[reads[cell.node.name][0]] < nbytes[result]
    }
    finals = dict.fromkeys(final_values(factored))
    costs = {
        name: nbytes[name] * (DATASET_READ_COST if value.role in DATASET_ROLES else 1)
        for name, value in values.items()
    }
    return Wiring(
        factored=factored,
        heavy=heavy,
        early_first=_early_first(factored, heavy, reads, makes),
        place={cell.node.name: place for place, cell in enumerate(cells)},
        reads=reads,
        makes=makes,
        maker=maker,
        sources={value: tuple(dict.fromkeys(reads[cell.node.name])) for value, cell in maker.items()},
        uses=_uses(reads, narrow),
        wide=narrow.keys(),
        nbytes=nbytes,
        costs=costs,
        first_costs=costs | {name: 2 * costs[name] for name in maker.keys() - finals},
        large=frozenset(
            name
            for name, value in values.items()
            if value.role not in SMALL_ROLES and nbytes[name] >= LEAST_COMPARED_BYTES
        ),
        finals=tuple(finals),
    )


def final_values(factored: Factored) -> list[str]:
    """Return the stored values that must exist when the pass is over."""
    graph = factored.graph
    wanted = [*graph.outputs, *graph.updates.values()]
    return list(dict.fromkeys(factored.stored(name) for name in wanted))


def _early_first(
    factored: Factored,
    heavy: Set[str],
    reads: Mapping[str, tuple[str, ...]],
    makes: Mapping[str, tuple[str, ...]],
) -> tuple[Cell, ...]:
    late: set[str] = set()
    early: list[Cell] = []
    rest: list[Cell] = []
    for cell in factored.cells:
        name = cell.node.name
        is_late = name in heavy or not late.isdisjoint(reads[name])
        if is_late:
            late.update(makes[name])
        (rest if is_late else early).append(cell)
    return (*early, *rest)


def _uses(reads: Mapping[str, tuple[str, ...]], narrow: Mapping[str, str]) -> dict[str, int]:
    uses = Counter(value for values in reads.values() for value in values)
    for value, source in narrow.items():
        uses[source] += uses.pop(value, 0)
    return uses
