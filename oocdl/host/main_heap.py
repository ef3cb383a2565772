"""Threads that allocate from the main heap of the process.

A process that had threads before, such as a notebook, has several heaps, which glibc gives to new threads in
turns. Another heap than the main one loses its pages whenever it is empty, so that each program faults them
in anew, and its end cannot be trimmed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from oocdl.host.heap import IS_SUPPORTED, use_one_heap

R = TypeVar("R")
NON_MAIN_ARENA, PROBE_BYTES = 4, 4096
"""The bit of a block's header that says that it lies in another heap than the main one, and the bytes of a
block that no thread keeps for itself."""
MOST_OTHERS = 256  # threads that are started in vain until enough have got the main heap; each takes 0.1 ms

_library = ctypes.CDLL("libc.so.6" if IS_SUPPORTED else None)
IS_TOLD = IS_SUPPORTED and bytes(_library.malloc) == bytes(ctypes.CDLL(None).malloc)
"""Whether the ``malloc`` in use is glibc's, whose blocks tell their heap, and not jemalloc's, say."""
if IS_TOLD:
    _library.malloc.restype, _library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)


def uses_main_heap() -> bool:
    """Whether this thread allocates from the main heap, as far as that is told."""
    if not IS_TOLD:
        return True
    block = _library.malloc(PROBE_BYTES)
    header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    _library.free(block)
    return not header & NON_MAIN_ARENA


class MainHeapThreads(Executor):
    """A pool of ``count`` threads that allocate from the main heap, or from any if too few get that one."""

    def __init__(self, count: int) -> None:
        use_one_heap()  # no new ones
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._found, self._missing = threading.Event(), threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._numbers = iter(range(count))
        self._is_over = False
        missing = count
        try:
            while missing and len(self._threads) < count + MOST_OTHERS:
                told: SimpleQueue[bool] = SimpleQueue()
                thread = threading.Thread(target=self._serve, args=(told,), daemon=True)
                thread.start()
                self._threads.append(thread)
                missing -= told.get()
        except BaseException:
            self.shutdown(wait=False)
            raise
        finally:  # those that got another heap were kept until now, or the next ones would get it
            for _ in range(missing):
                self._missing.release()
            self._found.set()

    def _serve(self, told: SimpleQueue[bool]) -> None:
        is_main = uses_main_heap()
        told.put(is_main)
        if is_main or (self._found.wait() and self._missing.acquire(blocking=False)):
            threading.current_thread().name = f"oocdl_{next(self._numbers)}"  # traces go by it
            while (call := self._calls.get()) is not None:
                call()
                del call  # and what it holds, while this thread waits

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        if self._is_over:
            raise RuntimeError("the threads have ended")
        future: Future[R] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let threads end after what was submitted. May be called twice."""
        self._is_over = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()
