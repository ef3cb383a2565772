"""The ledger of the RAM tier: it counts bytes, admits claims and chooses what is written and evicted.

It does no I/O and never waits. The tier acts on it with threads and files, the simulator with a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeVar

from oocdl.errors import BudgetError
from oocdl.graph.ir.array_layout import LEAST_PAGED_BYTES, footprint

SOON_POSITIONS = 12  # a chunk that is read within so many plan positions is worth bringing back whole
MOST_SKIPPED_CHUNKS = 16  # ``promote`` looks at no more chunks than these that could give way but may not
ANY_PROGRAMS = 1 << 30  # more programs at once than there are claims
SMALL_CHUNK_BYTES, SMALL_TIER_SHARE = 64 << 10, 1 / 2048
"""Chunks below both this size and this share of a tier leave last: one takes 1 to 3 ms to write and 0.3 ms to
read. They were two thirds of the chunks that a step of an nnU-Net wrote, and 0.2 % of the bytes."""


class Entry:
    """What the ledger reads and changes of a chunk."""

    __slots__ = ("busy", "dropped", "footprint_bytes", "nbytes", "pins", "readers", "uses")

    def __init__(self, nbytes: int, uses: tuple[int, ...]) -> None:
        self.nbytes = nbytes
        self.footprint_bytes = footprint(nbytes)  # that it takes in RAM: whole pages where it is large
        self.uses = uses  # plan positions at which it is read, sorted
        self.pins = 0  # claims that need it in RAM
        self.readers = 0  # threads that copy it from RAM now
        self.busy = False  # whether an I/O thread writes or loads it
        self.dropped = False  # whether its handle is gone

    @property
    def spilled(self) -> bool:
        """Whether the spill has its bytes, so that it can be evicted at once."""
        return False

    def leave_ram(self) -> None:
        """Let go of the bytes in RAM, if there are any."""


E = TypeVar("E", bound=Entry)


@dataclass(eq=False)
class Claim(Generic[E]):
    """A unit's claim on memory: chunks to pin in RAM, each once, and bytes."""

    pins: Sequence[E]
    left_bytes: int  # bytes for arrays, not yet turned into chunks
    scratch_bytes: int = 0  # bytes kept free for what a program takes from the heap
    pinned: bool = False  # whether the chunks know of these pins


class TierStats(NamedTuple):
    """Bytes of a tier: what is there now, and what was moved so far."""

    resident_bytes: int
    reserved_bytes: int
    peak_bytes: int  # largest sum of resident and reserved bytes
    read_bytes: int  # read from the spill
    written_bytes: int  # written to the spill


class Ledger(Generic[E]):
    """Counts the bytes of a tier and decides. Every call is made under the lock of the tier.

    ``write`` is called with each chunk that has to be written before it can leave; when that is done,
    ``written`` has to be called. Invariant: ``resident_bytes + reserved_bytes <= capacity_bytes``, and the
    scratch of the ``programs`` largest claims is reserved, as no more programs run at once. First
    leaves the chunk whose next use is furthest away (Belady's rule: the plan is known); of equals one that
    the spill has, which costs no writing; of these the one that was offered first. Small chunks leave last.
    """

    def __init__(self, capacity_bytes: int, write: Callable[[E], None], programs: int = ANY_PROGRAMS) -> None:
        self.capacity_bytes, self._write, self._programs = capacity_bytes, write, programs
        self.line: deque[Claim[E]] = deque()  # claims that wait, first come first served
        self.resident_bytes = self.reserved_bytes = self.peak_bytes = 0
        self._scratches: list[int] = []  # of the claims that were let in
        self.scratch_bytes = 0  # part of the reserved bytes: scratch of programs that may run at once
        self.small_bytes = 0  # resident bytes of arrays that have no pages of their own
        self.leaving_bytes = 0  # bytes of chunks being written so that they can leave
        self.read_bytes = self.written_bytes = 0
        # Bytes that chunks and claims do without, as the process has more than was predicted.
        self.withheld_bytes = 0
        self.position = -1  # plan position that runs now
        # Chunks in RAM or being loaded, in order of arrival, so that a simulation made again is the same.
        self._residents: dict[E, None] = {}
        self.is_resident: Callable[[E], bool] = self._residents.__contains__
        self._order: list[tuple[bool, float, bool, int, E]] = []  # a heap; items may be outdated
        self._numbers = count()
        self._least_bytes = min(SMALL_CHUNK_BYTES, capacity_bytes * SMALL_TIER_SHARE)
        # Called with resident and reserved bytes at each change.
        self.watch: Callable[[int, int], None] | None = None

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.resident_bytes - self.reserved_bytes

    @property
    def lendable_bytes(self) -> int:
        """Free bytes that are not withheld."""
        return self.free_bytes - self.withheld_bytes

    def _count(self, resident: int = 0, reserved: int = 0) -> None:
        """Add to the counts, and check the invariant."""
        self.resident_bytes += resident
        self.reserved_bytes += reserved
        assert self.resident_bytes >= 0 and self.reserved_bytes >= 0
        assert resident + reserved <= 0 or self.free_bytes >= 0, "the memory tier is over its capacity"
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + self.reserved_bytes)
        if self.watch is not None:
            self.watch(self.resident_bytes, self.reserved_bytes)

    def enter(self, entry: E, from_reserved: bool = False) -> None:
        """Count a chunk as resident, out of reserved bytes or out of free ones."""
        self._count(entry.footprint_bytes, -entry.footprint_bytes if from_reserved else 0)
        self.small_bytes += entry.footprint_bytes * (entry.footprint_bytes < LEAST_PAGED_BYTES)
        self._residents[entry] = None
        self._offer(entry)

    def _leave(self, entry: E) -> None:
        """Count a chunk as no longer resident, if it was."""
        if self.is_resident(entry):
            del self._residents[entry]
            entry.leave_ram()
            self._count(resident=-entry.footprint_bytes)
            self.small_bytes -= entry.footprint_bytes * (entry.footprint_bytes < LEAST_PAGED_BYTES)

    # --- what leaves first -----------------------------------------------------------------

    def _next_use(self, entry: E) -> float:
        """Plan position at which a chunk is next read; infinity: never."""
        at = bisect_right(entry.uses, self.position)
        return entry.uses[at] if at < len(entry.uses) else inf

    def _is_small(self, entry: E) -> bool:
        return entry.footprint_bytes < self._least_bytes

    def _offer(self, entry: E) -> None:
        """Make a chunk a candidate again, once it was read, unpinned, loaded, written or given other uses."""
        if entry.pins or entry.busy or entry not in self._residents:
            return
        order = self._is_small(entry), -self._next_use(entry), not entry.spilled, next(self._numbers)
        heappush(self._order, (*order, entry))
        if len(self._order) > 4 * len(self._residents) + 1000:
            self._order = []
            for resident in self._residents:
                self._offer(resident)

    def _victims(self) -> Iterator[E]:
        """Yield chunks that nothing holds, the first to leave first; one that stays must be offered again."""
        while self._order:
            _, use, dirty, _, entry = heappop(self._order)
            if entry.pins or entry.busy or entry.readers or entry not in self._residents:
                continue  # offered again when that ends
            if (-self._next_use(entry), not entry.spilled) != (use, dirty):
                self._offer(entry)
                continue
            yield entry

    # --- claims ----------------------------------------------------------------------------

    def admit(self, claim: Claim[E]) -> list[E] | None:
        """Pin the chunks of the first claim in line, and let it in if there is room for all of it.

        Returns the chunks that the caller has to load, busy until ``loaded``; None if the claim has to wait.
        Where no other claim holds anything and no chunk is leaving, one unit runs whatever is withheld.
        """
        assert self.line[0] is claim
        if not claim.pinned:
            claim.pinned = True
            for entry in claim.pins:
                entry.pins += 1
        absent = [entry for entry in claim.pins if not self.is_resident(entry)]
        need = self.need_bytes(claim)
        self.make_room(need)
        may_come = self.reserved_bytes or self.leaving_bytes
        if need > (self.lendable_bytes if may_come else self.free_bytes):
            return None
        if claim.scratch_bytes:
            self._scratches.append(claim.scratch_bytes)
        self._count(reserved=claim.left_bytes + self._count_scratch())
        for entry in absent:
            entry.busy = True
            self.enter(entry)
        self.line.popleft()
        return absent

    def need_bytes(self, claim: Claim[E]) -> int:
        """Return the bytes that have to be free for a claim: its own, and the pins that are not in RAM."""
        absent = sum(entry.footprint_bytes for entry in claim.pins if not self.is_resident(entry))
        scratch = self._scratch_of([*self._scratches, claim.scratch_bytes]) - self.scratch_bytes
        return claim.left_bytes + scratch + absent

    def _scratch_of(self, each: Iterable[int]) -> int:
        """Return the bytes that programs of so much scratch each can take, as far as they run at once."""
        return sum(nlargest(self._programs, each))

    def _count_scratch(self) -> int:
        """Count the scratch of the claims anew; returns the bytes by which it has grown."""
        before, self.scratch_bytes = self.scratch_bytes, self._scratch_of(self._scratches)
        return self.scratch_bytes - before

    def withdraw(self, claim: Claim[E]) -> None:
        """Take a claim that gives up out of the line."""
        self.line.remove(claim)
        self._unpin(claim)

    def put(self, claim: Claim[E], entry: E) -> None:
        """Turn bytes of a claim into a chunk. Raises BudgetError if fewer are left."""
        if entry.footprint_bytes > claim.left_bytes:
            raise BudgetError(f"put of {entry.footprint_bytes} bytes, {claim.left_bytes} are left reserved")
        claim.left_bytes -= entry.footprint_bytes
        self.enter(entry, from_reserved=True)

    def release(self, claim: Claim[E]) -> None:
        """Give back the pins and bytes of a claim. May be called twice."""
        self._unpin(claim)
        if claim.scratch_bytes:
            self._scratches.remove(claim.scratch_bytes)
        self._count(reserved=self._count_scratch() - claim.left_bytes)
        claim.left_bytes = claim.scratch_bytes = 0

    def _unpin(self, claim: Claim[E]) -> None:
        if claim.pinned:
            claim.pinned = False
            for entry in claim.pins:
                entry.pins -= 1
                self._offer(entry)

    # --- what has happened to a chunk ------------------------------------------------------

    def loaded(self, entry: E, done: bool = True) -> None:
        """Note that a chunk that had entered is in RAM now, or (``done=False``) could not be read."""
        entry.busy = False
        if done:
            self._offer(entry)
        else:
            self._leave(entry)

    def written(self, entry: E, done: bool = True) -> None:
        """Note that the spill has a chunk, or (``done=False``) has not; evict it if claims wait."""
        self.leaving_bytes -= entry.footprint_bytes
        entry.busy = False
        if done:
            self.written_bytes += entry.nbytes
        held = entry.pins or entry.readers or entry.dropped or not self.is_resident(entry)
        if done and self.line and not held:
            self._evict(entry)
        else:
            self._offer(entry)

    def drop(self, entry: E) -> bool:
        """Forget a chunk that nothing reads any more; False if an I/O thread has it, and drops it later."""
        entry.dropped = True
        if entry.busy:
            return False
        self._leave(entry)
        return True

    def advance(self, position: int) -> None:
        """Note that the unit at this position of the plan starts."""
        self.position = position

    def renew(self, plans: Iterable[tuple[E, tuple[int, ...]]]) -> None:
        """Begin a new pass, in which these chunks are read at these positions."""
        self.position = -1
        for entry, uses in plans:
            self.foresee(entry, uses)

    def foresee(self, entry: E, uses: tuple[int, ...]) -> None:
        """Note at which positions of the pass that runs a chunk is read."""
        entry.uses = uses
        self._offer(entry)

    def let_go(self, entry: E) -> None:
        """Note that a thread does not read a chunk in RAM any more."""
        entry.readers -= 1
        self._offer(entry)

    # --- what gives way --------------------------------------------------------------------

    def _evict(self, entry: E) -> None:
        assert entry.spilled and not entry.pins and not entry.readers
        self._leave(entry)

    def make_room(self, need_bytes: int) -> None:
        """Evict chunks, or have them written, until ``need_bytes`` are or will be free; small ones last."""
        short = need_bytes - self.lendable_bytes - self.leaving_bytes
        if short <= 0:
            return
        for entry in self._victims():
            if self._is_small(entry) and (self.reserved_bytes or self.leaving_bytes):
                self._offer(entry)
                break
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
        """Bring a spilled chunk back if it is read again soon; True: it has entered, the caller loads it.

        Spilled chunks that are read later give way, and none do while claims wait: free bytes are theirs.
        """
        soon = self.position + SOON_POSITIONS
        if self.line or self._next_use(entry) > soon or entry.busy or entry.dropped:
            return False
        kept: list[E] = []
        for victim in self._victims():
            is_last = self.lendable_bytes >= entry.footprint_bytes or self._next_use(victim) <= soon
            if victim.spilled and not is_last:
                self._evict(victim)
                continue
            kept.append(victim)
            if is_last or len(kept) > MOST_SKIPPED_CHUNKS:
                break
        for victim in kept:
            self._offer(victim)
        if self.lendable_bytes < entry.footprint_bytes:
            return False
        entry.busy = True
        self.enter(entry)
        return True
