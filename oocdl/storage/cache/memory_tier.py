"""The RAM tier counts every byte of chunks and of running units in this process.

It cannot deadlock as long as the largest unit fits: a unit acquires all it needs at once (``Tier.reserve``)
and nothing more while it runs; waiters are served in FIFO order, and only the first may hold pins while it
waits; whatever no reservation pins can always be evicted, by threads that are not tasks and need no memory.
One lock guards all state; it is never held during I/O or copying, but of what is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from oocdl.errors import BudgetError
from oocdl.graph.ir.array_layout import LEAST_PAGED_BYTES, Array, DeviceArray, Order, in_memory_order, ordered
from oocdl.graph.ir.index import Region, as_slices
from oocdl.storage.cache.chunk import Chunk, Home, Slot, Uses, outermost
from oocdl.storage.cache.io_threads import Mover
from oocdl.storage.cache.ledger import ANY_PROGRAMS, Claim, TierStats
from oocdl.storage.cache.page_pool import Pool
from oocdl.storage.cache.spill_store import SpillStore


class Reservation:
    """Memory that one unit holds while it runs: chunks pinned in RAM, and bytes for new arrays."""

    def __init__(self, tier: Tier, claim: Claim[Slot], pins: Sequence[Chunk]) -> None:
        self._tier, self._claim = tier, claim
        self._pins = pins  # holding the handles keeps the chunks alive
        self._lent: list[Chunk] = []

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, order: Order = ()) -> Array:
        """Return an array of arbitrary contents, to compute in or to ``put``; page-aligned where it is large.

        ``order`` lists its axes from outermost to innermost in memory; empty, they lie as they are numbered.
        """
        return ordered(self._tier.pool.empty, shape, dtype, order)

    def lend(self, chunk: Chunk) -> Array | None:
        """Return the array of a chunk in RAM, read-only, to stay until ``release``; None: it is not there."""
        tier, slot = self._tier, chunk.slot
        if chunk.home is not tier:
            return None
        slot.settle()
        with tier.lock:
            array = slot.array
            if array is None or tier.ledger.line:
                return None
            slot.readers += 1
        self._lent.append(chunk)
        return chunk.seen(array)

    def put(
        self, array: Array, region: Region, uses: Uses = (), outer: int = 0, device: DeviceArray | None = None
    ) -> Chunk:
        """Turn ``footprint(array.nbytes)`` bytes of the reservation into a chunk that the tier owns.

        The array is taken over: it must have no gaps and must not change any more. ``uses`` lists the plan
        positions at which the chunk will be read, sorted. If it is spilled, strips along axis ``outer`` can
        be read in one go. With ``device`` the bytes are there, and come to the array when they are wanted.
        Raises BudgetError if fewer bytes are left.
        """
        stored, order = in_memory_order(array)
        slot = Slot(stored, uses, outermost(stored, order, outer), device)
        made = Chunk(self._tier, slot, region, order)
        with self._tier.lock:
            self._tier.ledger.put(self._claim, made.slot)
            self._tier.changed.notify_all()
        return made

    def release(self) -> None:
        """Unpin the chunks and give back the bytes that are left. May be called twice."""
        tier = self._tier
        with tier.lock:
            for chunk in self._lent:
                tier.ledger.let_go(chunk.slot)
            tier.ledger.release(self._claim)
            tier.pool.capacity_bytes = tier._paged_bytes()
            tier.changed.notify_all()
        self._pins, self._lent = (), []

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Tier(Mover, Home):
    """Keeps chunks of this process in ``capacity_bytes`` of RAM, and the rest in ``spill``, which it closes.

    ``before_mapping`` is called with the number of bytes that are about to be mapped; ``withheld_bytes``,
    called with the bytes that a unit asks for, says how much of the capacity has to stay unused because the
    process has more than was predicted. ``check_alone`` is called where that leaves a unit no room, so that
    it runs alone; it raises an error if even that is too much. Pages that arrays have left may take
    ``kept_bytes`` beyond the capacity. At most ``programs`` run at once. Any thread may call all methods.
    """

    def __init__(
        self,
        capacity_bytes: int,
        spill: SpillStore,
        before_mapping: Callable[[int], None] = lambda nbytes: None,
        withheld_bytes: Callable[[int], int] = lambda need_bytes: 0,
        check_alone: Callable[[], None] = lambda: None,
        kept_bytes: int = 0,
        programs: int = ANY_PROGRAMS,
    ) -> None:
        super().__init__(capacity_bytes, Pool(capacity_bytes + kept_bytes, before_mapping), spill, programs)
        self.capacity_bytes = capacity_bytes  # bytes that chunks and reservations may take together
        self._kept_bytes, self._withheld_bytes, self._check_alone = kept_bytes, withheld_bytes, check_alone

    # What can be asked without the lock of the tier; pages that are kept for the next arrays count as well.

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped for chunks and for arrays of ``Reservation.empty``."""
        return self.pool.mapped_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are reserved for scratch of programs, beside arrays."""
        return self.ledger.scratch_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of arrays that the process has."""
        return self.pool.touched_bytes + self.ledger.small_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of arrays and scratch that the process will have once units took all that they reserved."""
        counted = self.ledger.resident_bytes + self.ledger.reserved_bytes
        return max(counted, self.pool.mapped_bytes + self.scratch_bytes)

    @property
    def stats(self) -> TierStats:
        with self.lock:
            return TierStats(*(getattr(self.ledger, name) for name in TierStats._fields))

    # --- what executors call -------------------------------------------------------------

    def reserve(self, nbytes: int, pins: Sequence[Chunk] = (), scratch_bytes: int = 0) -> Reservation:
        """Wait until ``nbytes`` are free and every chunk of ``pins`` is in RAM, to stay there.

        ``scratch_bytes`` more are kept free for what the unit's program takes from the heap. Callers are
        served first come first served; none may hold a reservation. Raises BudgetError if the request is
        larger than the tier, StoreError or ResourceError if the spill has failed, ResourceError if the
        process has too much even for this unit alone.
        """
        unique = tuple({id(pin.slot): pin for pin in pins if pin.home is self}.values())
        need = nbytes + scratch_bytes + sum(pin.slot.footprint_bytes for pin in unique)
        if need > self.capacity_bytes:
            raise BudgetError(
                f"a unit needs {need} bytes of memory at once, the tier has "
                f"{self.capacity_bytes}; raise the budget or cut finer"
            )
        claim = Claim([pin.slot for pin in unique], nbytes, scratch_bytes)
        with self.lock:
            loads = self._acquire(claim)
            self.pool.shrink(self._paged_bytes())
            alone = self.ledger.lendable_bytes < 0
        reservation = Reservation(self, claim, unique)
        try:
            if alone:
                self._check_alone()
            while loads:
                self.load(loads.pop(0))
            with self.lock:  # another unit may be loading the others
                while any(pin.slot.array is None for pin in unique):
                    self.wait()
        except BaseException:
            with self.lock:
                for slot in loads:  # they do not come
                    self.ledger.loaded(slot, done=False)
            reservation.release()
            raise
        return reservation

    def adopt(self, array: Array, region: Region, uses: Uses = ()) -> Chunk:
        """Copy an array (a part of a larger message, or read at start-up) to a chunk of the tier.

        Never waits, as an event loop may call it: an array that finds no room is written to the spill at
        once.
        """
        stored, order = in_memory_order(array)
        slot = Slot(stored, uses)
        with self.lock:
            self.bury()
            self.ledger.make_room(slot.footprint_bytes)
            fits = slot.footprint_bytes <= self.ledger.lendable_bytes
            if fits:
                self.ledger.enter(slot)
                slot.readers += 1  # not to be evicted before it is here
        slot.array = None
        if fits:
            slot.array = self.pool.empty(stored.shape, stored.dtype)
            np.copyto(slot.array, stored)
        else:
            slot.file = self.spill.write(stored)
        with self.lock:
            if fits:
                self.ledger.let_go(slot)
            else:
                self.ledger.written_bytes += slot.nbytes
            self.changed.notify_all()
        return Chunk(self, slot, region, order)

    def advance(self, position: int) -> None:
        """Tell the plan position of the unit that starts now: next uses are counted from it."""
        with self.lock:
            self.ledger.advance(position)

    def renew(self, plans: Iterable[tuple[Chunk, Uses]]) -> None:
        """Begin a new pass: tell at which plan positions each of these chunks will be read in it."""
        with self.lock:
            self.ledger.renew((chunk.slot, uses) for chunk, uses in plans)

    def foresee(self, chunk: Chunk, uses: Uses) -> None:
        """Tell at which plan positions a chunk that has arrived will be read in the pass that runs."""
        with self.lock:
            self.ledger.foresee(chunk.slot, uses)

    def watch(
        self, spilled: Callable[[str, float, int], None] | None, counted: Callable[[int, int], None] | None
    ) -> None:
        """Call ``spilled`` at each transfer of the spill and ``counted`` at each change; None: no longer.

        ``spilled`` gets "spill read" or "spill write", when it began (``perf_counter``) and bytes;
        ``counted`` gets resident and reserved bytes, and once those of now. Any thread may make the calls.
        """
        with self.lock:
            self.spill.watch, self.ledger.watch = spilled, counted
            if counted is not None:
                counted(self.ledger.resident_bytes, self.ledger.reserved_bytes)

    def __enter__(self) -> Tier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what chunks and reservations call -----------------------------------------------

    def read(self, slot: Slot, box: Region, out: Array) -> None:
        slot.settle()
        with self.lock:
            if slot.array is not None and slot.nbytes < LEAST_PAGED_BYTES:
                out[...] = slot.array[as_slices(box)]
                return
            found = slot.array is not None or not self.ledger.promote(slot)
        if not found:
            self.load(slot)
        with self.lock:
            array, file = slot.array, slot.file
            if array is not None:
                slot.readers += 1
        if array is not None:
            try:
                np.copyto(out, array[as_slices(box)])
            finally:
                del array  # before it can be counted as free
                with self.lock:
                    self.ledger.let_go(slot)
                    self.changed.notify_all()
            return
        assert file is not None, "a chunk is neither in RAM nor in the spill"
        count = self.spill.read(file, box, out)
        with self.lock:
            self.ledger.read_bytes += count

    def view(self, slot: Slot) -> Array:
        slot.settle()
        with self.lock:
            if not slot.pins or slot.array is None:
                raise ValueError("array() needs a reservation that pins the chunk")
            return slot.array

    # --- under the lock ------------------------------------------------------------------

    def _paged_bytes(self) -> int:
        """Return the bytes of pages that arrays may have: the rest is for scratch, or withheld."""
        most_bytes = self.capacity_bytes + self._kept_bytes
        return max(most_bytes - self.scratch_bytes - self.ledger.withheld_bytes, 0)

    def _acquire(self, claim: Claim[Slot]) -> list[Slot]:
        """Wait until the claim is first in line and fits; returns the slots that the caller has to load."""
        self.ledger.line.append(claim)
        try:
            self.check()
            while True:
                if self.ledger.line[0] is claim:
                    self.bury()
                    self.ledger.withheld_bytes = self._withheld_bytes(self.ledger.need_bytes(claim))
                    if (loads := self.ledger.admit(claim)) is not None:
                        return loads
                self.wait()
        except BaseException:
            self.ledger.withdraw(claim)
            raise
        finally:
            self.changed.notify_all()
