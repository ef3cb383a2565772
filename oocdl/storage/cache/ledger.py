"""The ledger of the RAM tier: what is counted, who is let in, what is evicted first. No I/O, no waiting.

The tier asks them under its lock, and does what they say with threads and files; the simulator asks the
same ledger, and does it with a clock. What a chunk is to either is theirs: the ledger see an
``eviction.Entry``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from oocdl.errors import BudgetError
from oocdl.storage.cache.eviction import E, EvictionOrder

SOON_POSITIONS = 12
"""Plan positions from now within which a chunk has to be read to be worth bringing back whole."""
MOST_SKIPPED_CHUNKS = 16
"""Chunks that are looked at for one to give way."""


@dataclass(eq=False)
class Claim(Generic[E]):
    """What a unit waits for and then holds: chunks pinned in RAM, each once, and bytes to work in."""

    pins: Sequence[E]
    left_bytes: int
    """Bytes for arrays, not yet turned into chunks."""
    scratch_bytes: int = 0
    """Bytes kept free for what a program takes of the heap."""
    pinned: bool = False
    """Whether the pins are counted."""


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


class Ledger(Generic[E]):
    """Counts bytes. Every call is made under the lock of the tier.

    ``write`` is called with each chunk that has to be written before it can leave; whoever it hands
    the chunk to calls ``written`` in the end. Invariant: resident + reserved <= capacity.
    """

    def __init__(self, capacity_bytes: int, write: Callable[[E], None]) -> None:
        self.capacity_bytes, self._write = capacity_bytes, write
        self.line: deque[Claim[E]] = deque()
        """Claims that wait, first come first served."""
        self.resident_bytes = self.reserved_bytes = self.peak_bytes = 0
        self.leaving_bytes = 0  # bytes of chunks being written so that they can leave
        self.read_bytes = self.written_bytes = self.evictions = 0
        self._order: EvictionOrder[E] = EvictionOrder()
        self.watch: Callable[[int, int], None] | None = None
        """Told of resident and reserved bytes at each change."""

    @property
    def free_bytes(self) -> int:
        """Bytes that are neither resident nor reserved."""
        return self.capacity_bytes - self.resident_bytes - self.reserved_bytes

    def stats(self) -> TierStats:
        """A snapshot."""
        return TierStats(
            self.resident_bytes, self.reserved_bytes, self.peak_bytes,
            self.read_bytes, self.written_bytes, self.evictions,
        )  # fmt: skip

    def _count(self, resident: int = 0, reserved: int = 0) -> None:
        """Change the counts."""
        self.resident_bytes += resident
        self.reserved_bytes += reserved
        assert self.resident_bytes >= 0 and self.reserved_bytes >= 0
        assert resident + reserved <= 0 or self.free_bytes >= 0, "the memory tier is over its capacity"
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + self.reserved_bytes)
        if self.watch is not None:
            self.watch(self.resident_bytes, self.reserved_bytes)

    def is_resident(self, entry: E) -> bool:
        """Whether a chunk is in RAM, or being loaded."""
        return entry in self._order

    def advance(self, position: int) -> None:
        """A unit at this position of the plan starts."""
        self._order.position = position

    def enter(self, entry: E, from_reserved: bool = False) -> None:
        """A chunk becomes resident, out of reserved bytes or out of free ones."""
        self._count(entry.footprint_bytes, -entry.footprint_bytes if from_reserved else 0)
        self._order.add(entry)

    def _leave(self, entry: E) -> None:
        """A chunk is no longer resident."""
        if entry in self._order:
            self._order.remove(entry)
            entry.leave_ram()
            self._count(resident=-entry.footprint_bytes)

    # --- claims ----------------------------------------------------------------------------

    def admit(self, claim: Claim[E]) -> list[E] | None:
        """The first in line holds its pins from now on, and the rest as soon as there is room.

        Returns the chunks that have to be loaded for it, busy until ``loaded``; None if it has to wait.
        """
        assert self.line[0] is claim
        if not claim.pinned:
            claim.pinned = True
            for entry in claim.pins:
                entry.pins += 1
        absent = [entry for entry in claim.pins if entry not in self._order]
        nbytes = claim.left_bytes + claim.scratch_bytes
        need = nbytes + sum(entry.footprint_bytes for entry in absent)
        self.make_room(need)
        if need > self.free_bytes:
            return None
        self._count(reserved=nbytes)
        for entry in absent:
            entry.busy = True
            self.enter(entry)
        self.line.popleft()
        return absent

    def withdraw(self, claim: Claim[E]) -> None:
        """A claim in line waits no longer."""
        self.line.remove(claim)
        self._unpin(claim)

    def put(self, claim: Claim[E], entry: E) -> None:
        """Bytes of a claim become a chunk. Raises BudgetError if not so many are left."""
        if entry.footprint_bytes > claim.left_bytes:
            raise BudgetError(f"put of {entry.footprint_bytes} bytes, {claim.left_bytes} are left reserved")
        claim.left_bytes -= entry.footprint_bytes
        self.enter(entry, from_reserved=True)

    def release(self, claim: Claim[E]) -> None:
        """Give back the pins and what is left. May be called twice."""
        self._unpin(claim)
        self._count(reserved=-claim.left_bytes - claim.scratch_bytes)
        claim.left_bytes = claim.scratch_bytes = 0

    def _unpin(self, claim: Claim[E]) -> None:
        if claim.pinned:
            claim.pinned = False
            for entry in claim.pins:
                entry.pins -= 1
                self._order.offer(entry)

    # --- what has happened to a chunk ------------------------------------------------------

    def loaded(self, entry: E, done: bool = True) -> None:
        """A chunk that had entered is in RAM, or could not be read."""
        entry.busy = False
        if done:
            self._order.offer(entry)
        else:
            self._leave(entry)

    def written(self, entry: E, done: bool = True) -> None:
        """A chunk that was to leave is in the spill, or could not be written. It leaves if someone waits."""
        self.leaving_bytes -= entry.footprint_bytes
        entry.busy = False
        if done:
            self.written_bytes += entry.nbytes
        held = entry.pins or entry.readers or entry.dropped or entry not in self._order
        if done and self.line and not held:
            self._evict(entry)
        else:
            self._order.offer(entry)

    def drop(self, entry: E) -> bool:
        """Nothing reads a chunk any more; False: it is busy, and whoever is at it drops it again."""
        entry.dropped = True
        if entry.busy:
            return False
        self._leave(entry)
        return True

    def renew(self, plans: Iterable[tuple[E, tuple[int, ...]]]) -> None:
        """A new step begins, in which these chunks are read at these positions."""
        self._order.position = -1
        for entry, uses in plans:
            entry.uses = uses
            self._order.offer(entry)

    def hold(self, entry: E) -> None:
        """Someone copies a chunk, which must not leave meanwhile."""
        entry.readers += 1

    def let_go(self, entry: E) -> None:
        """Undo ``hold``."""
        entry.readers -= 1
        self._order.offer(entry)

    # --- who makes room --------------------------------------------------------------------

    def _evict(self, entry: E) -> None:
        """A chunk that the spill has leaves RAM."""
        assert entry.spilled and not entry.pins and not entry.readers
        self._leave(entry)
        self.evictions += 1

    def make_room(self, need_bytes: int) -> None:
        """Evict clean chunks, and have dirty ones written, until ``need_bytes`` can be free."""
        short = need_bytes - self.free_bytes - self.leaving_bytes
        if short <= 0:
            return
        for entry in self._order.victims():
            if entry.spilled:
                self._evict(entry)
            else:
                entry.busy = True
                self.leaving_bytes += entry.footprint_bytes
                self._write(entry)
            short -= entry.footprint_bytes
            if short <= 0:
                break

    def promote(self, entry: E) -> bool:
        """Make room for a spilled chunk of which a part is to be read, if others read it soon.

        Only chunks that the spill has go for it, and only such as are read later; where claims wait,
        room is theirs. If it has entered, the caller loads it; it is busy until ``loaded``.
        """
        soon = self._order.position + SOON_POSITIONS
        if self.line or self._order.next_use(entry) > soon or entry.busy or entry.dropped:
            return False
        kept: list[E] = []
        for victim in self._order.victims():
            if self.free_bytes >= entry.footprint_bytes or self._order.next_use(victim) <= soon:
                kept.append(victim)
                break
            if not victim.spilled:
                kept.append(victim)
                if len(kept) > MOST_SKIPPED_CHUNKS:
                    break
            else:
                self._evict(victim)
        for victim in kept:
            self._order.offer(victim)
        if self.free_bytes < entry.footprint_bytes:
            return False
        entry.busy = True
        self.enter(entry)
        return True
