"""Which chunk leaves RAM first. No bytes are counted here, and nothing is moved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """What the ledger know of a chunk, and change."""

    nbytes: int
    footprint_bytes: int
    """Bytes that it takes in RAM."""
    uses: tuple[int, ...]
    """Plan positions at which it is read, sorted."""
    pins: int
    """Claims that need it in RAM."""
    readers: int
    """Threads that copy from RAM now."""
    busy: bool
    """Whether it is being written or loaded."""
    dropped: bool
    """Whether its handle is gone."""

    @property
    def spilled(self) -> bool:
        """Whether the spill has it, so that RAM may let go of it."""

    def leave_ram(self) -> None:
        """Let go of the bytes in RAM."""


E = TypeVar("E", bound=Entry)


class EvictionOrder(Generic[E]):
    """The chunks that are in RAM or being loaded; those that nothing holds are victims, one after another.

    First goes the chunk whose next use is furthest away (Belady's rule, for the plan is known), of equals
    one that the spill has, which costs no writing, and of these the one that was offered first.
    """

    def __init__(self) -> None:
        self.position = -1
        """Plan position that runs now."""
        # In order of arrival, so that a simulation made again is the same.
        self._residents: dict[E, None] = {}
        self._order: list[tuple[float, bool, int, E]] = []  # a heap; items may be outdated
        self._numbers = count()

    def __contains__(self, entry: E) -> bool:
        return entry in self._residents

    def add(self, entry: E) -> None:
        """A chunk is in RAM from now on."""
        self._residents[entry] = None
        self.offer(entry)

    def remove(self, entry: E) -> None:
        """A chunk is no longer in RAM."""
        del self._residents[entry]

    def next_use(self, entry: E) -> float:
        """Plan position at which a chunk is next read; infinity: never."""
        at = bisect_right(entry.uses, self.position)
        return entry.uses[at] if at < len(entry.uses) else inf

    def offer(self, entry: E) -> None:
        """Look at a chunk again: after it was read, let go of, loaded, written or given other uses."""
        if entry.pins or entry.busy or entry not in self._residents:
            return
        heappush(self._order, (-self.next_use(entry), not entry.spilled, next(self._numbers), entry))
        if len(self._order) > 4 * len(self._residents) + 1000:
            self._order = []
            for resident in self._residents:
                self.offer(resident)

    def victims(self) -> Iterator[E]:
        """Chunks that nothing holds, first to go first; a victim that stays has to be offered again."""
        while self._order:
            use, dirty, _, entry = heappop(self._order)
            if entry.pins or entry.busy or entry.readers or entry not in self._residents:
                continue  # offered again when that ends
            if (-self.next_use(entry), not entry.spilled) != (use, dirty):
                self.offer(entry)
                continue
            yield entry
