"""Elementwise operators, a table row each. Operands broadcast as in NumPy.

A row is a primitive, or has a formula (``expression``) from which its kernels and costs are derived. Its
gradient is a function of (builder, node, gradient of the output) that returns a gradient an operand;
undoing the broadcast is common to all rows. Costs count a transcendental function as ten floating-point
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import pi, sqrt
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec, no_gradient
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import (
    broadcast,
    broadcast_axes,
    fail,
    is_float,
    no_second_derivative,
    reduce_to,
    same_dtype,
    size,
)
from oocdl.ops._speed import ARITHMETIC, EXPONENTIAL, streaming
from oocdl.ops.expression import Formula, Steps, steps_of

RowGradient = Callable[[Builder, Node, str], tuple[str | None, ...]]


Probes = Callable[[str, Shape], Iterator[Probe]]


@dataclass(frozen=True)
class Row:
    """One elementwise operator: everything that planning, cutting, measuring and prediction need."""

    op: str
    arity: int
    gradient: RowGradient | None
    """``None``: there is no derivative, and asking for one is an error."""
    _: KW_ONLY
    scratch: float
    """The memory that an engine allocates beyond the result, in results, measured with onnxruntime on 16 MiB.
    It is 0 for one operator of ONNX, and grows where several make it up."""
    flops: int = 1
    """Floating-point operations for each output element."""
    result: str = "same"
    """Dtype of the output: ``same`` as the operands, ``bool``, or ``to`` (an attribute)."""
    like: str = ARITHMETIC
    """The operator whose rate it has where it was not measured: ``ARITHMETIC`` or ``EXPONENTIAL``."""
    gigabytes: float | None = None
    """Nominal GB/s of one thread, with operands and result counted; None: those of ``like``."""
    takes: str = "float32"
    """Dtype of the operands that it is measured on."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that it is measured with, beside those that ``onnx`` has."""
    probes: Probes | None = None
    """Its probes, unless it is measured once, on operands of equal shapes."""
    moves_only: bool = False
    """See ``OpRule.moves_only``."""
    onnx: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of ONNX's operator of this name, with their defaults."""
    domain: str = ""
    """See ``OpRule.domain``."""
    formula: Formula | None = None
    """The operator in terms of primitives; None: it is one itself."""

    @property
    def sample(self) -> Mapping[str, Any]:
        """The attributes that it is measured with."""
        return {**self.onnx, **self.attrs}

    def steps(self, attrs: Mapping[str, Any]) -> Steps:
        """Return the steps of the formula for a node's attributes."""
        assert self.formula is not None, f"{self.op} is a primitive"
        return steps_of(self.formula, attrs, self.arity)


def _with_channels(op: str, shape: Shape) -> Iterator[Probe]:
    """Yield probes with both operands of full shape, and with one that has a number for each channel."""
    yield Probe(op, ((shape, "float32"), (shape, "float32")))
    yield Probe(op, ((shape, "float32"), ((1, shape[1], 1, 1, 1), "float32")))


def _power(op: str, shape: Shape) -> Iterator[Probe]:
    yield Probe(op, ((shape, "float32"), ((), "float32")))


def _choice(op: str, shape: Shape) -> Iterator[Probe]:
    yield Probe(op, (((1, 1, *shape[2:]), "bool"), ((), "float32"), (shape, "float32")))
    yield Probe(op, ((shape, "bool"), (shape, "float32"), ((), "float32")))


def _casts(op: str, shape: Shape) -> Iterator[Probe]:
    for source, target in (("int64", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")):
        yield Probe(op, ((shape, source),), {"to": target})


def _extreme_gradient(better: str) -> RowGradient:
    """Max and Min: the gradient goes to the operand that won.

    Ties: halves, as ``torch.maximum``; nothing at the ``bound`` of a Clip, as ``torch.clamp``.
    """

    def gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
        zero, found = build.like(0.0, g), []
        if node.attrs.get("bound"):
            return build("Where", build(better, *node.inputs), g, zero), None
        half = build("Mul", g, build.like(0.5, g))
        for mine, other in (node.inputs, node.inputs[::-1]):
            tie = build("Where", build("Equal", mine, other), half, zero)
            found.append(build("Where", build(better, mine, other), g, tie))
        return tuple(found)

    return gradient


def _pow_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    """``p x^(p-1)`` and ``x^p log x``, both 0 where autograd says 0 (p = 0; x = 0)."""
    base, power = node.inputs
    if power in build.constants:
        exponent = build.constants[power]
        lower = build.constant(np.where(exponent == 0, 1, exponent - 1), build.dtype(power))
        slope = build("Mul", power, build("Pow", base, lower))
        return build("Mul", g, slope), None
    one, zero = build.like(1.0, g), build.like(0.0, g)
    lower = build("Where", build("Equal", power, zero), one, build("Sub", power, one))
    slope = build("Mul", power, build("Pow", base, lower))
    safe = build("Where", build("Equal", base, zero), one, base)
    rise = build("Mul", node.outputs[0], build("Log", safe))
    return build("Mul", g, slope), build("Mul", g, rise)


def _from_output(op: str) -> RowGradient:
    """``op(dy, y)``."""
    return lambda build, node, g: (build(op, g, node.outputs[0]),)


def _abs_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    """``g sign(x)``, 0 at 0."""
    x, zero = node.inputs[0], build.like(0.0, g)
    falling = build("Where", build("Less", x, zero), build("Neg", g), zero)
    return (build("Where", build("Greater", x, zero), g, falling),)


def _erf_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    """``2 / sqrt(pi) exp(-x^2)``."""
    bell = build("Exp", build("Neg", build("Mul", node.inputs[0], node.inputs[0])))
    return (build("Mul", g, build("Mul", bell, build.like(2 / sqrt(pi), g))),)


def _cast_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    source = build.dtype(node.inputs[0])
    return (build("Cast", g, to=source) if is_float(source) else None,)


def _where_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    zero = build.like(0.0, g)
    chosen = build("Where", node.inputs[0], g, zero)
    return None, chosen, build("Where", node.inputs[0], zero, g)


def _div_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    """``1 / b`` and ``-y / b``."""
    over = build("Div", g, node.inputs[1])
    return over, build("Neg", build("Mul", over, node.outputs[0]))


def _reciprocal_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    """``-y^2``."""
    y = node.outputs[0]
    return (build("Neg", build("Mul", g, build("Mul", y, y))),)


def _times(slope: Callable[[Builder, str, str], str]) -> RowGradient:
    """``g slope(builder, operand, result)``."""
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

POINTWISE: tuple[Row, ...] = (
    Row("Add", 2, lambda b, n, g: (g, g), scratch=0, gigabytes=28, probes=_with_channels),
    Row("Sub", 2, lambda b, n, g: (g, b("Neg", g)), scratch=0, gigabytes=28, probes=_with_channels),
    Row(
        "Mul",
        2,
        lambda b, n, g: (b("Mul", g, n.inputs[1]), b("Mul", g, n.inputs[0])),
        scratch=0,
        gigabytes=28,
        probes=_with_channels,
    ),
    Row("Div", 2, _div_gradient, scratch=0, gigabytes=28, probes=_with_channels),
    Row("Pow", 2, _pow_gradient, flops=10, scratch=0, gigabytes=4.6, like=EXPONENTIAL, probes=_power),
    Row("Max", 2, _extreme_gradient("Greater"), scratch=1, gigabytes=29),
    Row("Min", 2, _extreme_gradient("Less"), scratch=1, gigabytes=36),
    Row("Neg", 1, lambda b, n, g: (b("Neg", g),), scratch=0, gigabytes=29),
    Row(
        "Sqrt",
        1,
        lambda b, n, g: (b("Div", b("Mul", g, b.like(0.5, g)), n.outputs[0]),),
        scratch=0,
        gigabytes=14,
    ),
    Row(
        "Exp",
        1,
        lambda b, n, g: (b("Mul", g, n.outputs[0]),),
        flops=10,
        scratch=0,
        gigabytes=10,
        like=EXPONENTIAL,
    ),
    Row(
        "Log",
        1,
        lambda b, n, g: (b("Div", g, n.inputs[0]),),
        flops=10,
        scratch=0,
        gigabytes=8.5,
        like=EXPONENTIAL,
    ),
    # 1 / (1 + exp(-x))
    Row("Sigmoid", 1, _from_output("SigmoidGrad"), flops=10, scratch=0, gigabytes=19, like=EXPONENTIAL),
    Row("Tanh", 1, _from_output("TanhGrad"), flops=10, scratch=0, gigabytes=3.7, like=EXPONENTIAL),
    # max(x, 0) + log(1 + exp(-|x|)); its derivative is the sigmoid, also at 0
    Row(
        "Softplus",
        1,
        lambda b, n, g: (b("Mul", g, b("Sigmoid", n.inputs[0])),),
        flops=20,
        scratch=1,
        gigabytes=6.3,
        like=EXPONENTIAL,
    ),
    Row("Abs", 1, _abs_gradient, scratch=0, gigabytes=29),
    Row("Erf", 1, _erf_gradient, flops=10, scratch=0, gigabytes=6.9, like=EXPONENTIAL),
    Row("Reciprocal", 1, _reciprocal_gradient, scratch=0, gigabytes=28),
    Row("Identity", 1, lambda b, n, g: (g,), flops=0, scratch=0, gigabytes=650, moves_only=True),
    Row("Cast", 1, _cast_gradient, result="to", scratch=0, gigabytes=42, probes=_casts),
    Row("Greater", 2, lambda b, n, g: (None, None), result="bool", scratch=0, gigabytes=18),
    Row("Less", 2, lambda b, n, g: (None, None), result="bool", scratch=0, gigabytes=18),
    Row("Equal", 2, lambda b, n, g: (None, None), result="bool", scratch=0, gigabytes=25, takes="int64"),
    Row("Not", 1, lambda b, n, g: (None,), result="bool", scratch=0, gigabytes=22, takes="bool"),
    Row("And", 2, lambda b, n, g: (None, None), result="bool", scratch=0, gigabytes=27, takes="bool"),
    Row("Or", 2, lambda b, n, g: (None, None), result="bool", scratch=0, gigabytes=28, takes="bool"),
    Row("Where", 3, _where_gradient, scratch=2, gigabytes=3.1, probes=_choice),
    *(Row(op, 1, slope, flops=20, scratch=0, like=EXPONENTIAL) for op, slope in _GRADIENTS.items()),
    Row("Floor", 1, lambda b, n, g: (None,), scratch=0),
    # to the nearest, halves to even
    Row("Round", 1, lambda b, n, g: (None,), scratch=0),
    # the rest of a division, with the sign of the divisor, or, with fmod, of the dividend
    Row("Mod", 2, _mod_gradient, flops=10, scratch=6, like=EXPONENTIAL, onnx={"fmod": 0}),
)


def _infer(row: Row, node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    """Infer the broadcast shape; operands must have one dtype (but for the condition of Where)."""
    if len(inputs) != row.arity:
        fail(node, f"takes {row.arity} operands, got {len(inputs)}")
    dtypes = [value.dtype for value in inputs]
    if row.op == "Where" and dtypes.pop(0) != "bool":
        fail(node, "its condition must be bool")
    dtype = same_dtype(node, dtypes)
    if row.op in ("Not", "And", "Or") and dtype != "bool":
        fail(node, f"its operands must be bool, not {dtype}")
    if row.result == "to":
        dtype = np.dtype(node.attrs["to"]).name
    elif row.result == "bool":
        dtype = "bool"
    return [(broadcast(node, [value.shape for value in inputs]), dtype)]


def _gradient(row: Row, build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """Apply the row's gradient, summed over broadcast axes."""
    grad = grads[0]
    if grad is None:
        return no_gradient(build, node, grads)
    if row.gradient is None:
        return no_second_derivative(build, node, grads)
    return [
        None if found is None else reduce_to(build, found, build.shape(operand))
        for found, operand in zip(row.gradient(build, node, grad), node.inputs, strict=True)
    ]


def elementwise(row: Row) -> OpRule:
    """Make the rule of a row."""

    def flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
        return row.flops * size(outputs[0])

    def scratch_elements(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
        return int(row.scratch * size(outputs[0]))

    def probes(shape: Shape) -> Iterator[Probe]:
        if row.probes is not None:
            return row.probes(row.op, shape)
        return iter([Probe(row.op, ((shape, row.takes),) * row.arity, row.sample)])

    return OpRule(
        op=row.op,
        infer=lambda node, inputs: _infer(row, node, inputs),
        gradient=lambda build, node, grads: _gradient(row, build, node, grads),
        axes=broadcast_axes,
        speed=streaming(row.like, row.gigabytes, probes),
        flops=flops,
        domain=row.domain,
        onnx=row.onnx if row.gradient is not None else None,  # gradients are ours alone
        scratch_elements=scratch_elements,
        moves_only=row.moves_only,
    )


RULES: tuple[OpRule, ...] = tuple(elementwise(row) for row in POINTWISE)
