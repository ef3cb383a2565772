"""Activation functions and their fused gradients, as rows of the elementwise table.

An entry is a formula; the gradient, kernels, costs and loops are derived from it. A gradient that is an
operator of its own is one kernel over one read, and may read the result instead of the operand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oocdl.graph.ir.op_rule import OpRule
from oocdl.ops._speed import ARITHMETIC, EXPONENTIAL
from oocdl.ops.expression import (
    AUXILIARY,
    Formula,
    Lifted,
    Term,
    apply,
    erf,
    exp,
    expm1,
    minimum,
    most_alive,
    sigmoid,
    steps_of,
    tanh,
    where,
)
from oocdl.ops.pointwise import POINTWISE, Attrs, Gradients, Row, Slope, elementwise

_PRIMITIVES = {row.op: row for row in POINTWISE}
_PRIMITIVES |= {op: _PRIMITIVES[like] for op, like in AUXILIARY.items()}


def _derived(formula: Formula) -> Slope:
    """The gradient of a formula: its steps as nodes, and the gradients of those, last first."""

    def gradient(attrs: Attrs, g: Lifted, *values: Lifted) -> Gradients:
        build, operands, first = g.build, values[:-1], len(g.build.nodes)
        result = formula(attrs, *operands)
        assert isinstance(result, Lifted)
        grads = {result.name: g.name}
        for step in reversed(build.nodes[first:]):
            if step.outputs[0] not in grads:
                continue
            given = build.rules[step.op].gradient(build, step, grads[step.outputs[0]])
            for name, grad in zip(step.inputs, given, strict=True):
                if grad is not None:
                    grads[name] = build("Add", grads[name], grad) if name in grads else grad
        return tuple(g.to(grads[one.name]) if one.name in grads else None for one in operands)

    return gradient


def activation(
    op: str, formula: Formula, gradient: Slope | None = None, *, fused: bool = False, **facts: Any
) -> Row:
    """Make the row of an activation; ``facts`` are fields of ``Row`` that are measured, not derived.

    Its gradient is given, or derived, or ``fused``: the operator ``<op>Grad`` of the result's gradient and of
    the operand, with the same attributes.
    """
    if fused:
        gradient = lambda attrs, g, x, y: (apply(f"{op}Grad", g, x, **attrs),)  # noqa: E731
    return _row(op, formula, 1, gradient or _derived(formula), **facts)


def slope(op: str, formula: Formula, **facts: Any) -> Row:
    """Make the row of a fused gradient, which has none itself."""
    return _row(op, formula, 2, None, **facts)


def _row(op: str, formula: Formula, arity: int, gradient: Slope | None, **facts: Any) -> Row:
    steps = steps_of(formula, {**facts.get("onnx", {}), **facts.get("attrs", {})}, arity)
    primitives = [_PRIMITIVES[step.op] for step in steps]
    heavy = any(row.like == EXPONENTIAL for row in primitives)
    derived = {"flops": sum(row.flops for row in primitives), "scratch": most_alive(steps, arity) + 1}
    like = EXPONENTIAL if heavy else ARITHMETIC
    return Row(op, arity, gradient, formula=formula, like=like, **{**derived, **facts})


def _elu_gradient(a: Attrs, g: Lifted, x: Lifted, y: Lifted) -> Gradients:
    """Use the output where its sign is the input's, else compute ``g`` and ``g alpha exp(x)`` from x."""
    alpha = float(a["alpha"])
    if alpha >= 0:
        return (apply("EluGrad", g, y, alpha=alpha),)
    falling = g * (exp(x) * alpha)
    return (where(x > 0.0, g, falling),)


def _normal(x: Term) -> Term:
    """The cumulative distribution of normal numbers."""
    return (erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def _tanh_inside(x: Term, square: Term) -> Term:
    """``tanh(sqrt(2 / pi) (x + 0.044715 x^3))``."""
    return tanh(x * (square * 0.044715 + 1.0) * math.sqrt(2 / math.pi))


def _gelu(attrs: Attrs, x: Term) -> Term:
    """``x Phi(x)``, or nearly that by a tanh (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    if attrs.get("approximate", "none") == "none":
        return x * _normal(x)
    return x * 0.5 * (_tanh_inside(x, x * x) + 1.0)


def _gelu_grad(attrs: Attrs, dy: Term, x: Term) -> Term:
    if attrs.get("approximate", "none") == "none":
        density = x * exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return dy * (_normal(x) + density)
    square, factor = x * x, math.sqrt(2 / math.pi)
    y = _tanh_inside(x, square)
    steep = (1.0 - y * y) * (x * (square * (3 * 0.044715 * factor) + factor))
    return dy * ((y + 1.0 + steep) * 0.5)


def _dropout(attrs: Attrs, x: Term, u: Term) -> Term:
    """``x / (1 - ratio)`` where ``u >= ratio``, else 0; ``u`` is uniform in [0, 1)."""
    ratio = float(attrs["ratio"])
    least, scale = (ratio, 1.0 / (1.0 - ratio)) if ratio < 1 else (math.inf, 0.0)
    return where(u < least, 0.0, x * scale)


ACTIVATIONS: tuple[Row, ...] = (
    # what is no number stays; gradient 0 at 0, as PyTorch
    activation("Relu", lambda a, x: where(x <= 0.0, 0.0, x), fused=True, flops=1, scratch=0, gigabytes=26),
    slope("ReluGrad", lambda a, dy, x: where(x <= 0.0, 0.0, dy), flops=1, scratch=1.25, gigabytes=27),
    activation(
        "LeakyRelu", lambda a, x: where(x > 0.0, x, x * a["alpha"]),
        fused=True, flops=1, scratch=0, gigabytes=25, onnx={"alpha": 0.01},
    ),
    slope(
        "LeakyReluGrad", lambda a, dy, x: where(x > 0.0, dy, dy * a["alpha"]),
        flops=1, scratch=3.2, gigabytes=28, attrs={"alpha": 0.01},
    ),
    activation(
        "Elu", lambda a, x: where(x > 0.0, x, expm1(minimum(x, 0.0)) * a["alpha"]), _elu_gradient,
        flops=11, scratch=0.25, onnx={"alpha": 1.0},
    ),
    slope(  # from the output
        "EluGrad", lambda a, dy, y: where(y > 0.0, dy, dy * (y + a["alpha"])),
        flops=3, scratch=2.25, attrs={"alpha": 1.0},
    ),
    activation("Gelu", _gelu, fused=True, flops=15, scratch=1, gigabytes=13, onnx={"approximate": "none"}),
    slope("GeluGrad", _gelu_grad, flops=25, scratch=3, gigabytes=16),
    activation(
        "QuickGelu", lambda a, x: x * sigmoid(x * a["alpha"]), onnx={"alpha": 1.702}, domain="com.microsoft"
    ),
    slope("SigmoidGrad", lambda a, dy, y: dy * (y * (1.0 - y)), scratch=1, gigabytes=26),
    slope("TanhGrad", lambda a, dy, y: dy * (1.0 - y * y), scratch=1, gigabytes=27),
    _row(  # linear in x
        "Dropout", _dropout, 2, lambda a, g, x, u, y: (apply("Dropout", g, u, **a), None),
        flops=2, scratch=1.25, gigabytes=23, attrs={"ratio": 0.1},
    ),
)  # fmt: skip
FORMULAS: Mapping[str, Row] = {row.op: row for row in ACTIVATIONS}
"""The operators whose kernels engines derive, where they have no faster ones of their own."""

RULES: tuple[OpRule, ...] = tuple(elementwise(row) for row in ACTIVATIONS)
