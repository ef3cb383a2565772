"""What a unit costs: bytes of the arrays that it reads and makes.

The peak of a unit is bounded by construction. Its inputs and results are arrays of the
memory tier (``unit_buffer_bytes``); what its program takes while it runs is the heap's
(``program_cost.program_scratch_bytes``).
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.ir.array_layout import footprint, itemsize
from oocdl.graph.ir.index import region_size
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.tiling import Unit
from oocdl.graph.transforms.factorize import Factored


def unit_buffer_bytes(unit: Unit, layer: Layer, factored: Factored) -> int:
    """Bytes of the arrays that a unit reads and makes, and of the lanes it adds its partial results to."""
    read, made = read_bytes(unit, factored), made_bytes(unit, factored)
    lanes = [made[name] for name in layer.partials]
    return sum(footprint(nbytes) for nbytes in [*read.values(), *made.values(), *lanes])


def combine_buffer_bytes(sizes: Sequence[int], how: str) -> int:
    """Bytes that combining partial results of ``sizes`` takes.

    Lanes are read one by one: the total, a lane, and for formulas their float64 temporaries.
    """
    arrays = 2 * sum(footprint(nbytes) for nbytes in sizes)
    return arrays + (0 if how in ("sum", "max") else 14 * sum(sizes))


def read_bytes(unit: Unit, factored: Factored) -> dict[str, int]:
    """Bytes that the unit reads of each value."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in unit.reads}


def made_bytes(unit: Unit, factored: Factored) -> dict[str, int]:
    """Bytes that the unit makes of each value."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in unit.makes}
