"""Writes the text for LLVM of a chain's loop, which reads, computes, writes and sums.

The loop runs over five axes; the two inner ones are rows of lanes. In a row all members run on one
vector after the other, in registers. Each lane has a sum of its own: in the precision of the summed values
over at most ``CHUNK_ROWS`` rows, which is then added to the sum in memory in float64. Moments of a chunk of
rows are those of the distances to its first row; chunks are merged as Chan, Golub and LeVeque (1983) do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from oocdl.fusion.jit import has_feature
from oocdl.fusion.llvm_ir import KINDS, Builder
from oocdl.fusion.loop_ops import COMPARE, EXPONENTIALS, FLOATS, LOGIC, Emit, deviation
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import is_float

VECTOR_LANES = 16
"""Lanes of a vector: 512 bits of float32. LLVM takes several registers where they are smaller."""
CHUNK_ROWS = 64
"""Rows whose values are summed in their own precision, before their sum is added in float64."""
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
    """A sum over a column, or its moments: count, mean, and sum of squared distances to the mean."""

    column: int
    moments: bool

    @property
    def planes(self) -> int:
        """Number of arrays in memory that hold it."""
        return 3 if self.moments else 1


@dataclass(frozen=True)
class Loop:
    """The description of a loop: everything that its machine code depends on."""

    ops: tuple[Op, ...]
    reads: tuple[Stream, ...]
    writes: tuple[Stream, ...]
    sums: tuple[Sum, ...]
    lanes: int
    """Lanes of a row."""

    def write(self, name: str) -> str:
        """Return the text of an LLVM module whose one function is called ``name``."""
        return Writer(self).write(name)


class Writer:
    """Writes the function of one loop, which takes a pointer to its arguments."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.b = loop, Builder()
        self.dtypes = {stream.column: stream.dtype for stream in loop.reads}
        self.dtypes |= {op.out: op.dtype for op in loop.ops}
        streams = (*loop.reads, *loop.writes)
        self.extents = [self.b.argument(i) for i in range(OUTER_AXES + 1)]
        self.fields = [self._fields(OUTER_AXES + 1 + FIELDS_PER_ARRAY * i) for i in range(len(streams))]
        first = OUTER_AXES + 1 + FIELDS_PER_ARRAY * len(streams)
        self.sums: list[list[list[str]]] = []
        for one in loop.sums:
            self.sums.append([self._fields(first + FIELDS_PER_ARRAY * plane) for plane in range(one.planes)])
            first += FIELDS_PER_ARRAY * one.planes

    def _fields(self, first: int) -> list[str]:
        steps = (self.b.argument(first + i) for i in range(1, FIELDS_PER_ARRAY))
        return [self.b.pointer(first), *steps]

    def write(self, name: str) -> str:
        """Return the text of an LLVM module whose one function is called ``name``."""
        b = self.b
        with ExitStack() as loops:
            at = [loops.enter_context(b.loop("0", extent, 1)) for extent in self.extents[:-1]]
            bases = [self._base(fields, at) for fields in self.fields]
            sums = [[self._base(fields, at) for fields in planes] for planes in self.sums]
            first = loops.enter_context(b.loop("0", self.extents[-1], CHUNK_ROWS))
            end = b.new(f"add i64 {first}, {CHUNK_ROWS}")
            inside = b.new(f"icmp slt i64 {end}, {self.extents[-1]}")
            end = b.new(f"select i1 {inside}, i64 {end}, i64 {self.extents[-1]}")
            self._strips(bases, sums, first, end)
        return b.function(name)

    def _base(self, fields: Sequence[str], indices: Sequence[str]) -> str:
        address, *steps = fields
        for index, step in zip(indices, steps, strict=False):
            address = self.b.at(address, self.b.new(f"mul i64 {index}, {step}"))
        return address

    def _strips(self, bases: list[str], sums: list[list[str]], first: str, end: str) -> None:
        """Loop over the vectors of a row, as many at once as registers allow."""
        full, rest = divmod(self.loop.lanes, VECTOR_LANES)
        widths = [VECTOR_LANES] * full + ([rest] if rest else [])
        heavy = sum(EXPONENTIALS.get(op.name, 0) for op in self.loop.ops)
        most = 4 if len(self.loop.sums) < 2 and not heavy else 2 if heavy < 2 else 1
        many = full // most if full >= 2 * most else 0
        if many:
            with self.b.loop("0", str(many * most * VECTOR_LANES), most * VECTOR_LANES) as lane:
                self._strip(bases, sums, first, end, lane, [VECTOR_LANES] * most)
        for start in range(many * most, len(widths), most):
            self._strip(bases, sums, first, end, str(start * VECTOR_LANES), widths[start : start + most])

    def _strip(
        self, bases: list[str], sums: list[list[str]], first: str, end: str, lane: str, widths: list[int]
    ) -> None:
        """Compute some vectors of each row from ``first`` to ``end``."""
        b = self.b
        vectors = []
        for index, width in enumerate(widths):
            at = b.new(f"add i64 {lane}, {sum(widths[:index])}")
            vectors.append(_Vector(self, bases, sums, at, width, first))
        with b.loop(first, end, 1) as row:
            for vector in vectors:
                vector.row(row)
        count = b.new(f"sub i64 {end}, {first}")
        for vector in vectors:
            vector.flush(b.new(f"sitofp i64 {count} to double"))


class _Vector:
    """Writes the code for one vector of each row of a chunk."""

    def __init__(
        self, writer: Writer, bases: list[str], sums: list[list[str]], lane: str, width: int, first: str
    ) -> None:
        self.w, self.b, self.width, self.sums = writer, writer.b, width, sums
        loop, b = writer.loop, writer.b
        b.lanes = width
        self.lane = lane
        self.addresses = []
        for stream, base, fields in zip((*loop.reads, *loop.writes), bases, writer.fields, strict=True):
            step = {"one": "0", "next": str(itemsize(stream.dtype)), "far": fields[-1]}[stream.step]
            self.addresses.append(b.at(base, b.new(f"mul i64 {lane}, {step}")))
        self.constant = {
            stream.column: self._load(index, stream, self.addresses[index])
            for index, stream in enumerate(loop.reads)
            if not stream.rows
        }
        for op in loop.ops:
            if op.name == "Normalize" and op.dtype != "bfloat16" and op.ins[2] in self.constant:
                b.kind = KINDS[op.dtype]
                key = (self.constant[op.ins[2]], dict(op.attrs)["eps"])
                b.deviations[key] = deviation(b, *key)
        self.origins: dict[int, str] = {}
        if any(one.moments for one in loop.sums):
            values = self._values(first)
            self.origins = {one.column: values[one.column] for one in loop.sums if one.moments}
        self.totals = [
            [b.slot(f"<{width} x {KINDS[writer.dtypes[one.column]]}>") for _ in range(min(one.planes, 2))]
            for one in loop.sums
        ]

    def _load(self, index: int, stream: Stream, address: str) -> str:
        step = self.w.fields[index][-1] if stream.step == "far" else stream.step
        return self.b.load(stream.dtype, address, step)

    def _row_address(self, index: int, row: str) -> str:
        return self.b.at(self.addresses[index], self.b.new(f"mul i64 {row}, {self.w.fields[index][-2]}"))

    def _values(self, row: str) -> dict[int, str]:
        """Compute the values of all columns in a row: column -> name of its vector."""
        values = dict(self.constant)
        for index, stream in enumerate(self.w.loop.reads):
            if stream.rows:
                values[stream.column] = self._load(index, stream, self._row_address(index, row))
        for op in self.w.loop.ops:
            args = [values[column] for column in op.ins]
            values[op.out] = emit(self.b, op, args, self.w.dtypes[op.ins[0]])
        return values

    def row(self, row: str) -> None:
        """Read a row, compute its members, write results and add to the sums."""
        self.b.lanes = self.width
        loop = self.w.loop
        values = self._values(row)
        for index, stream in enumerate(loop.writes, len(loop.reads)):
            step = self.w.fields[index][-1] if stream.step == "far" else stream.step
            self.b.store(stream.dtype, values[stream.column], self._row_address(index, row), step)
        for one, slots in zip(loop.sums, self.totals, strict=True):
            value = values[one.column]
            self.b.kind = KINDS[self.w.dtypes[one.column]]
            if one.moments:
                value = self.b.new(f"fsub {self.b.type} {value}, {self.origins[one.column]}")
                square = self.b.new(f"fmul {self.b.type} {value}, {value}")
                self._add(slots[1], square)
            self._add(slots[0], value)

    def _add(self, slot: str, value: str) -> None:
        b = self.b
        old = b.new(f"load {b.type}, ptr {slot}")
        b.do(f"store {b.type} {b.new(f'fadd {b.type} {old}, {value}')}, ptr {slot}")

    def flush(self, count: str) -> None:
        """Add the totals of a chunk of ``count`` rows to those in memory."""
        b = self.b
        b.lanes = self.width
        for one, slots, planes in zip(self.w.loop.sums, self.totals, self.sums, strict=True):
            offset = b.new(f"mul i64 {self.lane}, 8")
            places = [b.at(plane, offset) for plane in planes]
            dtype = self.w.dtypes[one.column]
            found = [
                cast(b, b.new(f"load <{self.width} x {KINDS[dtype]}>, ptr {s}"), dtype, "float64")
                for s in slots
            ]
            old = [b.load("float64", place, "next") for place in places]
            b.kind = "double"
            new = [b.new(f"fadd {b.type} {old[0]}, {found[0]}")]
            if one.moments:
                origin = cast(b, self.origins[one.column], dtype, "float64")
                b.kind = "double"
                new = _merged(b, old, (b.spread(count, "double"), origin, found[0], found[1]))
            for place, value in zip(places, new, strict=True):
                b.store("float64", value, place, "next")


def _merged(b: Builder, old: Sequence[str], chunk: Sequence[str]) -> list[str]:
    """Merge the moments in memory (count, mean, squares) with those of a chunk.

    ``chunk``: its count, its origin, and the sum and the sum of squares of the distances to the origin.
    """

    def do(name: str, x: str, y: str) -> str:
        return b.new(f"{name} {b.type} {x}, {y}")

    (counted, mean, squares), (count, origin, total, square) = old, chunk
    shift = do("fdiv", total, count)
    inner = do("fsub", square, do("fmul", total, shift))
    all_ = do("fadd", counted, count)
    delta = do("fsub", do("fadd", origin, shift), mean)
    share = do("fmul", delta, do("fdiv", count, all_))
    between = do("fmul", do("fmul", delta, share), counted)
    return [all_, do("fadd", mean, share), do("fadd", squares, do("fadd", inner, between))]


def cast(b: Builder, value: str, source: str, target: str) -> str:
    """Convert a vector of dtype ``source`` to dtype ``target``."""
    how = conversion(source, target)
    if how is None:
        return value
    if target == "bfloat16" and source != "float32":  # processors that round at all round float32
        return cast(b, cast(b, value, source, "float32"), "float32", target)
    if target == "bfloat16" and not has_feature("avx512bf16"):
        return _rounded(b, value)
    if source == "bfloat16" and not has_feature("avx512bf16"):
        return cast(b, _widened(b, value), "float32", target)
    return b.new(f"{how} <{b.lanes} x {KINDS[source]}> {value} to <{b.lanes} x {KINDS[target]}>")


def _rounded(b: Builder, value: str) -> str:
    """Round float32 to bfloat16, ties to even, by its bits.

    Where a processor has no instruction for that, LLVM calls a function to which no loop is linked.
    It must not see the reverse either: the maximum of two such numbers would be rounded in the same way.
    """
    number, whole = f"<{b.lanes} x float>", f"<{b.lanes} x i32>"

    def each(word: int) -> str:
        return f"splat (i32 {word})"

    bits = b.new(f"bitcast {number} {value} to {whole}")
    upper = b.new(f"lshr {whole} {bits}, {each(16)}")
    half = b.new(f"add {whole} {b.new(f'and {whole} {upper}, {each(1)}')}, {each(0x7FFF)}")
    nearest = b.new(f"lshr {whole} {b.new(f'add {whole} {bits}, {half}')}, {each(16)}")
    quiet = b.new(f"or {whole} {upper}, {each(0x40)}")
    is_nan = b.new(f"fcmp uno {number} {value}, {value}")
    kept = b.new(f"select <{b.lanes} x i1> {is_nan}, {whole} {quiet}, {whole} {nearest}")
    narrow = b.new(f"trunc {whole} {kept} to <{b.lanes} x i16>")
    return b.new(f"bitcast <{b.lanes} x i16> {narrow} to <{b.lanes} x bfloat>")


def _widened(b: Builder, value: str) -> str:
    """Convert bfloat16 to float32 by its bits: see ``_rounded``."""
    half, whole = f"<{b.lanes} x i16>", f"<{b.lanes} x i32>"
    bits = b.new(f"zext {half} {b.new(f'bitcast <{b.lanes} x bfloat> {value} to {half}')} to {whole}")
    return b.new(f"bitcast {whole} {b.new(f'shl {whole} {bits}, splat (i32 16)')} to <{b.lanes} x float>")


def conversion(source: str, target: str) -> str | None:
    """Return LLVM's instruction that converts one dtype to another; None where they are the same.

    >>> conversion("float32", "bfloat16"), conversion("int64", "float32"), conversion("bool", "float32")
    ('fptrunc', 'sitofp', 'uitofp')
    """
    if source == target:
        return None
    if is_float(source):
        return "fpext" if itemsize(source) < itemsize(target) else "fptrunc"
    return "uitofp" if source == "bool" else "sitofp"


_TABLE: Mapping[str, Emit] = {**FLOATS, **COMPARE, **LOGIC}


def knows(op: Op, dtypes: Mapping[int, str]) -> bool:
    """Whether loops can compute a member; ``dtypes``: column -> dtype."""
    kinds = [dtypes[column] for column in op.ins]
    if any(kind not in KINDS for kind in (*kinds, op.dtype)):
        return False
    if op.name == "Cast":
        return is_float(op.dtype)
    if op.name == "Where":
        return kinds == ["bool", op.dtype, op.dtype]
    if op.name in LOGIC:
        return set(kinds) == {"bool"}
    if op.name in FLOATS:
        exact = op.dtype != "float64" or op.name not in EXPONENTIALS
        return exact and is_float(op.dtype) and set(kinds) == {op.dtype}
    return op.name in COMPARE and len(set(kinds)) == 1 and kinds[0] != "bool"


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
    result = _TABLE[op.name](b, args, dict(op.attrs))
    return cast(b, result, "float32", "bfloat16") if rounded and op.name in FLOATS else result
