"""A graph as one unit that is not cut: what it computes, without a plan."""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.partition.cut_classes import find_classes
from oocdl.graph.partition.operand_regions import Operands
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.tiling import LayerCutter
from oocdl.graph.partition.unit import Unit
from oocdl.graph.transforms.factorize import Factored


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
