"""The books of the RAM tier: what is counted, and what is evicted first. No I/O, no waiting."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from oocdl.storage.cache.chunk import Slot

SOON = 12
"""Positions from now within which a chunk is worth bringing back whole."""
MOST_SKIPPED = 16
"""Chunks that are looked at for one to give way."""


@dataclass(frozen=True)
class TierStats:
    """What a tier has done so far; all in bytes but ``evictions``."""

    resident_bytes: int
    reserved_bytes: int
    peak_bytes: int
    """Largest sum of resident and reserved bytes."""
    read_bytes: int
    """Read from the spill."""
    written_bytes: int
    """Written to the spill."""
    evictions: int
    """Chunks that left RAM."""


class Ledger:
    """Counts bytes. Every call is made under the lock of the tier.

    Invariant: resident + reserved <= capacity, but for what ``count(overflow=True)`` let in.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Counted as resident: in RAM, or being loaded. In order of arrival: a plan made again is the same.
        self.slots: dict[Slot, None] = {}
        self.resident = self.reserved = self.peak = 0
        self.leaving = 0  # bytes of chunks being written so that they can leave
        self.read_bytes = self.written_bytes = self.evictions = 0
        self.position = -1
        self._order: list[tuple[float, bool, int, Slot]] = []  # a heap; entries may be outdated
        self._numbers = count()
        self.watch: Callable[[int, int], None] | None = None
        """Told of resident and reserved bytes at each change."""

    @property
    def free(self) -> int:
        """Bytes that are neither resident nor reserved; negative after an overflow."""
        return self.capacity - self.resident - self.reserved

    def count(self, resident: int = 0, reserved: int = 0, overflow: bool = False) -> None:
        """Change the counts."""
        grows = resident + reserved > 0
        self.resident += resident
        self.reserved += reserved
        assert self.resident >= 0 and self.reserved >= 0
        assert overflow or not grows or self.free >= 0, "the memory tier is over its capacity"
        self.peak = max(self.peak, self.resident + self.reserved)
        if self.watch is not None:
            self.watch(self.resident, self.reserved)

    def enter(self, slot: Slot, from_reserved: bool = False, overflow: bool = False) -> None:
        """A chunk becomes resident, out of reserved bytes or out of free ones."""
        self.slots[slot] = None
        self.count(slot.room, -slot.room if from_reserved else 0, overflow)
        self.offer(slot)

    def leave(self, slot: Slot) -> None:
        """A chunk is no longer resident."""
        if slot in self.slots:
            del self.slots[slot]
            slot.array = None
            self.count(resident=-slot.room)

    def evict(self, slot: Slot) -> None:
        """A chunk that the spill has leaves RAM."""
        assert slot.file is not None and not slot.pins and not slot.readers
        self.leave(slot)
        self.evictions += 1

    def absent(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those of ``slots`` that are not resident."""
        return [slot for slot in slots if slot not in self.slots]

    # --- what goes first -----------------------------------------------------------------

    def offer(self, slot: Slot) -> None:
        """Something has changed for a chunk (read, unpinned, written): look at it again."""
        if slot.pins or slot.busy or slot not in self.slots:
            return
        # Furthest next use first; of equals the clean, which cost no writing.
        heappush(self._order, (-self.next_use(slot), slot.file is None, next(self._numbers), slot))
        if len(self._order) > 4 * len(self.slots) + 1000:
            self._order = []
            for item in self.slots:
                self.offer(item)

    def _victims(self) -> Iterator[Slot]:
        """Chunks that nothing holds, in the order in which they are to go."""
        while self._order:
            use, dirty, _, slot = heappop(self._order)
            if slot.pins or slot.busy or slot.readers or slot not in self.slots:
                continue  # offered again when that ends
            if (-self.next_use(slot), slot.file is None) != (use, dirty):
                self.offer(slot)
                continue
            yield slot

    def make_room(self, need: int) -> list[Slot]:
        """Evict clean chunks, and choose dirty ones to write, until ``need`` bytes can be free.

        Returns those to write: marked busy, and counted as leaving.
        """
        writes: list[Slot] = []
        short = need - self.free - self.leaving
        if short <= 0:
            return writes
        for slot in self._victims():
            if slot.file is None:
                slot.busy = True
                self.leaving += slot.room
                writes.append(slot)
            else:
                self.evict(slot)
            short -= slot.room
            if short <= 0:
                break
        return writes

    def promote(self, slot: Slot) -> bool:
        """Make room for a spilled chunk of which a part is to be read, if others read it soon.

        Only chunks that the spill has go for it, and only such as are read later.
        """
        soon = self.next_use(slot)
        if soon > self.position + SOON or slot.busy or slot.dropped:
            return False
        kept: list[Slot] = []
        for victim in self._victims():
            if self.free >= slot.room or self.next_use(victim) <= self.position + SOON:
                kept.append(victim)
                break
            if victim.file is None:
                kept.append(victim)
                if len(kept) > MOST_SKIPPED:
                    break
            else:
                self.evict(victim)
        for victim in kept:
            self.offer(victim)
        if self.free < slot.room:
            return False
        slot.busy = True
        self.enter(slot)
        return True

    def next_use(self, slot: Slot) -> float:
        """Plan position at which a chunk is next read; infinity: never."""
        at = bisect_right(slot.uses, self.position)
        return slot.uses[at] if at < len(slot.uses) else inf

    def stats(self) -> TierStats:
        """A snapshot."""
        return TierStats(
            self.resident, self.reserved, self.peak,
            self.read_bytes, self.written_bytes, self.evictions,
        )  # fmt: skip
