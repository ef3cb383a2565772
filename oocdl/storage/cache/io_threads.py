"""Threads that move chunks between RAM and the spill. They are not tasks and need no memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from oocdl.errors import OocdlError, StoreError
from oocdl.graph.ir.index import whole
from oocdl.storage.cache.chunk import Slot
from oocdl.storage.cache.ledger import Ledger
from oocdl.storage.cache.page_pool import Pool
from oocdl.storage.cache.spill_store import SpillStore

IO_THREADS = 2  # threads that write to the spill; a chunk is read by the thread that needs it


class Mover:
    """Runs the I/O threads of a tier; holds its ledger and lock, their queues, the error that stops all."""

    def __init__(self, capacity_bytes: int, pool: Pool, spill: SpillStore, programs: int) -> None:
        self._writers = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="tier-io")
        self.ledger: Ledger[Slot] = Ledger(capacity_bytes, self._write_soon, programs)
        self.pool, self.spill = pool, spill
        # Entered itself, never by way of ``changed``: a signal in the entry of a Condition leaves it locked.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.error: OocdlError | None = None
        # SimpleQueue.put may be called from a finalizer, wherever that interrupts us. Slots are taken out
        # under the lock only: a claim sees all that is dropped before it evicts anything.
        self._dead: SimpleQueue[Slot] = SimpleQueue()
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # False: the last
        self._closed = False
        self._burier = threading.Thread(target=self._serve_dead, name="tier-drop", daemon=True)
        self._burier.start()

    def close(self) -> None:
        """Stop the threads and delete the spill; waiters get a StoreError. May be called twice."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.error = self.error or StoreError("the memory tier is closed")
            self.changed.notify_all()
        self._wakes.put(False)
        self._burier.join()
        with self.lock:
            self.bury()
        self._writers.shutdown()
        self.spill.close()
        self.pool.shrink(0)

    # --- called with ``lock`` held; no I/O is done under it ------------------------------

    def check(self) -> None:
        """Raise the error that stopped the tier, if there is one."""
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def wait(self) -> None:
        """Wait for any change; raises the error that stopped the tier."""
        self.check()
        self.changed.wait()
        self.check()

    def bury(self) -> None:
        """Count all dropped chunks as gone at once; their files may be written over."""
        for _ in range(self._dead.qsize()):
            slot = self._dead.get()
            if self.ledger.drop(slot):
                file, slot.file = slot.file, None
                if file is not None:
                    self.spill.remove(file)
                self.changed.notify_all()

    def _write_soon(self, slot: Slot) -> None:
        if not self._closed:
            self._writers.submit(self.write, slot)

    # --- anywhere ------------------------------------------------------------------------

    def drop(self, slot: Slot) -> None:
        """Queue a chunk whose handle is gone; a device needs no lock to let go of it."""
        slot.device = None
        if not self._closed:
            self._dead.put(slot)
            self._wakes.put(True)  # the slot itself would keep its memory

    def _serve_dead(self) -> None:
        while self._wakes.get():
            with self.lock:
                self.bury()

    def write(self, slot: Slot) -> None:
        """Write a chunk to the spill; the ledger then evicts it if claims still wait."""
        array, file, error = slot.array, None, None
        if array is not None and not slot.dropped and not self._closed:
            try:
                slot.settle()
                file = self.spill.write(array, slot.outer)
            except Exception as failure:  # kept for those who wait: this thread must live on
                error = failure
        del array
        with self.lock:
            if file is not None:
                slot.file = file
            self.ledger.written(slot, done=file is not None)
            self._finish(slot, error)

    def load(self, slot: Slot) -> None:
        """Bring a chunk that is counted as resident back from the spill."""
        array = error = None
        file = slot.file
        if file is not None and not slot.dropped and not self._closed:
            try:
                array = self.pool.empty(slot.shape, slot.dtype)
                count = self.spill.read(file, whole(slot.shape), array)
            except Exception as failure:  # raised by the reserve() that waits for it
                array, error = None, failure
        with self.lock:
            if array is not None:
                slot.array = array
                self.ledger.read_bytes += count
            self.ledger.loaded(slot, done=array is not None)
            self._finish(slot, error)

    def _finish(self, slot: Slot, error: Exception | None) -> None:
        """Note that a thread is done with a chunk, and the first error that any met."""
        if error is not None and self.error is None:
            if not isinstance(error, OocdlError):
                error = StoreError(f"spilling failed: {error!r}")
            self.error = error
        if slot.dropped:
            self.drop(slot)
        self.changed.notify_all()
