"""``Unit``: the work of one layer for one shard."""

from __future__ import annotations

from dataclasses import dataclass

from oocdl.graph.ir.index import Region
from oocdl.graph.ir.program import Program

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
