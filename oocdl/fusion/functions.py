"""Writes exponentials and their kin as instructions on vectors of float32.

A result is the correctly rounded one or its neighbour, for every argument (``tests/fusion/test_functions.py``
tries all). Polynomials are fits of least maximum error (``mpmath.chebyfit``), evaluated by Horner's rule with
fused multiplications and additions, so that all processors compute the same bits. Arguments are reduced as in
Muller, Elementary Functions (2016): ``exp(x) = 2^k (1 + p)`` with k the integer next to ``x / ln 2`` and
``p = expm1(x - k ln 2)``; ``log(2^k m) = k ln 2 + log(m)`` with m between the roots of 1/2 and of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from oocdl.fusion.llvm_ir import Builder

_EXPM1 = (0.5, 0.16666576666119928, 0.04166655421298415, 0.008363232883682618, 0.0013926250831497611)
"""``(expm1(r) - r) / r^2`` for ``|r| <= ln(2) / 2``; off by 6.5e-8."""
_LOG1P = (
    0.33333331179972575, -0.24999996957625975, 0.2000071576352166, -0.16667802367579132, 0.14249057141902147,
    -0.1242568569282142, 0.11685423571105265, -0.11479748625389889, 0.06971620541003427,
)  # fmt: skip
"""``(log(1 + f) - f + f^2 / 2) / f^3`` between the roots of 1/2 and of 2; off by 2.9e-8."""
_TANH = (
    -0.33333331762550594, 0.13333082253042366, -0.05390334768533509, 0.021272748257222123,
    -0.006542541984787831,
)  # fmt: skip
"""``(tanh(x) / x - 1) / x^2`` for ``|x| <= 0.56``, by powers of x^2; off by 1.6e-8."""
_ERF = (
    0.12837916706154343, -0.3761263846802871, 0.11283782495236845, -0.026865430727670243,
    0.005221031807858023, -0.0008484080405535107, 0.00011265959025606609, -9.667044571486996e-06,
)  # fmt: skip
"""``erf(x) / x - 1`` for ``|x| <= 1``, by powers of x^2; off by 3.4e-11."""
_ERFC = (
    0.00040695249204947823, -0.002178283553255515, 0.005445683317556121, -0.00835012806296286,
    0.008622641810899187, -0.006116989049688108, 0.002797455525194225, -0.0005436847523734309,
    -0.0002586050767933321, 0.00025250234594417607, -8.118151327887046e-05, -7.220430687436052e-06,
    1.574534023486969e-05, -3.621387266504205e-06, -8.934341108275976e-07, 3.7010294586574444e-07,
)  # fmt: skip
"""``erfc(x)`` for x in [1, 4], by powers of ``x - 2.5``; off by 1e-9."""
_LN2, _LN2_REST = 0.693147182464599609375, math.log(2) - 0.693147182464599609375
"""``ln 2`` in float32, and what that lacks."""
_TO_INTEGER = 1.5 * 2**23
"""A number whose sum with a float32 below 2^22 has the integer next to that in its last bits."""


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


class _Floats:
    """Adds instructions on vectors of float32, and on the integers of the same bits."""

    def __init__(self, b: Builder) -> None:
        self.b, self.integers = b, f"<{b.lanes} x i32>"
        self.add, self.sub = partial(self.do, "fadd"), partial(self.do, "fsub")
        self.mul, self.div = partial(self.do, "fmul"), partial(self.do, "fdiv")

    def number(self, value: str | float) -> str:
        """Return a vector of a number; a vector stays as it is."""
        return value if isinstance(value, str) else self.b.number(value)

    def do(self, name: str, x: str | float, y: str | float) -> str:
        return self.b.two(name, self.number(x), self.number(y))

    def fma(self, x: str | float, y: str | float, z: str | float) -> str:
        """Add ``x y + z``, rounded once."""
        return self.b.call("fma", self.b.type, [*map(self.number, (x, y, z))])

    def polynomial(self, x: str, powers: Sequence[float]) -> str:
        result = self.number(powers[-1])
        for factor in powers[-2::-1]:
            result = self.fma(result, x, factor)
        return result

    def choose(self, test: str, x: str, y: float, yes: str | float, no: str | float) -> str:
        """Add ``yes`` where the test of x and y holds, else ``no``."""
        return self.b.select(self.do(f"fcmp {test}", x, y), self.number(yes), self.number(no))

    # What is no number stays, at least or at most a number.
    def at_least(self, x: str, least: float) -> str:
        return self.choose("olt", x, least, least, x)

    def at_most(self, x: str, most: float) -> str:
        return self.choose("ogt", x, most, most, x)

    def size(self, x: str) -> str:
        return self.b.call("fabs", self.b.type, [x])

    def minus(self, x: str) -> str:
        return self.b.new(f"fneg {self.b.type} {x}")

    def whole(self, name: str, x: str, y: str | int) -> str:
        second = y if isinstance(y, str) else f"<{', '.join([f'i32 {y}'] * self.b.lanes)}>"
        return self.b.new(f"{name} {self.integers} {x}, {second}")

    def to_bits(self, x: str) -> str:
        return self.b.new(f"bitcast {self.b.type} {x} to {self.integers}")

    def from_bits(self, x: str) -> str:
        return self.b.new(f"bitcast {self.integers} {x} to {self.b.type}")


def _power(f: _Floats, x: str) -> tuple[str, str, str]:
    """Add (high, low, part): an exponential is ``high low (1 + part)``.

    There are two powers of two, since float32 may not have their product.
    """
    turned = f.fma(x, 1 / math.log(2), _TO_INTEGER)
    k = f.add(turned, -_TO_INTEGER)
    rest = f.fma(k, -_LN2_REST, f.fma(k, -_LN2, x))
    part = f.fma(f.mul(rest, rest), f.polynomial(rest, _EXPM1), rest)
    whole = f.whole("sub", f.to_bits(turned), _bits(_TO_INTEGER))
    half = f.whole("ashr", whole, 1)
    other = f.whole("sub", whole, half)
    high, low = (f.from_bits(f.whole("add", f.whole("shl", n, 23), _bits(1.0))) for n in (half, other))
    return high, low, part


def _exp(f: _Floats, x: str) -> str:
    # Beyond these bounds results are 0 and infinite.
    high, low, part = _power(f, f.at_most(f.at_least(x, -105.0), 90.0))
    return f.mul(f.fma(low, part, low), high)


def _falling(f: _Floats, x: str) -> tuple[str, str]:
    """Add ``exp(-|x|)`` and what it lacks."""
    high, low, part = _power(f, f.at_least(f.minus(f.size(x)), -105.0))
    e = f.fma(low, part, low)
    return f.mul(e, high), f.mul(f.fma(low, part, f.sub(low, e)), high)


def _expm1(f: _Floats, x: str) -> str:
    high, low, part = _power(f, f.at_most(f.at_least(x, -30.0), 90.0))
    return f.mul(f.fma(low, part, f.sub(low, f.div(1.0, high))), high)


def _inverse(f: _Floats, e: str, lacks: str) -> tuple[str, str, str]:
    """Add u, the inverse of ``u = 1 + e`` for e in [0, 1], and what u lacks."""
    u = f.add(e, 1.0)
    return u, f.div(1.0, u), f.add(f.sub(e, f.add(u, -1.0)), lacks)


def _sigmoid(f: _Floats, x: str) -> str:
    """``1 / (1 + e)``, and ``e / (1 + e)`` where x is negative, with ``e = exp(-|x|)``."""
    e, lacks = _falling(f, x)
    u, inverse, rest = _inverse(f, e, lacks)
    off = f.fma(f.minus(inverse), rest, f.fma(f.minus(inverse), u, 1.0))
    above, more = f.choose("olt", x, 0.0, e, 1.0), f.choose("olt", x, 0.0, lacks, 0.0)
    return f.fma(above, inverse, f.mul(inverse, f.fma(above, off, more)))


def _tanh(f: _Floats, x: str) -> str:
    """A polynomial near 0, and ``1 - 2 / (exp(2 |x|) + 1)`` with the sign of x."""
    square = f.mul(x, x)
    near = f.fma(x, f.mul(square, f.polynomial(square, _TANH)), x)
    size = f.at_most(f.size(x), 10.0)
    far = f.sub(1.0, f.div(2.0, f.add(_exp(f, f.add(size, size)), 1.0)))
    return f.choose("olt", size, 0.55, near, f.b.call("copysign", f.b.type, [far, x]))


def _log_of(f: _Floats, x: str, less: str | float = 0.0, more: str | float = 0.0) -> str:
    """Add ``log(x) - less ln 2 + more`` for normal positive numbers, the last much smaller than the first."""
    bits = f.to_bits(x)
    power = f.whole("and", f.whole("sub", bits, _bits(math.sqrt(0.5))), -1 << 23)
    k = f.sub(f.b.new(f"sitofp {f.integers} {f.whole('ashr', power, 23)} to {f.b.type}"), less)
    part = f.add(f.from_bits(f.whole("sub", bits, power)), -1.0)
    square = f.mul(part, part)
    rest = f.fma(f.mul(square, part), f.polynomial(part, _LOG1P), more)
    rest = f.fma(square, -0.5, f.fma(k, _LN2_REST, rest))
    return f.fma(k, _LN2, f.add(part, rest))


def _log(f: _Floats, x: str) -> str:
    normal = f.choose("olt", x, 2.0**-126, f.mul(x, 2.0**23), x)
    result = _log_of(f, normal, f.choose("olt", x, 2.0**-126, 23.0, 0.0))
    result = f.choose("oeq", x, math.inf, math.inf, result)
    result = f.choose("oeq", x, 0.0, -math.inf, result)
    return f.choose("ult", x, 0.0, math.nan, result)


def _softplus(f: _Floats, x: str) -> str:
    """``max(x, 0) + log(1 + exp(-|x|))``."""
    u, inverse, rest = _inverse(f, *_falling(f, x))
    return f.add(f.at_least(x, 0.0), _log_of(f, u, 0.0, f.mul(rest, inverse)))


def _erf(f: _Floats, x: str) -> str:
    square = f.mul(x, x)
    near = f.fma(x, f.polynomial(square, _ERF), x)
    size = f.size(x)
    at = f.add(f.at_most(size, 4.0), -2.5)
    far = f.sub(1.0, f.polynomial(at, _ERFC))
    return f.choose("olt", size, 1.0, near, f.b.call("copysign", f.b.type, [far, x]))


FUNCTIONS: Mapping[str, Callable[[_Floats, str], str]] = {
    "Exp": _exp, "Expm1": _expm1, "Log": _log, "Sigmoid": _sigmoid, "Tanh": _tanh, "Softplus": _softplus,
    "Erf": _erf,
}  # fmt: skip


def function(op: str) -> Callable[[Builder, Sequence[str], Mapping[str, object]], str]:
    """Return the entry of a function for the tables of ``loop_ops``; its operand is float32."""

    def emit(b: Builder, args: Sequence[str], attrs: Mapping[str, object]) -> str:
        assert b.kind == "float", f"{op} is written for float32, not for {b.kind}"
        return FUNCTIONS[op](_Floats(b), args[0])

    return emit
