"""Memory for arrays, mapped from the system page by page and used again.

The C library's heap cannot keep a budget: chunks live long, temporaries live short,
and between them it is left with holes that stay resident (a U-Net counted at 1150 MiB
took 2100). Mapped and unmapped one by one, arrays leave no holes, but every page is
faulted in anew, which costs as much as the arithmetic. So arrays of chunks have
mappings of their own, which go back to the pool when the last view of them dies.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from math import prod
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.graph.memory import SMALL_BYTES, footprint

Array = npt.NDArray[Any]

HUGE_BYTES = 2 << 20
"""Mappings of this size on ask for large pages, which cost fewer faults."""


class _Block:
    """A mapping lent to one array; goes back when the array and all its views are gone."""

    __slots__ = ("__array_interface__", "_mapping", "_returned")

    def __init__(self, mapping: mmap.mmap, returned: SimpleQueue[mmap.mmap]) -> None:
        # The view is let go at once: a mapping with a view open cannot be resized.
        address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3, "shape": (len(mapping),), "typestr": "|u1", "data": (address, False),
        }  # fmt: skip
        self._mapping = mapping
        self._returned = returned

    def __del__(self) -> None:
        # SimpleQueue.put takes no lock of Python's: the collector may run this anywhere.
        self._returned.put(self._mapping)


class Pool:
    """Lends page-aligned arrays. At most ``capacity_bytes`` are mapped, unless more are lent.

    ``before_mapping`` is told how many bytes more are about to be mapped.

    >>> pool = Pool(1 << 20)
    >>> first = pool.empty((256, 256), np.float32)
    >>> first.ctypes.data % 4096, pool.mapped_bytes
    (0, 262144)
    >>> del first
    >>> pool.empty((65536,), np.float32).nbytes, pool.mapped_bytes
    (262144, 262144)
    """

    def __init__(self, capacity_bytes: int, before_mapping: Callable[[int], None] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._before_mapping = before_mapping or (lambda nbytes: None)
        self.mapped_bytes = 0
        """Lent, and kept for the next."""
        self._returned: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._kept: dict[int, list[mmap.mmap]] = {}  # by size, those used longest ago first
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array with arbitrary contents; C-contiguous."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        if nbytes < SMALL_BYTES:
            return np.empty(shape, kind)
        with self._lock:
            mapping = self._take(footprint(nbytes))
        block: Any = _Block(mapping, self._returned)
        return np.asarray(block)[:nbytes].view(kind).reshape(shape)

    def clear(self) -> None:
        """Unmap everything that is not lent."""
        with self._lock:
            self._drain()
            while self._kept:
                self._unmap(next(iter(self._kept)))

    def shrink(self, capacity_bytes: int) -> None:
        """Change the capacity; unmap what is not lent and goes beyond it."""
        with self._lock:
            self.capacity_bytes = capacity_bytes
            if self.mapped_bytes > capacity_bytes:
                self._drain()
                while self._kept and self.mapped_bytes > capacity_bytes:
                    self._unmap(next(iter(self._kept)))

    def _take(self, size: int) -> mmap.mmap:
        self._drain()
        if size in self._kept:
            return self._pop(size)
        if self.mapped_bytes + size > self.capacity_bytes and self._kept:
            # Another size changes: pages that both have are not faulted in again.
            near = min(self._kept, key=lambda kept: abs(kept - size))
            while self.mapped_bytes + size - near > self.capacity_bytes and self._others(near):
                self._unmap(next(kept for kept in self._kept if kept != near or len(self._kept[near]) > 1))
            mapping = self._pop(near)
            self._before_mapping(max(size - near, 0))
            mapping.resize(size)
            self.mapped_bytes += size - near
            return mapping
        self._before_mapping(size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.mapped_bytes += size
        return mapping

    def _others(self, size: int) -> bool:
        return len(self._kept) > 1 or len(self._kept[size]) > 1

    def _drain(self) -> None:
        while True:
            try:
                mapping = self._returned.get_nowait()
            except Empty:
                return
            self._kept.setdefault(len(mapping), []).append(mapping)

    def _pop(self, size: int) -> mmap.mmap:
        kept = self._kept[size]
        mapping = kept.pop()  # the warmest
        if not kept:
            del self._kept[size]
        return mapping

    def _unmap(self, size: int) -> None:
        self._pop(size).close()
        self.mapped_bytes -= size
