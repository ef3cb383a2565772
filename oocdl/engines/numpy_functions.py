"""NumPy's functions for primitive elementwise operators.

All take operands that broadcast. Those of ``FUNCTIONS`` also take ``out``, an array for the result, in
whose memory an operand may lie, but not with Where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array

_erf = np.frompyfunc(math.erf, 1, 1)  # a number at a time: NumPy has none


def _divide(a: Array, b: Array, out: Array | None = None) -> Array:
    """Integers are truncated, as in ONNX."""
    if a.dtype.kind == "f":
        return np.asarray(np.divide(a, b, out=out))
    rest = np.fmod(a, b)
    return np.asarray(np.floor_divide(np.subtract(a, rest, out=rest), b, out=out))


def _power(a: Array, b: Array, out: Array | None = None) -> Array:
    """Integers have inverses too, of which only those of 1 and -1 are not truncated to 0."""
    if a.dtype.kind == "f" or not (b < 0).any():
        return np.asarray(np.power(a, b, out=out))
    inverse = np.where(abs(a) == 1, np.power(a, abs(b)), 0)
    return _where(b < 0, inverse, np.power(a, np.maximum(b, 0)), out)


def _sigmoid(x: Array, out: Array | None = None) -> Array:
    out = np.exp(np.negative(x, out=out), out=out)
    return np.asarray(np.reciprocal(np.add(out, 1.0, out=out), out=out))


def _where(condition: Array, a: Array | float, b: Array | float, out: Array | None = None) -> Array:
    if out is None:
        return np.where(condition, a, b)
    np.copyto(out, b)
    np.copyto(out, a, where=condition)
    return out


_SPELLED_ALIKE = (
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh"),
    *("Exp", "Expm1", "Log", "Sqrt", "Floor", "Abs", "Reciprocal", "Add", "Greater", "Less", "Equal"),
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{op: getattr(np, op.lower()) for op in _SPELLED_ALIKE},
    "LessOrEqual": np.less_equal, "Round": np.rint, "Sub": np.subtract, "Mul": np.multiply, "Div": _divide,
    "Pow": _power, "Max": np.maximum, "Min": np.minimum, "Neg": np.negative, "Sigmoid": _sigmoid,
    "Not": np.logical_not, "And": np.logical_and, "Or": np.logical_or, "Where": _where,
}  # fmt: skip
SLOW: Mapping[str, Callable[..., Any]] = {
    "Erf": lambda x: np.asarray(_erf(x), x.dtype), "Softplus": lambda x: np.logaddexp(x, 0),
}  # fmt: skip
"""Functions that NumPy has no loops for, or slow ones, and that take no ``out``."""
