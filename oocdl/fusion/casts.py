"""Writes conversions between dtypes as instructions of LLVM on vectors."""

from __future__ import annotations

from oocdl.fusion.jit import has_feature
from oocdl.fusion.llvm_ir import KINDS, Builder
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import is_float


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
