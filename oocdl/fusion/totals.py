"""Writes the reductions of loops: a lane of a vector each, from row to row or from vector to vector.

Sums of many rows are sums of chunks, which are added in memory in float64; a sum that is complete at once
and of many numbers carries what its additions lose (Kahan, 1965). Moments of a chunk are those of the
distances to one of its numbers, of a row those to its mean; chunks are merged as Chan, Golub and LeVeque
(1983) do. A log-sum-exp is its largest number so far and the sum of exponentials of distances to that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oocdl.fusion.functions import function
from oocdl.fusion.llvm_ir import KINDS, Builder, cast

PLANES = {"ReduceSum": 1, "Moments": 3}
"""Reduction that may be added up in memory -> the arrays that hold it there."""
_LEAST = float(np.finfo(np.float32).min)


class Total:
    """The reduction of one column in the lanes of a vector; made, it is that of nothing."""

    def __init__(self, b: Builder, how: str, dtype: str, origin: str = "", careful: bool = False) -> None:
        """``origin``: what moments are distances to. ``careful``: whether losses of additions are carried."""
        self.b, self.how, self.dtype, self.width, self.origin = b, how, dtype, b.lanes, origin
        self.careful = careful or how == "LogSumExp"
        b.kind = KINDS[dtype]
        zero = "zeroinitializer"
        first = {"ReduceMax": [b.number(float("-inf"))], "LogSumExp": [b.number(_LEAST), zero]}
        starts = first.get(how, [zero] * (2 if how == "Moments" else 1))
        self.slots = [b.slot(b.type, start) for start in starts]
        sums = self.slots[1:] if how == "LogSumExp" else self.slots if self.careful else []
        self.lost = {slot: b.slot(b.type, zero) for slot in sums if how != "ReduceMax"}

    def add(self, value: str) -> None:
        """Write the code that takes in a vector."""
        b = self.b
        b.kind = KINDS[self.dtype]
        if self.how == "ReduceMax":
            self._keep(self.slots[0], b.call("maximum", b.type, [self._kept(self.slots[0]), value]))
        elif self.how == "LogSumExp":
            largest = self._kept(self.slots[0])
            above, falling = _compared(b, largest, value)
            one = b.number(1.0)
            self._add(self.slots[1], b.select(above, one, falling), b.select(above, falling, one))
            self._keep(self.slots[0], b.select(above, value, largest))
        elif self.how == "Moments":
            value = b.two("fsub", value, self.origin)
            self._add(self.slots[1], b.two("fmul", value, value))
            self._add(self.slots[0], value)
        else:
            self._add(self.slots[0], value)

    def _kept(self, slot: str) -> str:
        return self.b.new(f"load {self.b.type}, ptr {slot}")

    def _keep(self, slot: str, value: str) -> None:
        self.b.do(f"store {self.b.type} {value}, ptr {slot}")

    def _add(self, slot: str, value: str, scale: str | None = None) -> None:
        """Add a value to what a slot has, which is scaled before."""
        b, old = self.b, self._kept(slot)
        old = old if scale is None else b.two("fmul", old, scale)
        if slot not in self.lost:
            self._keep(slot, b.two("fadd", old, value))
            return
        lost = self._kept(self.lost[slot])
        value = b.two("fsub", value, lost if scale is None else b.two("fmul", lost, scale))
        new = b.two("fadd", old, value)
        less = b.two("fsub", b.two("fsub", new, old), value)
        beyond = b.two("fcmp uno", less, less)  # the sum is infinite, and stays so
        self._keep(self.lost[slot], b.select(beyond, b.number(0.0), less))
        self._keep(slot, new)

    def state(self) -> list[str]:
        """Write the code that reads what there is; sums are float64."""
        b = self.b
        b.lanes, b.kind = self.width, KINDS[self.dtype]
        found = [self._kept(slot) for slot in self.slots]
        return [cast(b, value, self.dtype, "float64") for value in found] if self.how in PLANES else found


def _compared(b: Builder, largest: str, value: str) -> tuple[str, str]:
    """Add whether ``value`` is above ``largest``, and the exponential of minus their distance."""
    above = b.two("fcmp ogt", value, largest)
    same = b.two("fcmp oeq", value, largest)  # infinities have no distance
    size = b.call("fabs", b.type, [b.two("fsub", value, largest)])
    falling = function("Exp")(b, [b.new(f"fneg {b.type} {size}")], {})
    return above, b.select(same, b.number(1.0), falling)


def _joined(b: Builder, how: str, mine: Sequence[str], other: Sequence[str]) -> list[str]:
    """Add the state of both; of moments they have the same origin."""
    if how in PLANES:
        return [b.two("fadd", x, y) for x, y in zip(mine, other, strict=True)]
    if how == "ReduceMax":
        return [b.call("maximum", b.type, [mine[0], other[0]])]
    above, falling = _compared(b, mine[0], other[0])
    first = b.select(above, b.two("fmul", mine[1], falling), mine[1])
    second = b.select(above, other[1], b.two("fmul", other[1], falling))
    return [b.select(above, other[0], mine[0]), b.two("fadd", first, second)]


def across(totals: Sequence[Total]) -> list[str]:
    """Write the code that joins all lanes of some totals of one reduction; returns the state of one lane."""
    b, how = totals[0].b, totals[0].how
    joined: dict[int, list[str]] = {}  # by width

    def put(width: int, state: list[str]) -> None:
        b.lanes = width
        joined[width] = _joined(b, how, joined[width], state) if width in joined else state

    for total in totals:
        state = total.state()
        b.kind = "double" if how in PLANES else KINDS[total.dtype]
        put(total.width, state)
    while (width := max(joined)) > 1:
        state, half = joined.pop(width), width // 2
        for part in [[b.lanes_of(one, width, range(at, at + half)) for one in state] for at in (0, half)]:
            put(half, part)
        if width % 2:
            put(1, [b.lanes_of(value, width, [width - 1]) for value in state])
    b.lanes = 1
    return joined[1]


def results(b: Builder, total: Total, state: Sequence[str], count: str) -> list[str]:
    """Write the code of a reduction's results; ``count``: the numbers that went into each, as a double."""
    if total.how == "LogSumExp":
        return [b.two("fadd", state[0], function("Log")(b, [state[1]], {}))]
    if total.how != "Moments":
        return [*state]
    origin, count = _origin(b, total), b.spread(count, "double")
    shift = b.two("fdiv", state[0], count)
    inner = b.two("fsub", state[1], b.two("fmul", state[0], shift))
    return [b.two("fadd", origin, shift), b.two("fdiv", inner, count)]


def _origin(b: Builder, total: Total) -> str:
    """Add the origin of moments in the lanes of now, as doubles; it is the same in all that are joined."""
    lanes = total.origin
    if b.lanes < total.width:
        b.kind = KINDS[total.dtype]
        lanes = b.lanes_of(lanes, total.width, range(b.lanes))
    origin = cast(b, lanes, total.dtype, "float64")
    b.kind = "double"
    return origin


def merge(total: Total, places: Sequence[str], count: str) -> None:
    """Write the code that adds a total of ``count`` rows to what is in memory, in float64, lane by lane."""
    b, state = total.b, total.state()
    b.kind = "double"
    old = [b.load("float64", place, "next") for place in places]
    b.kind = "double"
    new = [b.two("fadd", old[0], state[0])]
    if total.how == "Moments":
        new = _merged(b, old, (b.spread(count, "double"), _origin(b, total), *state))
    for place, value in zip(places, new, strict=True):
        b.store("float64", value, place, "next")


def _merged(b: Builder, old: Sequence[str], chunk: Sequence[str]) -> list[str]:
    """Merge the moments in memory (count, mean, squares) with those of a chunk.

    ``chunk``: its count, its origin, and the sum and the sum of squares of the distances to the origin.
    """
    do, (counted, mean, squares), (count, origin, total, square) = b.two, old, chunk
    shift = do("fdiv", total, count)
    inner = do("fsub", square, do("fmul", total, shift))
    all_ = do("fadd", counted, count)
    delta = do("fsub", do("fadd", origin, shift), mean)
    share = do("fmul", delta, do("fdiv", count, all_))
    between = do("fmul", do("fmul", delta, share), counted)
    return [all_, do("fadd", mean, share), do("fadd", squares, do("fadd", inner, between))]
