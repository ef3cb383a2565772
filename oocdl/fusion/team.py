"""Runs a compiled loop on several threads at once: those of OpenMP that an engine's own kernels use.

A loop is cut into parts that depend on their number alone, so bits do not depend on which thread runs a part,
nor on whether there are any threads. Threads of Python would wait for its lock 0.1 ms before each loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.fusion.jit import Code, address_of
from oocdl.fusion.llvm_ir import Builder
from oocdl.graph.ir.graph import Array

SPLIT_ELEMENTS = 1 << 14
"""Fewest elements of a loop that is cut: to start threads takes some microseconds."""


@cache
def openmp(folder: Path) -> ctypes.CDLL | None:
    """Return GNU's OpenMP as a runtime in ``folder`` brings it; None if it brings none."""
    found = sorted(folder.glob("libgomp*.so*"))
    return ctypes.CDLL(str(found[0])) if found else None


@cache
def _fork(library: ctypes.CDLL) -> int:
    """Return the address of what each thread of a team runs: every so many-th part, row by row."""
    b = Builder()
    (parts, width), (code, rows) = map(b.argument, (0, 3)), map(b.pointer, (1, 2))
    bounds = b.element("%arguments", "i64", "4")
    first, step = (
        b.new(f"sext i32 {b.new(f'call i32 inttoptr (i64 {_address(library[name])} to ptr)()')} to i64")
        for name in ("omp_get_thread_num", "omp_get_num_threads")
    )
    with b.loop(first, parts, step) as part:
        begin = b.element(bounds, "i64", part)
        start, stop = (b.new(f"load i64, ptr {at}") for at in (begin, b.element(begin, "i64", "1")))
        with b.loop(start, stop, 1) as row:
            b.do(f"call void {code}(ptr {b.at(rows, b.new(f'mul i64 {row}, {width}'))})")
    return address_of(b.function("fork"), "fork")


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@dataclass(frozen=True)
class Team:
    """Threads that run a program together."""

    threads: int = 1
    library: ctypes.CDLL | None = None
    """The OpenMP that starts them; None: one thread does all of the work."""

    def run(self, code: Code, rows: Array, bounds: Sequence[int]) -> None:
        """Call ``code`` with the address of each row of arguments; ``bounds`` are those of the parts.

        Each part is done in order, and parts beside each other.
        """
        parts, width, first = len(bounds) - 1, rows.strides[0], rows.ctypes.data
        if self.library is None or parts == 1:
            for number in range(bounds[0], bounds[-1]):
                code(first + number * width)
            return
        table = np.array([parts, _address(code), first, width, *bounds], np.int64)
        where = ctypes.c_void_p(_fork(self.library)), ctypes.c_void_p(table.ctypes.data)
        self.library.GOMP_parallel(*where, ctypes.c_uint(parts), ctypes.c_uint(0))


ALONE = Team()


def bounds_of(count: int, parts: int) -> list[int]:
    """Return where each of so many parts of ``count`` begins, and the end of the last.

    >>> bounds_of(7, 2)
    [0, 3, 7]
    """
    parts = max(min(parts, count), 1)
    return [count * part // parts for part in range(parts + 1)]
