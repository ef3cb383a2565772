"""The loop of a map along one axis whose every result is a sum of a few weighted elements.

``y[b, o, a]`` is the sum of ``weights[t, o] * x[b, columns[t, o], a]`` over taps t, in their order: the bits
depend neither on the shape around the axis nor on the order of axes in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from oocdl.fusion.jit import compiled
from oocdl.fusion.llvm_ir import KINDS, Builder
from oocdl.graph.ir.graph import Array

DTYPES = ("float32", "float64")
"""dtypes that the loop computes in."""
_LANES = (64, 16, 8, 4, 2, 1)
_ARGUMENTS = ("x", "y", "columns", "weights", "before", "extent", "results", "taps", "after")


@dataclass(frozen=True)
class TapLoop:
    """See ``jit.Source``."""

    dtype: str
    lanes: int
    gathers: bool
    """Whether a vector holds results along the axis itself (``after`` is 1), not elements that lie side by
    side in each result."""

    def write(self, name: str) -> str:
        """See ``jit.Source``."""
        b = Builder()
        b.lanes, b.kind = self.lanes, KINDS[self.dtype]
        reads = [b.pointer] * 4 + [b.argument] * 5
        given = {_ARGUMENTS[number]: read(number) for number, read in enumerate(reads)}
        rows, row = given["results"], b.new(f"mul i64 {given['extent']}, {given['after']}")
        with b.loop("0", given["before"], 1) as at:
            x = b.element(given["x"], b.kind, b.new(f"mul i64 {at}, {row}"))
            first = b.new(f"mul i64 {at}, {rows}")
            if self.gathers:
                with b.loop("0", rows, self.lanes) as lane:
                    place = self._inside(b, lane, rows)
                    self._sum(b, given, x, place, b.element(given["y"], b.kind, b.add(first, place)))
            else:
                with b.loop("0", rows, 1) as result:
                    made = b.new(f"mul i64 {b.add(first, result)}, {given['after']}")
                    with b.loop("0", given["after"], self.lanes) as lane:
                        place = self._inside(b, lane, given["after"])
                        y = b.element(given["y"], b.kind, b.add(made, place))
                        self._sum(b, given, b.element(x, b.kind, place), result, y)
        return b.function(name)

    def _inside(self, b: Builder, lane: str, extent: str) -> str:
        """Return where a vector begins: the last one overlaps the one before, and writes the same again."""
        last = b.new(f"sub i64 {extent}, {self.lanes}")
        less = b.new(f"icmp slt i64 {lane}, {last}")
        return b.new(f"select i1 {less}, i64 {lane}, i64 {last}")

    def _sum(self, b: Builder, given: dict[str, str], x: str, result: str, y: str) -> None:
        """Sum over the taps of one result, or of those from ``result`` on, and store it at ``y``."""
        total = b.slot(b.type)
        with b.loop("0", given["taps"], 1) as tap:
            number = b.add(b.new(f"mul i64 {tap}, {given['results']}"), result)
            column = b.element(given["columns"], "i32", number)
            step = "next" if self.gathers else "one"
            weight = b.load(self.dtype, b.element(given["weights"], b.kind, number), step)
            if self.gathers:
                columns = b.load("int32", column, "next")
                value = "poison"
                for lane in range(self.lanes):
                    index = b.new(f"extractelement <{self.lanes} x i32> {columns}, i64 {lane}")
                    seen = b.element(x, b.kind, b.new(f"sext i32 {index} to i64"))
                    scalar = b.new(f"load {b.kind}, ptr {seen}, align 1")
                    value = b.new(f"insertelement {b.type} {value}, {b.kind} {scalar}, i64 {lane}")
            else:
                index = b.new(f"sext i32 {b.new(f'load i32, ptr {column}, align 1')} to i64")
                seen = b.element(x, b.kind, b.new(f"mul i64 {index}, {given['after']}"))
                value = b.load(self.dtype, seen, "next")
            before = b.new(f"load {b.type}, ptr {total}")
            b.do(f"store {b.type} {b.call('fma', b.type, [weight, value, before])}, ptr {total}")
        b.store(self.dtype, b.new(f"load {b.type}, ptr {total}"), y, "next")


def weigh(
    x: Array, axis: int, columns: npt.NDArray[np.int32], weights: npt.NDArray[np.float64], out: Array
) -> None:
    """Map ``axis`` of ``x`` by ``columns`` and ``weights`` ``[taps, results]``, into ``out``.

    Both arrays are of one of ``DTYPES``. ``x`` is copied if its axes lie in another order than those of
    ``out``, or with gaps; where ``out`` has gaps the result is made elsewhere, and copied.
    """
    if not out.size:
        return
    order = sorted(range(out.ndim), key=lambda place: -out.strides[place])
    place = order.index(axis)
    x, goal = np.ascontiguousarray(x.transpose(order)), out.transpose(order)
    made = goal if goal.flags.c_contiguous else np.empty(goal.shape, goal.dtype)
    before, after = prod(x.shape[:place]), prod(x.shape[place + 1 :])
    columns, seen = np.ascontiguousarray(columns), np.ascontiguousarray(weights, out.dtype)
    taps, results = columns.shape
    lanes = next(n for n in _LANES if n <= (results if after == 1 else after))
    addresses = [array.ctypes.data for array in (x, made, columns, seen)]
    arguments = np.array([*addresses, before, x.shape[place], results, taps, after], np.int64)
    compiled(TapLoop(out.dtype.name, lanes, after == 1))(arguments.ctypes.data)
    if made is not goal:
        goal[...] = made
