"""Builds text of LLVM's intermediate representation: values, loops, loads, stores, and casts of vectors."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oocdl.fusion.jit import has_feature
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import is_float

KINDS = {"float32": "float", "float64": "double", "bfloat16": "bfloat", "int64": "i64", "int32": "i32"}
KINDS |= {"bool": "i1", "uint8": "i8"}
"""LLVM's name of each dtype that loops know."""


def constant(value: float, kind: str) -> str:
    """Round a number to ``kind`` and write it as LLVM does.

    >>> constant(0.01, "float")
    '0x3F847AE140000000'
    """
    if kind == "float":
        value = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}"


class Builder:
    """Collects the lines of one function; values are vectors of ``lanes`` elements of type ``kind``."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.variables: list[str] = []
        """Lines at the start of the function, which allocate variables."""
        self.declared: dict[str, str] = {}
        self.deviations: dict[tuple[str, float], str] = {}
        """(variance, eps) -> its ``deviation``, where that is the same in all rows."""
        self._count = 0
        self._block = "entry"
        self.lanes, self.kind = 1, "float"

    @property
    def type(self) -> str:
        """The vector type that operators work on, as LLVM writes it."""
        return f"<{self.lanes} x {self.kind}>"

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "double", "bfloat")

    def new(self, expression: str) -> str:
        """Add an instruction that makes a value; returns the value's name."""
        self._count += 1
        self.lines.append(f"  %v{self._count} = {expression}")
        return f"%v{self._count}"

    def two(self, name: str, x: str, y: str) -> str:
        return self.new(f"{name} {self.type} {x}, {y}")

    def do(self, line: str) -> None:
        """Add an instruction that makes no value."""
        self.lines.append(f"  {line}")

    def argument(self, number: int) -> str:
        """Return one of the numbers that the function is given the address of."""
        address = self.new(f"getelementptr i64, ptr %arguments, i64 {number}")
        return self.new(f"load i64, ptr {address}")

    def pointer(self, number: int) -> str:
        """Return one of these that is an address."""
        return self.new(f"inttoptr i64 {self.argument(number)} to ptr")

    def function(self, name: str) -> str:
        """Return the text of a module with what was added as its one function."""
        declared, body = "\n".join(self.declared.values()), "\n".join((*self.variables, *self.lines))
        return f"{declared}\ndefine void @{name}(ptr %arguments) {{\nentry:\n{body}\n  ret void\n}}\n"

    def splat(self, scalar: str) -> str:
        """Return a constant vector with ``scalar`` in each lane."""
        return f"<{', '.join([f'{self.kind} {scalar}'] * self.lanes)}>"

    def number(self, value: float) -> str:
        """Return a constant vector with a number in each lane."""
        return self.splat(constant(value, self.kind))

    def spread(self, scalar: str, kind: str) -> str:
        """Return a vector with the value ``scalar`` in each lane."""
        vector, mask = f"<{self.lanes} x {kind}>", f"<{self.lanes} x i32> zeroinitializer"
        first = self.new(f"insertelement {vector} poison, {kind} {scalar}, i64 0")
        return self.new(f"shufflevector {vector} {first}, {vector} poison, {mask}")

    def lanes_of(self, vector: str, width: int, numbers: Sequence[int]) -> str:
        """Return a vector of some lanes of one of ``width``, whose elements are of the type of now."""
        type_, mask = f"<{width} x {self.kind}>", ", ".join(f"i32 {number}" for number in numbers)
        return self.new(f"shufflevector {type_} {vector}, {type_} poison, <{len(numbers)} x i32> <{mask}>")

    def select(self, condition: str, yes: str, no: str) -> str:
        return self.new(f"select <{self.lanes} x i1> {condition}, {self.type} {yes}, {self.type} {no}")

    def call(self, name: str, type_: str, args: Sequence[str]) -> str:
        """Call one of LLVM's functions on vectors of floating-point numbers."""
        kind = {"float": "f32", "double": "f64", "bfloat": "bf16"}[self.kind]
        full = f"@llvm.{name}.v{self.lanes}{kind}"
        self.declared[full] = f"declare {type_} {full}({', '.join([type_] * len(args))})"
        return self.new(f"call {type_} {full}({', '.join(f'{type_} {arg}' for arg in args)})")

    def slot(self, type_: str, value: str = "zeroinitializer") -> str:
        """Add a variable with a value. It is allocated at the start: a loop would do so each time."""
        name = f"%s{len(self.variables)}"
        self.variables.append(f"  {name} = alloca {type_}")
        self.do(f"store {type_} {value}, ptr {name}")
        return name

    @contextmanager
    def loop(self, start: str, stop: str, step: int | str) -> Iterator[str]:
        """Write a loop around what is added inside; yields the index.

        It runs once at least, for ``start``, and goes on while the next index is less than ``stop``.
        """
        self._count += 1
        head, index, before = f"loop{self._count}", f"%i{self._count}", self._block
        self.do(f"br label %{head}")
        self.lines += [f"{head}:", ""]
        self._block, at = head, len(self.lines) - 1
        yield index
        following = self.new(f"add nsw i64 {index}, {step}")
        again = self.new(f"icmp slt i64 {following}, {stop}")
        latch, end = self._block, f"end{head}"
        self.lines[at] = f"  {index} = phi i64 [{start}, %{before}], [{following}, %{latch}]"
        self.do(f"br i1 {again}, label %{head}, label %{end}")
        self.lines.append(f"{end}:")
        self._block = end

    def load(self, dtype: str, address: str, step: str) -> str:
        """Load a vector; ``step``: "one" element for all, "next" to each other, else bytes between them."""
        if dtype == "bool":
            raw = self._load("i8", address, step)
            return self.new(f"icmp ne <{self.lanes} x i8> {raw}, zeroinitializer")
        return self._load(KINDS[dtype], address, step)

    def _load(self, kind: str, address: str, step: str) -> str:
        if step == "next":
            return self.new(f"load <{self.lanes} x {kind}>, ptr {address}, align 1")
        if step == "one":
            return self.spread(self.new(f"load {kind}, ptr {address}, align 1"), kind)
        value = "poison"
        for lane in range(self.lanes):
            place = self.at(address, self.new(f"mul i64 {step}, {lane}"))
            scalar = self.new(f"load {kind}, ptr {place}, align 1")
            value = self.new(f"insertelement <{self.lanes} x {kind}> {value}, {kind} {scalar}, i64 {lane}")
        return value

    def store(self, dtype: str, value: str, address: str, step: str) -> None:
        """Store a vector; ``step`` as in ``load``."""
        kind = KINDS[dtype]
        if dtype == "bool":
            value, kind = self.new(f"zext <{self.lanes} x i1> {value} to <{self.lanes} x i8>"), "i8"
        if step == "next" or self.lanes == 1:
            self.do(f"store <{self.lanes} x {kind}> {value}, ptr {address}, align 1")
            return
        for lane in range(self.lanes):
            scalar = self.new(f"extractelement <{self.lanes} x {kind}> {value}, i64 {lane}")
            place = self.at(address, self.new(f"mul i64 {step}, {lane}"))
            self.do(f"store {kind} {scalar}, ptr {place}, align 1")

    def add(self, first: str, second: str) -> str:
        """Return the sum of two numbers, which are indices."""
        return self.new(f"add i64 {first}, {second}")

    def element(self, address: str, kind: str, number: str) -> str:
        return self.new(f"getelementptr {kind}, ptr {address}, i64 {number}")

    def at(self, address: str, offset: str) -> str:
        """Return the address ``offset`` bytes further on."""
        return self.new(f"getelementptr i8, ptr {address}, i64 {offset}")


def cast(b: Builder, value: str, source: str, target: str) -> str:
    """Convert a vector of dtype ``source`` to dtype ``target``."""
    if source == target:
        return value
    if target == "bfloat16" and source != "float32":  # processors that round at all round float32
        return cast(b, cast(b, value, source, "float32"), "float32", target)
    if target == "bfloat16" and not has_feature("avx512bf16"):
        return _rounded(b, value)
    if source == "bfloat16" and not has_feature("avx512bf16"):
        return cast(b, _widened(b, value), "float32", target)
    how = "uitofp" if source == "bool" else "sitofp"
    if is_float(source):
        how = "fpext" if itemsize(source) < itemsize(target) else "fptrunc"
    return b.new(f"{how} <{b.lanes} x {KINDS[source]}> {value} to <{b.lanes} x {KINDS[target]}>")


def _rounded(b: Builder, value: str) -> str:
    """Round float32 to bfloat16, ties to even, by its bits.

    Where a processor has no instruction for that, LLVM calls a function to which no loop is linked.
    It must not see the reverse either: the maximum of two such numbers would be rounded in the same way.
    """
    number, whole = f"<{b.lanes} x float>", f"<{b.lanes} x i32>"
    bits = b.new(f"bitcast {number} {value} to {whole}")
    upper = b.new(f"lshr {whole} {bits}, splat (i32 16)")
    half = b.new(f"add {whole} {b.new(f'and {whole} {upper}, splat (i32 1)')}, splat (i32 32767)")
    nearest = b.new(f"lshr {whole} {b.new(f'add {whole} {bits}, {half}')}, splat (i32 16)")
    quiet = b.new(f"or {whole} {upper}, splat (i32 64)")
    is_nan = b.new(f"fcmp uno {number} {value}, {value}")
    kept = b.new(f"select <{b.lanes} x i1> {is_nan}, {whole} {quiet}, {whole} {nearest}")
    narrow = b.new(f"trunc {whole} {kept} to <{b.lanes} x i16>")
    return b.new(f"bitcast <{b.lanes} x i16> {narrow} to <{b.lanes} x bfloat>")


def _widened(b: Builder, value: str) -> str:
    """Convert bfloat16 to float32 by its bits: see ``_rounded``."""
    half, whole = f"<{b.lanes} x i16>", f"<{b.lanes} x i32>"
    bits = b.new(f"zext {half} {b.new(f'bitcast <{b.lanes} x bfloat> {value} to {half}')} to {whole}")
    return b.new(f"bitcast {whole} {b.new(f'shl {whole} {bits}, splat (i32 16)')} to <{b.lanes} x float>")
