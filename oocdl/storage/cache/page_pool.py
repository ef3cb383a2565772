"""Memory for arrays of chunks, mapped from the system page by page and used again.

The C library's heap cannot keep a budget: between chunks that live long and temporaries it is left with
holes that stay resident (a U-Net counted at 1150 MiB took 2100). Arrays that are mapped one by one leave no
holes, but to fault in every page anew costs as much as the arithmetic. So arrays of chunks lie in segments of
their own: what an array leaves is a hole whose pages are kept for the next one, of whatever size, and given
back only where others are wanted and there are too many.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import prod
from operator import attrgetter, itemgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oocdl.graph.ir.array_layout import LEAST_PAGED_BYTES, Array, footprint

SEGMENT_BYTES = 64 << 20  # least address space that is mapped at once; pages come when they are touched
HUGE_PAGE_BYTES = 2 << 20  # size of a large page (``MADV_HUGEPAGE``)

_library = ctypes.CDLL(None, use_errno=True)


def _absent_bytes(address: int, size: int) -> int:
    """Return how many of ``size`` bytes from ``address`` on have no page yet."""
    pages = np.empty(size // mmap.PAGESIZE, np.uint8)
    if _library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
        return 0  # it was unmapped meanwhile
    return int(np.count_nonzero(pages & 1 == 0)) * mmap.PAGESIZE


class _Hole(NamedTuple):
    """A part of a segment in which no array lies."""

    start: int
    stop: int
    warm: bool  # whether it still has pages, which the next array can take without a fault

    @property
    def size(self) -> int:
        return self.stop - self.start


class _Segment:
    """One mapping of address space, in which arrays lie and leave holes."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.mapping = mmap.mmap(-1, size, flags=flags)
        self.address: int = np.frombuffer(self.mapping, np.uint8).__array_interface__["data"][0]
        self.size = size
        self.holes = [_Hole(0, size, warm=False)]  # by address; two that touch are not of one kind
        self._runs: list[list[_Hole]] | None = None  # made when they are asked for, until holes change

    def _advise(self, advice: str, start: int, stop: int) -> None:
        """Give ``madvise`` for the whole large pages between ``start`` and ``stop``."""
        first = -(-(self.address + start) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES - self.address
        last = (self.address + stop) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - self.address
        if last > first and hasattr(mmap, advice):
            self.mapping.madvise(getattr(mmap, advice), first, last - first)

    def runs(self) -> list[list[_Hole]]:
        """Return the holes in groups that touch each other."""
        if self._runs is None:
            self._runs, end = [], -1
            for hole in self.holes:
                if hole.start == end:
                    self._runs[-1].append(hole)
                else:
                    self._runs.append([hole])
                end = hole.stop
        return self._runs

    def take(self, start: int, size: int) -> None:
        """Put an array at ``start``; pages that it takes anew may be large ones, which cost fewer faults."""
        for hole in self.holes:
            if not hole.warm:
                self._advise("MADV_HUGEPAGE", max(hole.start, start), min(hole.stop, start + size))
        self.set(start, start + size, None)

    def set(self, start: int, stop: int, warm: bool | None) -> None:
        """Make a hole, joined with those of its kind that it touches; ``warm`` is None for no hole."""
        first = bisect_left(self.holes, start, key=attrgetter("stop"))
        last = bisect_right(self.holes, stop, key=attrgetter("start"))
        parts = [] if warm is None else [_Hole(start, stop, warm)]
        for hole in self.holes[first:last]:
            parts += [] if hole.start >= start else [_Hole(hole.start, min(hole.stop, start), hole.warm)]
            parts += [] if hole.stop <= stop else [_Hole(max(hole.start, stop), hole.stop, hole.warm)]
        joined: list[_Hole] = []
        for part in sorted(parts):
            if joined and (joined[-1].stop, joined[-1].warm) == (part.start, part.warm):
                part = _Hole(joined.pop().start, part.stop, part.warm)
            joined.append(part)
        self.holes[first:last], self._runs = joined, None

    def cool(self, hole: _Hole, size: int) -> None:
        """Give the pages of the last ``size`` bytes of a hole back to the system."""
        start = hole.stop - size
        self.mapping.madvise(mmap.MADV_DONTNEED, start, size)
        self._advise("MADV_NOHUGEPAGE", start, hole.stop)
        self.set(start, hole.stop, warm=False)


_Lent = tuple[_Segment, int, int]  # where an array lies: start and size
_Place = tuple[int, int, int]
"""A position at which a new array could lie; the least is the best. Bytes of the array that have no pages
yet, bytes of the run of holes that would be left around it (long runs stay long), and where it starts."""


def _places(segment: _Segment, size: int) -> Iterator[_Place]:
    """Yield positions in each run of holes that is long enough: its ends, and those of its warm holes."""
    for run in segment.runs():
        first, last = run[0].start, run[-1].stop
        slack = last - first - size
        if slack < 0:
            continue
        if len(run) == 1:  # as most are: one end is as good as the other
            yield (0 if run[0].warm else size), slack, first
            continue
        starts = {first, last - size}
        for hole in run:
            if hole.warm:
                starts |= {hole.start, hole.stop - size}
        begins = [hole.start for hole in run]
        before = [0, *accumulate(hole.size * hole.warm for hole in run)]
        for start in starts:
            if first <= start and start + size <= last:
                warm = 0
                for at, sign in ((start + size, 1), (start, -1)):
                    index = bisect_right(begins, at) - 1
                    warm += sign * (before[index] + (at - begins[index]) * run[index].warm)
                yield size - warm, slack, start


class _Block:
    """Lends memory to one array, and queues it for return when the array and all its views are gone."""

    __slots__ = ("__array_interface__", "_lent", "_returned")

    def __init__(self, lent: _Lent, returned: SimpleQueue[_Lent]) -> None:
        segment, start, size = lent
        self.__array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (segment.address + start, False),
        }  # fmt: skip
        self._lent, self._returned = lent, returned

    def __del__(self) -> None:
        # SimpleQueue.put takes no lock of Python's: the collector may run this anywhere.
        self._returned.put(self._lent)


class Pool:
    """Lends page-aligned arrays, and keeps the pages of returned ones up to ``capacity_bytes`` in all.

    ``before_mapping`` is called with the number of bytes that are about to be taken from the system.
    """

    def __init__(self, capacity_bytes: int, before_mapping: Callable[[int], None] = lambda _: None) -> None:
        self.capacity_bytes, self._before_mapping = capacity_bytes, before_mapping
        self.mapped_bytes = 0  # that have pages, or will: lent, or kept for the next array
        self._fresh: dict[int, int] = {}
        """Address of each array that took new pages -> its bytes, until all of them were seen to be there."""
        self._counting = threading.Lock()  # for touched_bytes, which shall not wait for the other lock
        self._returned: SimpleQueue[_Lent] = SimpleQueue()
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a C-contiguous array with arbitrary contents."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        if nbytes < LEAST_PAGED_BYTES:
            return np.empty(shape, kind)
        with self._lock:
            lent = self._take(footprint(nbytes))
        block: Any = _Block(lent, self._returned)
        return np.asarray(block)[:nbytes].view(kind).reshape(shape)

    @property
    def touched_bytes(self) -> int:
        """Bytes of ``mapped_bytes`` that the process has: pages come as they are first written."""
        with self._counting:
            absent = {address: _absent_bytes(address, size) for address, size in self._fresh.items()}
            self._fresh = {address: self._fresh[address] for address, nbytes in absent.items() if nbytes}
            return self.mapped_bytes - sum(absent.values())

    def shrink(self, capacity_bytes: int) -> None:
        """Change the capacity; give back pages that are not lent and go beyond it."""
        with self._lock:
            self.capacity_bytes = capacity_bytes
            if self.mapped_bytes > capacity_bytes:
                self._drain()
                self._cool(self.mapped_bytes - capacity_bytes)

    def _take(self, size: int) -> _Lent:
        self._drain()
        best = self._best(size)
        if best is None:
            self._segments.append(_Segment(max(size, SEGMENT_BYTES)))
            best = self._best(size)
            assert best is not None, "a new segment has room"
        (cold, _, start), segment = best
        segment.take(start, size)
        if cold:
            self._cool(self.mapped_bytes + cold - self.capacity_bytes)
            self._before_mapping(cold)
            with self._counting:
                self._fresh[segment.address + start] = size
                self.mapped_bytes += cold
        return segment, start, size

    def _best(self, size: int) -> tuple[_Place, _Segment] | None:
        """Return where an array fits best, of equal places in the oldest segment; None if it fits nowhere."""
        found = ((place, segment) for segment in self._segments for place in _places(segment, size))
        return min(found, key=itemgetter(0), default=None)

    def _drain(self) -> None:
        while True:
            try:
                segment, start, size = self._returned.get_nowait()
            except Empty:
                return
            with self._counting:
                self._fresh.pop(segment.address + start, None)
            segment.set(start, start + size, warm=True)

    def _cool(self, nbytes: int) -> None:
        """Give back ``nbytes`` of the pages of holes, the shortest holes first, or all there are."""
        warm = [(hole, segment) for segment in self._segments for hole in segment.holes if hole.warm]
        for hole, segment in sorted(warm, key=lambda pair: pair[0].size):
            if nbytes <= 0:
                break
            size = min(hole.size, footprint(max(nbytes, LEAST_PAGED_BYTES)))
            segment.cool(hole, size)
            self.mapped_bytes -= size
            nbytes -= size
        self._segments = [s for s in self._segments if s.holes != [_Hole(0, s.size, warm=False)]]
