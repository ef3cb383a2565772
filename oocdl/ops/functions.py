"""Trigonometric and hyperbolic functions, and what rounds, as rows of the elementwise table."""

from __future__ import annotations

from collections.abc import Callable

from oocdl.graph.ir.graph import Node
from oocdl.graph.ir.op_rule import Builder, OpRule
from oocdl.ops._speed import EXPONENTIAL
from oocdl.ops.pointwise import Row, RowGradient, elementwise

Slope = Callable[[Builder, str, str], str]
"""(builder, operand, result) -> the derivative."""


def _times(slope: Slope) -> RowGradient:
    return lambda b, n, g: (b("Mul", g, slope(b, n.inputs[0], n.outputs[0])),)


def _over_root(first: float, sign: float) -> RowGradient:
    """``1 / sqrt(first + sign x^2)``."""

    def gradient(b: Builder, n: Node, g: str) -> tuple[str | None, ...]:
        return (b("Div", g, b("Sqrt", _polynomial(b, n.inputs[0], first, sign))),)

    return gradient


def _over(first: float, sign: float) -> RowGradient:
    """``1 / (first + sign x^2)``."""
    return lambda b, n, g: (b("Div", g, _polynomial(b, n.inputs[0], first, sign)),)


def _polynomial(b: Builder, x: str, first: float, sign: float) -> str:
    square = b("Mul", x, x)
    if sign < 0:
        return b("Sub", b.like(first, x), square)
    return b("Add", square, b.like(first, x))


def _acos_gradient(b: Builder, n: Node, g: str) -> tuple[str | None, ...]:
    (found,) = _over_root(1.0, -1.0)(b, n, g)
    return (b("Neg", str(found)),)


def _mod_gradient(b: Builder, n: Node, g: str) -> tuple[str | None, ...]:
    """``1``, and minus the whole quotient, which is rounded since the division may not give it exactly."""
    x, divisor = n.inputs
    quotient = b("Round", b("Div", b("Sub", n.outputs[0], x), divisor))
    return g, b("Mul", g, quotient)


_GRADIENTS: dict[str, RowGradient] = {
    "Sin": _times(lambda b, x, y: b("Cos", x)),
    "Cos": _times(lambda b, x, y: b("Neg", b("Sin", x))),
    "Tan": _times(lambda b, x, y: _polynomial(b, y, 1.0, 1.0)),
    "Asin": _over_root(1.0, -1.0),
    "Acos": _acos_gradient,
    "Atan": _over(1.0, 1.0),
    "Sinh": _times(lambda b, x, y: b("Cosh", x)),
    "Cosh": _times(lambda b, x, y: b("Sinh", x)),
    "Asinh": _over_root(1.0, 1.0),
    "Acosh": _over_root(-1.0, 1.0),
    "Atanh": _over(1.0, -1.0),
}

FUNCTIONS: tuple[Row, ...] = (
    *(Row(op, 1, slope, flops=20, scratch=0, like=EXPONENTIAL) for op, slope in _GRADIENTS.items()),
    Row("Floor", 1, lambda b, n, g: (None,), scratch=0),
    # to the nearest, halves to even
    Row("Round", 1, lambda b, n, g: (None,), scratch=0),
    # the rest of a division, with the sign of the divisor, or, with fmod, of the dividend
    Row("Mod", 2, _mod_gradient, flops=10, scratch=6, like=EXPONENTIAL, onnx={"fmod": 0}),
)

RULES: tuple[OpRule, ...] = tuple(elementwise(row) for row in FUNCTIONS)
