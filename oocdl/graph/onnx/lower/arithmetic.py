"""Lowers what computes element by element: sums, comparisons, powers, casts, activation functions, and draws.

Derivatives of activations follow from how each is written; at kinks they are PyTorch's: the piece that
includes the kink in the condition of a Where is the one whose derivative counts there.

What draws is made of uniform numbers that are keyed by the run's seed, the step, the node's name and the
global index, as those of Dropout are: any cut gives the same bits, and so does a resume. The attribute
``seed`` is not read. Predictions draw too, as ONNX says, but for what is 1 with a known probability: its mean
takes its place, so that stochastic depth leaves a branch as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, Role, Shape, is_float
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.onnx.bounds import check_shape
from oocdl.graph.onnx.constant_folding import numpy_type
from oocdl.graph.onnx.context import LOWERINGS, Context, Entry, Lower, Operand, lowers
from oocdl.graph.onnx.own_operators import DETACH
from oocdl.graph.onnx.whole_numbers import cast, kind_of


def _by_formula(formula: Callable[..., str], defaults: Mapping[str, Any], *first: str) -> Lower:
    """Lower to ``formula`` of the context, of ``first``, of all operands, and of attributes by keyword."""

    def lower(ctx: Context) -> Sequence[Operand]:
        attrs = {name: ctx.attr(name, default) for name, default in defaults.items()}
        return [formula(ctx, *first, *ctx.values(), **attrs)]

    return lower


def of_rules(rules: Rules) -> dict[str, Lower]:
    """Return the lowerings of ONNX operators whose rules say that they are ours, too."""
    return {
        f"{rule.domain}::{op}".removeprefix("::"): _by_formula(Context.make, rule.onnx, op)
        for op, rule in rules.items()
        if rule.onnx is not None
    }


def _above(ctx: Context, x: str, bound: float) -> str:
    return ctx.make("Greater", x, ctx.number(bound, x))


def _chain(ctx: Context, op: str, *values: str) -> str:
    return reduce(lambda a, b: ctx.make(op, a, b), values)


def _or_equal(ctx: Context, op: str, a: str, b: str) -> str:
    """Compare; this also holds for equal numbers, and for nothing that is no number."""
    return ctx.make("Or", ctx.make(op, a, b), ctx.make("Equal", a, b))


def _mean(ctx: Context, *values: str) -> str:
    total = _chain(ctx, "Add", *values)
    return ctx.make("Div", total, ctx.number(len(values), total))


def _sign(ctx: Context, x: str) -> str:
    """-1, 0 or 1. Floor makes the slope zero, where comparisons alone would give none."""
    zero = ctx.number(0, x)
    low = ctx.make("Where", ctx.make("Less", x, zero), ctx.number(-1, x), x)
    found = ctx.make("Where", ctx.make("Greater", x, zero), ctx.number(1, x), low)
    return ctx.make("Floor", found) if ctx.build.dtype(x) == ctx.precision else found


def _is_inf(ctx: Context, x: str, *, detect_positive: int = 1, detect_negative: int = 1) -> str:
    if not detect_positive and not detect_negative:
        return ctx.make("Less", ctx.make("Abs", x), ctx.number(0.0, x))  # nothing is
    infinity = ctx.number(float("inf") if detect_positive else float("-inf"), x)
    return ctx.make("Equal", ctx.make("Abs", x) if detect_positive and detect_negative else x, infinity)


def _prelu(ctx: Context, x: str, slope: str) -> str:
    """``x`` where it is positive, else ``slope x``; the gradient of a slope is summed where it is shared."""
    shape = ctx.build.shape(x)
    if np.broadcast_shapes(shape, ctx.build.shape(slope)) != shape:
        raise ModelError(f"slopes {list(ctx.build.shape(slope))} do not broadcast to {list(shape)}")
    return ctx.make("Where", _above(ctx, x, 0.0), x, ctx.make("Mul", slope, x))


def _hard_sigmoid(ctx: Context, x: str, *, alpha: float = 0.2, beta: float = 0.5) -> str:
    """``alpha x + beta`` between 0 and 1; flat at both ends, as ``torch.nn.functional.hardsigmoid``."""
    alpha = 1 / 6 if np.float32(alpha) == np.float32(1 / 6) else alpha  # which files round to float32
    line, one = ctx.make("Add", ctx.scaled(x, alpha), ctx.number(beta, x)), ctx.number(1.0, x)
    return ctx.make("Where", _or_equal(ctx, "Greater", line, one), one, ctx.make("Relu", line))


def _celu(ctx: Context, x: str, *, alpha: float = 1.0) -> str:
    """``x`` where it is positive, else ``alpha (exp(x / alpha) - 1)``."""
    if alpha <= 0:
        ctx.refuse(f"alpha {alpha}")
    if alpha == 1.0:
        return ctx.make("Elu", x, alpha=1.0)
    falling = ctx.scaled(ctx.make("Elu", ctx.scaled(x, 1 / alpha), alpha=1.0), alpha)
    return ctx.make("Where", _above(ctx, x, 0.0), x, falling)


def _swiglu(ctx: Context, gate: str, value: str, *, alpha: float = 1.0) -> str:
    if ctx.shape(0) != ctx.shape(1):
        raise ModelError(f"the gate {list(ctx.shape(0))} has not the shape of the value {list(ctx.shape(1))}")
    return ctx.make("Mul", _swish(ctx, gate, alpha=alpha), value)


def _swish(ctx: Context, x: str, *, alpha: float = 1.0) -> str:
    return ctx.make("Mul", x, ctx.make("Sigmoid", ctx.scaled(x, alpha)))


def _shrink(ctx: Context, x: str, *, lambd: float = 0.5, bias: float = 0.0) -> str:
    """Move what is beyond ``lambd`` by ``bias`` towards 0; all else is 0."""
    by = ctx.number(bias, x)
    below = ctx.make("Less", x, ctx.number(-lambd, x))
    low = ctx.make("Where", below, ctx.make("Add", x, by), ctx.number(0.0, x))
    return ctx.make("Where", _above(ctx, x, lambd), ctx.make("Sub", x, by), low)


def _relu(ctx: Context, x: str) -> str:
    """``x`` where it is positive, else 0; the formula of Relu is one of floats."""
    return ctx.make("Relu", x) if is_float(ctx.build.dtype(x)) else ctx.make("Max", x, ctx.number(0, x))


FORMULAS: Mapping[str, Callable[..., str]] = {
    "Relu": _relu,
    "Sum": lambda c, *values: _chain(c, "Add", *values),
    "Mean": _mean,
    "Ceil": lambda c, x: c.make("Neg", c.make("Floor", c.make("Neg", x))),
    "Sign": _sign,
    "LessOrEqual": lambda c, a, b: _or_equal(c, "Less", a, b),
    "GreaterOrEqual": lambda c, a, b: _or_equal(c, "Greater", a, b),
    "Xor": lambda c, a, b: c.make("Not", c.make("Equal", a, b)),
    "IsNaN": lambda c, x: c.make("Not", c.make("Equal", x, x)),
    "IsInf": _is_inf,
    "PRelu": _prelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda c, x: c.make("Mul", x, _hard_sigmoid(c, x, alpha=1 / 6)),
    "Selu": lambda c, x, *, alpha=1.6732632423543772, gamma=1.0507009873554805: c.scaled(
        c.make("Elu", x, alpha=alpha), gamma
    ),
    "Celu": _celu,
    "Mish": lambda c, x: c.make("Mul", x, c.make("Tanh", c.make("Softplus", x))),
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "Softsign": lambda c, x: c.make("Div", x, c.make("Add", c.make("Abs", x), c.number(1.0, x))),
    "ThresholdedRelu": lambda c, x, *, alpha=1.0: c.make("Where", _above(c, x, alpha), x, c.number(0.0, x)),
    "Shrink": _shrink,
}
"""Operators of one result: functions of the context and all operands, with attributes and their defaults."""
LOWERINGS.update({op: _by_formula(found, found.__kwdefaults__ or {}) for op, found in FORMULAS.items()})


@lowers("Identity")
def _pass(ctx: Context) -> Sequence[Entry]:
    return [ctx.entry(0)]


@lowers(DETACH)
def _detach(ctx: Context) -> Sequence[Operand]:
    found = ctx.operand(0)
    return [ctx.make("Identity", found, detached=True) if isinstance(found, str) else found]


@lowers("Cast", "CastLike")
def _cast(ctx: Context) -> Sequence[Operand]:
    found = ctx.operand(0)
    target = numpy_type(ctx.attr("to")) if ctx.node.op == "Cast" else kind_of(ctx, ctx.operand(1))
    if not isinstance(found, str):
        return [found.astype(target)]
    if target.kind in "iu":
        return [cast(ctx, found, kind_of(ctx, found), target)]
    dtype = "bool" if target.kind == "b" else ctx.precision
    if dtype != "bool" and (mean := _mean_of(ctx, found)) is not None:
        return [mean]
    return [found if ctx.build.dtype(found) == dtype else ctx.make("Cast", found, to=dtype)]


@lowers("Clip")
def _clip(ctx: Context) -> Sequence[Operand]:
    """Lower to values between two numbers, flat where they are one of them."""
    ctx.constants("bounds", 1, 2)
    x = ctx.value(0)
    for index, (op, name) in enumerate((("Max", "min"), ("Min", "max")), start=1):
        known = ctx.known(index)
        bound = ctx.attr(name) if known is None else known.reshape(-1)[0].item()
        if bound is not None:
            x = ctx.make(op, x, ctx.number(bound, x), bound=True)
    return [x]


@lowers("Max", "Min")
def _extreme(ctx: Context) -> Sequence[Operand]:
    """Lower Max or Min; that of a value and a number is a bound where dynamo has made it of a clamp."""
    number = ctx.known(1)
    if number is not None and number.ndim == 0 and "aten.clamp" in ctx.node.origin:
        return [ctx.make(ctx.node.op, ctx.value(0), ctx.value(1), bound=True)]
    return [_chain(ctx, ctx.node.op, *ctx.values())]


@lowers("Pow")
def _pow(ctx: Context) -> Sequence[Operand]:
    """Lower Pow; the result has the type of the base, whatever that of the exponent is."""
    x, exponent = ctx.value(0), ctx.known(1)
    dtype = ctx.build.dtype(x)
    if exponent is not None and exponent.size == 1:
        number = exponent.reshape(-1)[0].item()
        x = ctx.reshape(x, (1,) * (exponent.ndim - len(ctx.shape(0))) + ctx.shape(0))
        if is_float(dtype) or (number >= 0 and number == int(number)):
            return [_known_pow(ctx, x, number)]
    if not is_float(dtype) and exponent is not None and (exponent == np.trunc(exponent)).all():
        return [ctx.make("Pow", x, ctx.build.constant(exponent, "int64"))]
    power = ctx.value(1)
    if is_float(dtype) and not is_float(ctx.build.dtype(power)):
        power = ctx.make("Cast", power, to=dtype)
    elif is_float(dtype) != is_float(ctx.build.dtype(power)):
        ctx.refuse("a base of whole numbers and an exponent that is none; cast the base to float before it")
    return [ctx.make("Pow", x, power)]


def _known_pow(ctx: Context, x: str, power: float) -> str:
    if power in (1.0, 2.0, 3.0):
        return _chain(ctx, "Mul", *[x] * int(power))
    if power in (0.5, -0.5):
        root = ctx.make("Sqrt", x)
        return root if power > 0 else ctx.make("Reciprocal", root)
    if power == -1.0:
        return ctx.make("Reciprocal", x)
    return ctx.make("Pow", x, ctx.number(power, x))


_MEAN_ELEMENTS = 1 << 16
"""Elements of a known array that a mean is made as; a larger one is expanded where it is used."""


def _uniform(ctx: Context, shape: Shape) -> str:
    """Add uniform numbers in [0, 1); returns their name."""
    check_shape(shape, "what it draws")
    name = ctx.build.unique(f"{ctx.build.scope}uniform")
    return ctx.build.value(name, shape, ctx.precision, Role.RANDOM)


def _shape(ctx: Context) -> Shape:
    """Return the shape of what is drawn: that of the operand, or the attribute."""
    if ctx.attr("dtype") is not None and numpy_type(ctx.attr("dtype")).kind in "iub":
        ctx.refuse("a type of whole numbers")
    return ctx.shape(0) if ctx.node.op.endswith("Like") else tuple(ctx.attr("shape"))


@lowers("RandomUniform", "RandomUniformLike")
def _random_uniform(ctx: Context) -> Sequence[Operand]:
    low, high = float(ctx.attr("low", 0.0)), float(ctx.attr("high", 1.0))
    y = ctx.scaled(_uniform(ctx, _shape(ctx)), high - low)
    return [ctx.make("Add", y, ctx.number(low, y)) if low else y]


@lowers("RandomNormal", "RandomNormalLike")
def _random_normal(ctx: Context) -> Sequence[Operand]:
    """Box and Muller (1958): a radius and an angle. Of 24 random bits, numbers reach 5.8 deviations."""
    shape = _shape(ctx)
    first, second = _uniform(ctx, shape), _uniform(ctx, shape)
    kept = ctx.make("Sub", ctx.number(1.0, first), first)  # above 0, of which there is a logarithm
    radius = ctx.make("Sqrt", ctx.make("Mul", ctx.make("Log", kept), ctx.number(-2.0, first)))
    y = ctx.make("Mul", radius, ctx.make("Cos", ctx.make("Mul", second, ctx.number(2 * math.pi, second))))
    y, mean = ctx.scaled(y, float(ctx.attr("scale", 1.0))), float(ctx.attr("mean", 0.0))
    return [ctx.make("Add", y, ctx.number(mean, y)) if mean else y]


@lowers("Bernoulli")
def _bernoulli(ctx: Context) -> Sequence[Operand]:
    """1 with the probability that the operand says, else 0. There is no gradient, as in PyTorch."""
    target, known = ctx.attr("dtype"), ctx.known(0)
    kind = "f" if target is None else numpy_type(target).kind
    dtype = "bool" if kind == "b" else "int64" if kind in "iu" else ctx.precision
    if known is not None and dtype == ctx.precision and not ctx.training:
        return [known.astype(ctx.precision)]
    p = ctx.value(0)
    drawn = ctx.make("Less", _uniform(ctx, ctx.build.shape(p)), p)
    return [drawn if dtype == "bool" else ctx.make("Cast", drawn, to=dtype)]


def _mean_of(ctx: Context, drawn: str) -> Operand | None:
    """Return the mean of what a Less of uniform numbers with a known probability is, cast to numbers."""
    # None while training, and for any other value. PyTorch exports ``bernoulli_(p)`` so.
    maker = ctx.build.makers.get(drawn)
    if ctx.training or maker is None or maker.op != "Less":
        return None
    draws, bound = maker.inputs
    probability: Array | None = ctx.build.constants.get(bound)
    if ctx.build.values[draws].role is not Role.RANDOM or probability is None or probability.size != 1:
        return None
    shape, mean = ctx.build.shape(drawn), float(probability.reshape(-1)[0])
    if math.prod(shape) <= _MEAN_ELEMENTS:
        return np.full(shape, mean, ctx.precision)
    return ctx.make("Expand", ctx.build.constant(mean, ctx.precision), shape=shape)
