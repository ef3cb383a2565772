"""Elementwise operators, a table row each. Operands broadcast as in NumPy.

A row is a primitive, or has a formula (``expression``) from which its kernels and costs are derived. Its
gradient is a formula, too; undoing the broadcast is common to all rows. Costs count a transcendental function
as ten floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import (
    broadcast,
    broadcast_axes,
    fail,
    no_second_derivative,
    reduce_to,
    same_dtype,
    size,
)
from oocdl.ops._speed import ARITHMETIC, EXPONENTIAL, probe, streaming
from oocdl.ops.expression import (
    Formula,
    Lifted,
    Steps,
    Term,
    apply,
    equal,
    exp,
    log,
    sigmoid,
    sqrt,
    steps_of,
    where,
)

Attrs = Mapping[str, Any]
Gradients = tuple[Any, ...]
"""The gradient of each operand: a value (``Lifted``), or None for 0."""
Slope = Callable[..., Gradients]
"""(attributes, gradient of the result, operands, result) -> the gradient of each operand."""
Probes = Callable[[str, Shape], Iterable[Probe]]
DIVISIONS = frozenset({"Div", "Mod"})
"""Operators whose last operand must not be 0 where it is whole numbers."""


@dataclass(frozen=True)
class Row:
    """One elementwise operator: everything that planning, cutting, measuring and prediction need."""

    op: str
    arity: int
    gradient: Slope | None
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
    """Makes its probes; None: it is measured once, on operands of equal shapes."""
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


def _with_channels(op: str, shape: Shape) -> Iterable[Probe]:
    """Return probes with both operands of full shape, and with one that has a number for each channel."""
    return [probe(op, shape, shape), probe(op, shape, (1, shape[1], 1, 1, 1))]


def _choice(op: str, shape: Shape) -> Iterable[Probe]:
    yield Probe(op, (((1, 1, *shape[2:]), "bool"), ((), "float32"), (shape, "float32")))
    yield Probe(op, ((shape, "bool"), (shape, "float32"), ((), "float32")))


def _casts(op: str, shape: Shape) -> Iterable[Probe]:
    for source, target in (("int64", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")):
        yield Probe(op, ((shape, source),), {"to": target})


def apart(attrs: Attrs, g: Lifted, *values: Lifted) -> Gradients:
    """The gradient of an operator that is constant piece by piece."""
    return (None,) * (len(values) - 1)


def _extreme(better: str) -> Slope:
    """Max and Min: the gradient goes to the operand that won.

    Ties: halves, as ``torch.maximum``; nothing at the ``bound`` of a Clip, as ``torch.clamp``.
    """

    def gradient(attrs: Attrs, g: Lifted, first: Lifted, second: Lifted, y: Lifted) -> Gradients:
        zero = g.number(0.0)
        if attrs.get("bound"):
            return where(apply(better, first, second), g, zero), None
        half, found = g * 0.5, list[Term]()
        for mine, other in ((first, second), (second, first)):
            tie = where(equal(mine, other), half, zero)
            found.append(where(apply(better, mine, other), g, tie))
        return tuple(found)

    return gradient


def _pow(attrs: Attrs, g: Lifted, base: Lifted, power: Lifted, y: Lifted) -> Gradients:
    """``p x^(p-1)`` and ``x^p log x``, both 0 where autograd says 0 (p = 0; x = 0)."""
    exponent = g.build.constants.get(power.name)
    if exponent is not None:
        less = g.build.constant(np.where(exponent == 0, 1, exponent - 1), power.dtype)
        return g * (power * apply("Pow", base, g.to(less))), None
    one, zero = g.number(1.0), g.number(0.0)
    slope = power * apply("Pow", base, where(equal(power, zero), one, power - one))
    rise = y * log(where(equal(base, zero), one, base))
    return g * slope, g * rise


def _abs(attrs: Attrs, g: Lifted, x: Lifted, y: Lifted) -> Gradients:
    """``g sign(x)``, 0 at 0."""
    falling = where(x < 0.0, -g, 0.0)
    return (where(x > 0.0, g, falling),)


def _mod(attrs: Attrs, g: Lifted, x: Lifted, divisor: Lifted, y: Lifted) -> Gradients:
    """``1``, and minus the whole quotient, which is rounded since the division may not give it exactly."""
    return g, g * apply("Round", (y - x) / divisor)


def _arithmetic(op: str, arity: int, slope: Slope, gigabytes: float | None = None, **facts: Any) -> Row:
    """Make the row of an operator that is one of every engine's, and takes no memory beside its result."""
    return Row(op, arity, slope, gigabytes=gigabytes, **{"scratch": 0, **facts})


def _function(
    op: str, slope: Slope, gigabytes: float | None = None, flops: int = 20, scratch: float = 0
) -> Row:
    """Make the row of a function that costs as much as an exponential or two."""
    return Row(op, 1, slope, flops=flops, scratch=scratch, gigabytes=gigabytes, like=EXPONENTIAL)


def _says(op: str, arity: int, gigabytes: float, takes: str = "float32") -> Row:
    return Row(op, arity, apart, result="bool", scratch=0, gigabytes=gigabytes, takes=takes)


POINTWISE: tuple[Row, ...] = (
    _arithmetic("Add", 2, lambda a, g, x, z, y: (g, g), 28, probes=_with_channels),
    _arithmetic("Sub", 2, lambda a, g, x, z, y: (g, -g), 28, probes=_with_channels),
    _arithmetic("Mul", 2, lambda a, g, x, z, y: (g * z, g * x), 28, probes=_with_channels),
    _arithmetic("Div", 2, lambda a, g, x, z, y: (over := g / z, -(over * y)), 28, probes=_with_channels),
    _arithmetic(
        "Pow", 2, _pow, 4.6, flops=10, like=EXPONENTIAL, probes=lambda op, shape: [probe(op, shape, ())]
    ),
    _arithmetic("Max", 2, _extreme("Greater"), 29, scratch=1),
    _arithmetic("Min", 2, _extreme("Less"), 36, scratch=1),
    _arithmetic("Neg", 1, lambda a, g, x, y: (-g,), 29),
    _arithmetic("Sqrt", 1, lambda a, g, x, y: (g * 0.5 / y,), 14),
    _function("Exp", lambda a, g, x, y: (g * y,), 10, flops=10),
    _function("Log", lambda a, g, x, y: (g / x,), 8.5, flops=10),
    # 1 / (1 + exp(-x))
    _function("Sigmoid", lambda a, g, x, y: (apply("SigmoidGrad", g, y),), 19, flops=10),
    _function("Tanh", lambda a, g, x, y: (apply("TanhGrad", g, y),), 3.7, flops=10),
    # max(x, 0) + log(1 + exp(-|x|)); its derivative is the sigmoid, also at 0
    _function("Softplus", lambda a, g, x, y: (g * sigmoid(x),), 6.3, scratch=1),
    _arithmetic("Abs", 1, _abs, 29),
    _function("Erf", lambda a, g, x, y: (g * (exp(-(x * x)) * (2 / math.sqrt(math.pi))),), 6.9, flops=10),
    _arithmetic("Reciprocal", 1, lambda a, g, x, y: (-(g * (y * y)),), 28),
    _arithmetic(
        "Identity", 1, lambda a, g, x, y: (None if a.get("detached") else g,), 650, flops=0, moves_only=True,
    ),
    _arithmetic(
        "Cast", 1, lambda a, g, x, y: (apply("Cast", g, to=x.dtype) if is_float(x.dtype) else None,), 42,
        result="to", probes=_casts,
    ),
    _says("Greater", 2, 18),
    _says("Less", 2, 18),
    _says("Equal", 2, 25, takes="int64"),
    _says("Not", 1, 22, takes="bool"),
    _says("And", 2, 27, takes="bool"),
    _says("Or", 2, 28, takes="bool"),
    _arithmetic(
        "Where", 3, lambda a, g, chosen, x, z, y: (None, where(chosen, g, 0.0), where(chosen, 0.0, g)), 3.1,
        scratch=2, probes=_choice,
    ),
    _function("Sin", lambda a, g, x, y: (g * apply("Cos", x),)),
    _function("Cos", lambda a, g, x, y: (g * -apply("Sin", x),)),
    _function("Tan", lambda a, g, x, y: (g * (y * y + 1.0),)),
    _function("Asin", lambda a, g, x, y: (g / sqrt(1.0 - x * x),)),
    _function("Acos", lambda a, g, x, y: (-(g / sqrt(1.0 - x * x)),)),
    _function("Atan", lambda a, g, x, y: (g / (x * x + 1.0),)),
    _function("Sinh", lambda a, g, x, y: (g * apply("Cosh", x),)),
    _function("Cosh", lambda a, g, x, y: (g * apply("Sinh", x),)),
    _function("Asinh", lambda a, g, x, y: (g / sqrt(x * x + 1.0),)),
    _function("Acosh", lambda a, g, x, y: (g / sqrt(x * x + -1.0),)),
    _function("Atanh", lambda a, g, x, y: (g / (1.0 - x * x),)),
    _arithmetic("Floor", 1, apart),
    # to the nearest, halves to even
    _arithmetic("Round", 1, apart),
    # the rest of a division, with the sign of the divisor, or, with fmod, of the dividend
    _arithmetic("Mod", 2, _mod, flops=10, scratch=6, like=EXPONENTIAL, onnx={"fmod": 0}),
)  # fmt: skip


def _infer(row: Row, node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
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


def _gradient(row: Row, build: Builder, node: Node, g: str) -> Sequence[str | None]:
    if row.gradient is None:
        return no_second_derivative(build, node, g)
    lifted = Lifted(build=build, name=g, like=g, numbers={})
    values = map(lifted.to, (*node.inputs, *node.outputs))
    grads = zip(row.gradient(node.attrs, lifted, *values), map(build.shape, node.inputs), strict=True)
    return [None if grad is None else reduce_to(build, grad.name, shape) for grad, shape in grads]


def elementwise(row: Row) -> OpRule:
    """Make the rule of a row."""

    def alike(op: str, shape: Shape) -> Iterable[Probe]:
        return [Probe(op, ((shape, row.takes),) * row.arity, row.sample)]

    return OpRule(
        op=row.op, infer=partial(_infer, row), gradient=partial(_gradient, row), axes=broadcast_axes,
        speed=streaming(row.like, row.gigabytes, partial(row.probes or alike, row.op)),
        flops=lambda node, inputs, outputs: row.flops * size(outputs[0]),
        scratch_elements=lambda node, inputs, outputs: int(row.scratch * size(outputs[0])),
        onnx=row.onnx if row.gradient is not None else None,  # gradients are ours alone
        domain=row.domain, moves_only=row.moves_only,
    )  # fmt: skip


RULES: tuple[OpRule, ...] = tuple(map(elementwise, POINTWISE))
