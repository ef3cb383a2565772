"""``Unit``: the work of one layer for one shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.graph.ir.program import Program
from oocdl.graph.transforms.factorize import Cell, Factored

Shard = tuple[int, ...]
"""The number of its piece of each cut class, in the order of the layer's grid."""


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """The work of one layer for one shard: the regions it reads, its program, the regions it makes."""

    layer: int
    shard: Shard
    reads: tuple[tuple[str, Region], ...]
    """(value, region) in the order of the program's inputs."""
    program: Program
    makes: tuple[tuple[str, Region], ...]
    """(value, region) in the order of the program's outputs: the layer's stores, then its partials."""
    counts: tuple[int, ...]
    """For each made value the number of elements that it is reduced over (1 if it is not partial)."""


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
