"""What a user is told of an index that a program has computed, and that is no row of its table."""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.engines.checked_indices import IndexOutside
from oocdl.errors import IndexRangeError
from oocdl.graph.partition.unit import Unit
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.calls import UnitCall


def index_error(
    error: IndexOutside, call: UnitCall, factored: Factored, samples: Sequence[int]
) -> IndexRangeError:
    """Return the error that names node, index and the rows of the dataset in the batch."""
    node = _node_of(call.unit, factored, error.slot)
    where = f"node '{node}'" if node else f"layer '{call.key.layer}'"
    return IndexRangeError(
        f"{where} is given index {error.index} for an axis of {error.rows} (dataset rows {list(samples)}); "
        f"indices that a network computes have to be {-error.rows} to {error.rows - 1}: clip them in the "
        "model, or mend the data they are computed of"
    )


def _node_of(unit: Unit, factored: Factored, slot: int) -> str:
    """Return the name of the node that makes a slot of a unit's program; "" where that is not plain.

    Programs have no names, as equal ones are shared. A unit computes the nodes between what it reads and
    what it makes, in the order of the graph.
    """
    read, wanted = {name for name, _ in unit.reads}, {name for name, _ in unit.makes}
    cells = []
    for cell in reversed(factored.cells):
        if any(view.value in wanted - read for view in cell.outputs):
            cells.append(cell)
            wanted |= {view.value for view in cell.inputs}
    cells.reverse()
    items = unit.program.instructions
    if [cell.node.op for cell in cells] != [item.op for item in items]:
        return ""  # a shard at a border may need less
    return next((c.node.name for c, i in zip(cells, items, strict=True) if slot in i.outputs), "")
