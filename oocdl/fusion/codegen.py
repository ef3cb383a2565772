"""Writes the text for LLVM of a chain's loop, which reads, computes, writes and reduces.

The loop runs over five axes; the two inner ones are rows of lanes. In a row all members run on one
vector after the other, in registers. Lanes are reduced each for itself, over the rows (``Loop.across``
is False), or all lanes of a row are joined (``totals``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from oocdl.fusion.llvm_ir import KINDS, Builder, cast
from oocdl.fusion.loop_ops import COMPARE, ENTRIES, EXPONENTIALS, FLOATS, LOGIC, deviation
from oocdl.fusion.totals import PLANES, Total, across, merge, results
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import is_float

VECTOR_LANES = 16
"""Lanes of a vector: 512 bits of float32. LLVM takes several registers where they are smaller."""
CHUNK_ROWS = 64
"""Rows, or vectors of a row, whose values are summed in their own precision. Sums of more carry what their
additions lose, or are added up in float64."""
OUTER_AXES = 3
"""Number of axes of the loop around rows and lanes."""
FIELDS_PER_ARRAY = OUTER_AXES + 3
"""Numbers that the arguments have for each array: its address, and its stride in bytes along each axis."""
Step = Literal["one", "next", "far"]
"""Memory layout of the lanes of a row: one element for all lanes, adjacent elements, or gaps between them."""


@dataclass(frozen=True)
class Op:
    """An elementwise member; ``ins`` and ``out`` are columns."""

    name: str
    attrs: tuple[tuple[str, Any], ...]
    ins: tuple[int, ...]
    out: int
    dtype: str


@dataclass(frozen=True)
class Stream:
    """An array that the loop reads or writes."""

    column: int
    dtype: str
    step: Step
    rows: bool
    """Whether its elements differ from row to row."""


@dataclass(frozen=True)
class Sum:
    """A reduction of a column."""

    column: int
    how: str
    results: tuple[Stream, ...]
    """Arrays that its results go to as soon as it is complete; none: it is added up in memory, in float64."""

    @property
    def planes(self) -> int:
        """Number of arrays in memory that hold it."""
        return 0 if self.results else PLANES[self.how]


@dataclass(frozen=True)
class Loop:
    """The description of a loop: everything that its machine code depends on."""

    ops: tuple[Op, ...]
    reads: tuple[Stream, ...]
    writes: tuple[Stream, ...]
    sums: tuple[Sum, ...]
    lanes: int
    across: bool
    """Whether reductions join the lanes of each row, which are complete then."""
    chunk_rows: int = CHUNK_ROWS
    """Rows of which each vector runs before the next: their reductions are put then, or added to memory."""
    numbers: tuple[tuple[int, float], ...] = ()
    """Columns of float32 that are a number everywhere."""

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All arrays that are read or written, element by element or as results of reductions."""
        return (*self.reads, *self.writes, *(one for total in self.sums for one in total.results))

    def write(self, name: str) -> str:
        """See ``jit.Source``."""
        return _Writer(self).write(name)


class _Writer:
    def __init__(self, loop: Loop) -> None:
        self.loop, self.b = loop, Builder()
        self.dtypes = {stream.column: stream.dtype for stream in loop.reads}
        self.dtypes |= {op.out: op.dtype for op in loop.ops} | dict.fromkeys(dict(loop.numbers), "float32")
        self.extents = [self.b.argument(i) for i in range(OUTER_AXES + 1)]
        arrays = len(loop.streams) + sum(one.planes for one in loop.sums)
        places = range(OUTER_AXES + 1, OUTER_AXES + 1 + FIELDS_PER_ARRAY * arrays, FIELDS_PER_ARRAY)
        self.fields = [
            [self.b.pointer(at), *map(self.b.argument, range(at + 1, at + FIELDS_PER_ARRAY))] for at in places
        ]
        """Address and strides of each array: those of the streams, then the planes of sums."""

    def write(self, name: str) -> str:
        b, rows = self.b, self.extents[-1]
        with ExitStack() as loops:
            at = [loops.enter_context(b.loop("0", extent, 1)) for extent in self.extents[:-1]]
            bases = [self._base(fields, at) for fields in self.fields]
            if self.loop.across:
                self._joined_row(bases, loops.enter_context(b.loop("0", rows, 1)))
            else:
                step = self.loop.chunk_rows
                first = loops.enter_context(b.loop("0", rows, step))
                end = b.new(f"add i64 {first}, {step}")
                inside = b.new(f"icmp slt i64 {end}, {rows}")
                stop = b.new(f"select i1 {inside}, i64 {end}, i64 {rows}")
                for lane, widths in self._strips():
                    self._strip(bases, first, stop, lane, widths)
        return b.function(name)

    def _base(self, fields: Sequence[str], indices: Sequence[str]) -> str:
        address, *steps = fields
        for index, step in zip(indices, steps, strict=False):
            address = self.b.at(address, self.b.new(f"mul i64 {index}, {step}"))
        return address

    def _widths(self) -> tuple[list[int], int, int]:
        """Return the widths of a row's vectors, how many run at once, and how often as many full ones do."""
        full, rest = divmod(self.loop.lanes, VECTOR_LANES)
        heavy = sum(EXPONENTIALS.get(op.name, 0) for op in self.loop.ops)
        heavy += sum(one.how == "LogSumExp" for one in self.loop.sums)
        most = 4 if len(self.loop.sums) < 2 and not heavy else 2 if heavy < 2 else 1
        many = full // most if full >= 2 * most else 0
        return [VECTOR_LANES] * full + ([rest] if rest else []), most, many

    def _strips(self) -> Iterator[tuple[str, list[int]]]:
        """Write what goes through a row; yields where vectors that run at once begin, and their widths."""
        widths, most, many = self._widths()
        if many:
            with self.b.loop("0", str(many * most * VECTOR_LANES), most * VECTOR_LANES) as lane:
                yield lane, [VECTOR_LANES] * most
        for start in range(many * most, len(widths), most):
            yield str(start * VECTOR_LANES), widths[start : start + most]

    def _strip(self, bases: list[str], first: str, end: str, lane: str, widths: list[int]) -> None:
        """Compute some vectors of each row from ``first`` to ``end``."""
        b, careful, vectors = self.b, self.loop.chunk_rows > CHUNK_ROWS, []
        for index, width in enumerate(widths):
            vector = _Vector(self, bases, b.add(lane, str(sum(widths[:index]))), width)
            of_moments = {one.column for one in self.loop.sums if one.how == "Moments"}
            values = vector.values(first) if of_moments else {}
            origins = {column: values[column] for column in of_moments}  # distances are to the first row
            vectors.append((vector, self._totals(self.loop.sums, origins, width, careful)))
        with b.loop(first, end, 1) as row:
            for vector, totals in vectors:
                vector.row(row, totals)
        count = b.new(f"sitofp i64 {b.new(f'sub i64 {end}, {first}')} to double")
        for vector, totals in vectors:
            self._put(bases, vector.lane, totals, count)

    def _totals(
        self, sums: Sequence[Sum], origins: Mapping[int, str], width: int, careful: bool
    ) -> list[Total]:
        self.b.lanes, dtypes = width, self.dtypes
        return [
            Total(self.b, one.how, dtypes[one.column], origins.get(one.column, ""), careful) for one in sums
        ]

    def _put(self, bases: list[str], lane: str, totals: Sequence[Total], count: str) -> None:
        """Put the results of a vector's totals of ``count`` rows, or add them to those in memory."""
        b = self.b
        for one, total, first in zip(self.loop.sums, totals, self._places(), strict=True):
            if one.results:
                at = [b.at(bases[i], b.new(f"mul i64 {lane}, {self.fields[i][-1]}")) for i in first]
                self._store(one, total, at, results(b, total, total.state(), count), first)
            else:
                offset = b.new(f"mul i64 {lane}, 8")
                merge(total, [b.at(bases[i], offset) for i in first], count)

    def _places(self) -> list[range]:
        """Return the numbers of the arrays that hold each sum, or its results."""
        found, result = [], len(self.loop.reads) + len(self.loop.writes)
        plane = len(self.loop.streams)
        for one in self.loop.sums:
            after = result + len(one.results), plane + one.planes
            found.append(range(result, after[0]) if one.results else range(plane, after[1]))
            result, plane = after
        return found

    def _store(self, one: Sum, total: Total, at: Sequence[str], values: Sequence[str], arrays: range) -> None:
        b = self.b
        for stream, address, value, array in zip(one.results, at, values, arrays, strict=True):
            source = "float64" if one.how in PLANES else total.dtype
            step = self.fields[array][-1] if stream.step == "far" else stream.step
            b.store(stream.dtype, cast(b, value, source, stream.dtype), address, step)

    def _joined_row(self, bases: list[str], row: str) -> None:
        """Compute one row, and put the results of what joins its lanes."""
        b = self.b
        strips = self._row_totals(self.loop.sums, self._means(bases, row))
        self._over_row(bases, lambda vector, place: vector.row(row, strips[place]))
        for number, (one, arrays) in enumerate(zip(self.loop.sums, self._places(), strict=True)):
            state, total = across([strip[number] for strip in strips]), strips[0][number]
            ends = [b.at(bases[i], b.new(f"mul i64 {row}, {self.fields[i][-2]}")) for i in arrays]
            values = results(b, total, state, str(float(self.loop.lanes)))
            self._store(one, total, ends, values, arrays)

    def _means(self, bases: list[str], row: str) -> dict[int, str]:
        """Compute a row's means of the columns that it has moments of: column -> a scalar.

        Distances to the mean are summed after that, as those to another number may all be much larger.
        """
        sums = [Sum(one.column, "ReduceSum", ()) for one in self.loop.sums if one.how == "Moments"]
        if not sums:
            return {}
        b, strips = self.b, self._row_totals(sums, {})

        def take(vector: _Vector, place: int) -> None:
            values = vector.values(row)
            for one, total in zip(sums, strips[place], strict=True):
                total.add(values[one.column])

        self._over_row(bases, take)
        means = {}
        for number, one in enumerate(sums):
            (total,), dtype = across([strip[number] for strip in strips]), self.dtypes[one.column]
            mean = cast(b, b.new(f"fdiv {b.type} {total}, {b.number(self.loop.lanes)}"), "float64", dtype)
            means[one.column] = b.new(f"extractelement <1 x {KINDS[dtype]}> {mean}, i64 0")
        return means

    def _row_totals(self, sums: Sequence[Sum], origins: Mapping[int, str]) -> list[list[Total]]:
        """Make the totals of the vectors that run at once, and of a shorter last one. Origins are scalars."""
        widths, most, _ = self._widths()
        careful, found = len(widths) > CHUNK_ROWS * most, []
        last = widths[-1:] if widths[-1] < VECTOR_LANES and len(widths) > most else []
        for width in widths[:most] + last:
            self.b.lanes = width
            spread = {c: self.b.spread(value, KINDS[self.dtypes[c]]) for c, value in origins.items()}
            found.append(self._totals(sums, spread, width, careful))
        return found

    def _over_row(self, bases: list[str], take: Callable[[_Vector, int], None]) -> None:
        """Write a row's vectors; ``take`` gets each, with the place of the totals of its width."""
        every, most, _ = self._widths()
        for lane, widths in self._strips():
            for place, width in enumerate(widths):
                is_last = width < VECTOR_LANES and len(every) > most
                at = self.b.add(lane, str(place * VECTOR_LANES))
                take(_Vector(self, bases, at, width), most if is_last else place)


class _Vector:
    """Writes the code for one vector of each row of a chunk."""

    def __init__(self, writer: _Writer, bases: list[str], lane: str, width: int) -> None:
        self.w, self.b, self.lane, self.width = writer, writer.b, lane, width
        loop, b = writer.loop, writer.b
        b.lanes = width
        self.addresses = []
        streams = (*loop.reads, *loop.writes)
        for stream, base, fields in zip(streams, bases, writer.fields, strict=False):
            step = {"one": "0", "next": str(itemsize(stream.dtype)), "far": fields[-1]}[stream.step]
            self.addresses.append(b.at(base, b.new(f"mul i64 {lane}, {step}")))
        still = [(index, stream) for index, stream in enumerate(loop.reads) if not stream.rows]
        self.constant = {one.column: self._load(index, one, self.addresses[index]) for index, one in still}
        for column, number in loop.numbers:
            b.kind = KINDS["float32"]
            self.constant[column] = b.number(number)
        for op in loop.ops:
            if op.name == "Normalize" and op.dtype != "bfloat16" and op.ins[2] in self.constant:
                b.kind = KINDS[op.dtype]
                key = (self.constant[op.ins[2]], dict(op.attrs)["eps"])
                b.deviations[key] = deviation(b, *key)

    def _load(self, index: int, stream: Stream, address: str) -> str:
        step = self.w.fields[index][-1] if stream.step == "far" else stream.step
        return self.b.load(stream.dtype, address, step)

    def _row_address(self, index: int, row: str) -> str:
        return self.b.at(self.addresses[index], self.b.new(f"mul i64 {row}, {self.w.fields[index][-2]}"))

    def values(self, row: str) -> dict[int, str]:
        """Compute the values of all columns in a row: column -> name of its vector."""
        self.b.lanes = self.width
        values = dict(self.constant)
        for index, stream in enumerate(self.w.loop.reads):
            if stream.rows:
                values[stream.column] = self._load(index, stream, self._row_address(index, row))
        for op in self.w.loop.ops:
            args = [values[column] for column in op.ins]
            values[op.out] = emit(self.b, op, args, self.w.dtypes[op.ins[0]])
        return values

    def row(self, row: str, totals: Sequence[Total]) -> None:
        values, loop = self.values(row), self.w.loop
        for index, stream in enumerate(loop.writes, len(loop.reads)):
            step = self.w.fields[index][-1] if stream.step == "far" else stream.step
            self.b.store(stream.dtype, values[stream.column], self._row_address(index, row), step)
        for one, total in zip(loop.sums, totals, strict=True):
            total.add(values[one.column])


@cache
def knows(name: str, kinds: tuple[str, ...], dtype: str) -> bool:
    """Whether loops can compute an operator on operands of dtypes ``kinds``, with a result of ``dtype``."""
    if any(kind not in KINDS for kind in (*kinds, dtype)):
        return False
    if name == "Cast":
        return is_float(dtype)
    if name == "Where":
        return kinds == ("bool", dtype, dtype)
    if name in LOGIC:
        return set(kinds) == {"bool"}
    if name in FLOATS:
        exact = dtype != "float64" or name not in EXPONENTIALS
        return exact and is_float(dtype) and set(kinds) == {dtype}
    return name in COMPARE and len(set(kinds)) == 1 and kinds[0] != "bool"


def emit(b: Builder, op: Op, args: Sequence[str], dtype: str) -> str:
    """Write the code of a member and return the name of its result; ``dtype``: that of its first operand."""
    if op.name == "Cast":
        return cast(b, args[0], dtype, op.dtype)
    if op.name == "Where":
        b.kind = KINDS[op.dtype]
        return b.select(args[0], args[1], args[2])
    rounded = dtype == "bfloat16"  # computed in float32
    if rounded:
        args = [cast(b, arg, dtype, "float32") for arg in args]
    b.kind = "float" if rounded else KINDS[dtype]
    result = ENTRIES[op.name](b, args, dict(op.attrs))
    return cast(b, result, "float32", "bfloat16") if rounded and op.name in FLOATS else result
