"""Writes the elementwise operators of loops as instructions of LLVM on vectors.

Every elementwise operator stands in one of these tables, by its formula if it has one, but functions without
polynomials: loops would call the C library a number at a time. Each entry takes the builder, its operands
(names of values) and the node's attributes, and gives the name of the result. Arithmetic is as the
operators are defined, never contracted or reordered: a fused chain rounds where its members do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oocdl.fusion.functions import FUNCTIONS, function
from oocdl.fusion.llvm_ir import Builder
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute
from oocdl.ops.pointwise import Row

Emit = Callable[[Builder, Sequence[str], Mapping[str, Any]], str]
LOOPS_VERSION = "10"
"""Version of what loops compute, which kernels engines call, and what transforms draw. It changes with the
bits of results: a run that goes on with another one says so."""


def _two(name: str) -> Emit:
    """Return the entry of an operator that is one instruction of two operands."""
    return lambda b, args, attrs: b.two(name, *args)


def _call(name: str) -> Emit:
    """Return the entry of an operator that is a function of LLVM on floating-point numbers."""
    return lambda b, args, attrs: b.call(name, b.type, args)


def _compare(floats: str, integers: str) -> Emit:
    return lambda b, args, attrs: b.two(f"fcmp {floats}" if b.is_float else f"icmp {integers}", *args)


def deviation(b: Builder, variance: str, eps: float) -> str:
    """Return the factor of centred values, ``1 / sqrt(variance + eps)``."""
    if (variance, eps) not in b.deviations:
        moved = b.two("fadd", variance, b.number(eps))
        return b.two("fdiv", b.number(1.0), b.call("sqrt", b.type, [moved]))
    return b.deviations[variance, eps]


def _normalize(b: Builder, args: Sequence[str], attrs: Mapping[str, Any]) -> str:
    x, mean, variance = args
    scale = deviation(b, variance, attrs["eps"])
    return b.two("fmul", b.two("fsub", x, mean), scale)


def _by_formula(row: Row) -> Emit:
    """Return the entry of an operator whose formula has primitives of loops alone."""

    def emit(b: Builder, args: Sequence[str], attrs: Mapping[str, Any]) -> str:
        def apply(op: str, given: list[str | float]) -> str:
            return _PRIMITIVES[op](b, [g if isinstance(g, str) else b.number(g) for g in given], {})

        return compute(row.steps(attrs), args, apply)

    return emit


_ARITHMETIC: Mapping[str, Emit] = {
    **{op: _two(f"f{op.lower()}") for op in ("Add", "Sub", "Mul", "Div")},
    "Max": _call("maximum"), "Min": _call("minimum"), "Sqrt": _call("sqrt"), "Abs": _call("fabs"),
    "Floor": _call("floor"), "Round": _call("roundeven"),
    "Neg": lambda b, args, attrs: b.new(f"fneg {b.type} {args[0]}"),
    "Reciprocal": lambda b, args, attrs: b.two("fdiv", b.number(1.0), args[0]),
}  # fmt: skip

COMPARE: Mapping[str, Emit] = {
    "Greater": _compare("ogt", "sgt"), "Less": _compare("olt", "slt"), "Equal": _compare("oeq", "eq"),
}  # fmt: skip
"""Operators that compare two numbers of one dtype; the result is a bool."""

LOGIC: Mapping[str, Emit] = {
    "And": _two("and"), "Or": _two("or"),
    "Not": lambda b, args, attrs: b.two("xor", args[0], b.splat("true")),
}  # fmt: skip

_PRIMITIVES: Mapping[str, Emit] = {
    **_ARITHMETIC,
    **COMPARE,
    "LessOrEqual": _compare("ole", "sle"),
    "Where": lambda b, args, attrs: b.select(*args),
    **{op: function(op) for op in FUNCTIONS},
}
"""Primitives that formulas are made of."""

ATTRIBUTES = frozenset({"eps", *(name for row in FORMULAS.values() for name in row.sample)})
"""Attributes that the entries of these tables read."""

FLOATS: Mapping[str, Emit] = {
    **_ARITHMETIC,
    **{op: entry for op, entry in _PRIMITIVES.items() if op in FUNCTIONS and op != "Expm1"},
    **{op: _by_formula(row) for op, row in FORMULAS.items()},
    "Normalize": _normalize,
}
"""Operators on floating-point numbers whose operands all have the dtype of the result."""

ENTRIES: Mapping[str, Emit] = {**_PRIMITIVES, **FLOATS, **LOGIC}

_COUNTS = {op: sum(step.op in FUNCTIONS for step in row.steps(row.sample)) for op, row in FORMULAS.items()}
EXPONENTIALS: Mapping[str, int] = {
    **dict.fromkeys(FUNCTIONS, 1),
    **{op: count for op, count in _COUNTS.items() if count},
}
"""Operator -> how many of ``functions`` it has: loops compute it in float32 alone, and not a second time."""
