"""The cost of a unit: bytes of the arrays that it reads and makes.

The peak of a unit is bounded by construction. Its inputs and results are arrays of the
memory tier (``unit_buffer_bytes``); the scratch of its program lies on the heap (``graph/ir/program_cost``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from oocdl.graph.ir.array_layout import footprint, itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.unit import Unit
from oocdl.graph.transforms.factorize import Cell, Factored


def unit_buffer_bytes(unit: Unit, layer: Layer, factored: Factored) -> int:
    """Bytes of the arrays that a unit reads and makes, and of the partial sums that it adds to."""
    read, made = bytes_of(unit.reads, factored), bytes_of(unit.makes, factored)
    sums = [made[name] for name in layer.partials]
    return sum(map(footprint, [*read.values(), *made.values(), *sums]))


def combine_buffer_bytes(sizes: Sequence[int], how: str) -> int:
    """Bytes that it takes to combine partial sums with results of ``sizes`` bytes.

    Partial sums are read one by one: there are the total, one of them, and float64 temporaries of formulas.
    """
    arrays = 2 * sum(footprint(nbytes) for nbytes in sizes)
    return arrays + (0 if how in ("sum", "max") else 14 * sum(sizes))


def combined_together(cell: Cell, partials: Collection[str]) -> list[list[str]]:
    """Return those of the outputs of a node that are partial, in groups that one call combines.

    Moments are combined together; sums each by itself, as they may be of different shapes.
    """
    names = [view.value for view in cell.outputs if view.value in partials]
    return [names] if names and cell.combine == "moments" else [[name] for name in names]


def bytes_of(regions: Iterable[tuple[str, Region]], factored: Factored) -> dict[str, int]:
    """Value -> bytes of the region of it that a unit reads or makes."""
    values = factored.graph.values
    return {name: region_size(region) * itemsize(values[name].dtype) for name, region in regions}
