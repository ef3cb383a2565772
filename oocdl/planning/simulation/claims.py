"""What a simulated process holds: chunks without their bytes, and calls and arrivals with their claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oocdl.graph.ir.array_layout import footprint
from oocdl.graph.ir.index import Region
from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.storage.cache.ledger import Claim


@dataclass(eq=False, slots=True)
class Chunk:
    """A chunk without its bytes: an ``eviction.Entry`` that calls have as an argument."""

    region: Region
    nbytes: int
    uses: tuple[int, ...]
    spilled: bool = False
    footprint_bytes: int = field(init=False)
    pins: int = 0
    readers: int = 0
    busy: bool = False
    dropped: bool = False

    def __post_init__(self) -> None:
        self.footprint_bytes = footprint(self.nbytes)

    def leave_ram(self) -> None:
        """There are no bytes to let go of."""


@dataclass(eq=False, kw_only=True)
class Unit(Claim[Chunk]):
    """A call under way, and what it holds."""

    call: UnitCall | CombineCall
    number: int
    """Of the task."""
    arguments: Sequence[Chunk]
    worker: int
    begun: float
    computing: float = 0.0


@dataclass(eq=False, kw_only=True)
class Arrival(Claim[Chunk]):
    """A chunk that waits for room: it has come from another process, or is a strip that is cut."""

    number: int
    """Of the task that it ends."""
    chunk: Chunk
