"""Decides which chunk leaves RAM first. Bytes are counted in ``ledger``, and moved by ``io_threads``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """The fields of a chunk that the ledger reads and changes."""

    nbytes: int
    footprint_bytes: int
    """Bytes that it takes in RAM: ``nbytes`` in whole pages where it is large."""
    uses: tuple[int, ...]
    """Plan positions at which it is read, sorted."""
    pins: int
    """Claims that need it in RAM."""
    readers: int
    """Threads that copy it from RAM now."""
    busy: bool
    """Whether an I/O thread writes or loads it."""
    dropped: bool
    """Whether its handle is gone."""

    @property
    def spilled(self) -> bool:
        """Whether the spill has its bytes, so that it can be evicted at once."""

    def leave_ram(self) -> None:
        """Let go of the bytes in RAM."""


E = TypeVar("E", bound=Entry)


class EvictionOrder(Generic[E]):
    """Orders the chunks that are in RAM or being loaded; ``victims`` yields those that nothing holds.

    First leaves the chunk whose next use is furthest away (Belady's rule: the plan is known); of equals
    one that the spill has, which costs no writing; of these the one that was offered first.
    """

    def __init__(self) -> None:
        self.position = -1
        """Plan position that runs now."""
        # In order of arrival, so that a simulation made again is the same.
        self.residents: dict[E, None] = {}
        self._order: list[tuple[float, bool, int, E]] = []  # a heap; items may be outdated
        self._numbers = count()

    def __contains__(self, entry: E) -> bool:
        return entry in self.residents

    def add(self, entry: E) -> None:
        """Note that a chunk is in RAM, or being loaded."""
        self.residents[entry] = None
        self.offer(entry)

    def remove(self, entry: E) -> None:
        """Note that a chunk is no longer in RAM."""
        del self.residents[entry]

    def next_use(self, entry: E) -> float:
        """Plan position at which a chunk is next read; infinity: never."""
        at = bisect_right(entry.uses, self.position)
        return entry.uses[at] if at < len(entry.uses) else inf

    def offer(self, entry: E) -> None:
        """Make a chunk a candidate again, once it was read, unpinned, loaded, written or given other uses."""
        if entry.pins or entry.busy or entry not in self.residents:
            return
        heappush(self._order, (-self.next_use(entry), not entry.spilled, next(self._numbers), entry))
        if len(self._order) > 4 * len(self.residents) + 1000:
            self._order = []
            for resident in self.residents:
                self.offer(resident)

    def victims(self) -> Iterator[E]:
        """Yield chunks that nothing holds, the first to leave first; one that stays must be offered again."""
        while self._order:
            use, dirty, _, entry = heappop(self._order)
            if entry.pins or entry.busy or entry.readers or entry not in self.residents:
                continue  # offered again when that ends
            if (-self.next_use(entry), not entry.spilled) != (use, dirty):
                self.offer(entry)
                continue
            yield entry
