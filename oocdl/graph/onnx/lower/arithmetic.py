"""Lowers what computes element by element: sums, comparisons, powers, casts, and activation functions.

Activations run as one loop. Their derivatives follow from how each is written; at kinks they are PyTorch's:
the piece that includes the kink in the condition of a Where is the one whose derivative counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.onnx.constant_folding import numpy_type
from oocdl.graph.onnx.context import LOWERINGS, Context, Entry, Lower, Operand, lowers
from oocdl.graph.onnx.lower.random import mean_of
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


def _scaled(ctx: Context, x: str, factor: float) -> str:
    return x if factor == 1.0 else ctx.make("Mul", x, ctx.number(factor, x))


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
    line = ctx.make("Add", _scaled(ctx, x, alpha), ctx.number(beta, x))
    one = ctx.number(1.0, x)
    high = ctx.make("Or", ctx.make("Greater", line, one), ctx.make("Equal", line, one))
    return ctx.make("Where", high, one, ctx.make("Relu", line))


def _celu(ctx: Context, x: str, *, alpha: float = 1.0) -> str:
    """``x`` where it is positive, else ``alpha (exp(x / alpha) - 1)``."""
    if alpha <= 0:
        ctx.refuse(f"alpha {alpha}")
    if alpha == 1.0:
        return ctx.make("Elu", x, alpha=1.0)
    falling = _scaled(ctx, ctx.make("Elu", _scaled(ctx, x, 1 / alpha), alpha=1.0), alpha)
    return ctx.make("Where", _above(ctx, x, 0.0), x, falling)


def _swiglu(ctx: Context, gate: str, value: str, *, alpha: float = 1.0) -> str:
    """The Swish of a gate times a value."""
    if ctx.shape(0) != ctx.shape(1):
        raise ModelError(f"the gate {list(ctx.shape(0))} has not the shape of the value {list(ctx.shape(1))}")
    return ctx.make("Mul", _swish(ctx, gate, alpha=alpha), value)


def _swish(ctx: Context, x: str, *, alpha: float = 1.0) -> str:
    return ctx.make("Mul", x, ctx.make("Sigmoid", _scaled(ctx, x, alpha)))


def _shrink(ctx: Context, x: str, *, lambd: float = 0.5, bias: float = 0.0) -> str:
    """Move what is beyond ``lambd`` by ``bias`` towards 0; all else is 0."""
    by = ctx.number(bias, x)
    below = ctx.make("Less", x, ctx.number(-lambd, x))
    low = ctx.make("Where", below, ctx.make("Add", x, by), ctx.number(0.0, x))
    return ctx.make("Where", _above(ctx, x, lambd), ctx.make("Sub", x, by), low)


def _relu(ctx: Context, x: str) -> str:
    """``x`` where it is positive, else 0; the formula of Relu is one of floats."""
    return ctx.make("Relu", x) if _is_float(ctx, x) else ctx.make("Max", x, ctx.number(0, x))


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
    "Selu": lambda c, x, *, alpha=1.6732632423543772, gamma=1.0507009873554805: _scaled(
        c, c.make("Elu", x, alpha=alpha), gamma
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


@lowers("Cast", "CastLike")
def _cast(ctx: Context) -> Sequence[Operand]:
    found = ctx.operand(0)
    if ctx.node.op == "Cast":
        target = numpy_type(ctx.attr("to"))
    else:
        like = ctx.operand(1)
        target = kind_of(ctx, like)
    if not isinstance(found, str):
        return [found.astype(target)]
    if target.kind in "iu":
        return [cast(ctx, found, kind_of(ctx, found), target)]
    number = target.kind != "b"
    dtype = ctx.precision if number else "bool"
    if number and (mean := mean_of(ctx, found)) is not None:
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
    single = exponent is not None and exponent.size == 1
    number = exponent.reshape(-1)[0].item() if exponent is not None and single else None
    if number is not None:
        x = ctx.reshape(x, (1,) * (len(ctx.shape(1)) - len(ctx.shape(0))) + ctx.shape(0))
    if number is not None and (_is_float(ctx, x) or (number >= 0 and number == int(number))):
        return [_known_pow(ctx, x, number)]
    if not _is_float(ctx, x) and exponent is not None and (exponent == np.trunc(exponent)).all():
        return [ctx.make("Pow", x, ctx.build.constant(exponent, "int64"))]
    power = ctx.value(1)
    if _is_float(ctx, x) == _is_float(ctx, power):
        return [ctx.make("Pow", x, power)]
    if _is_float(ctx, x):
        return [ctx.make("Pow", x, _cast_to(ctx, power, x))]
    ctx.refuse("a base of whole numbers and an exponent that is none; cast the base to float before it")


def _is_float(ctx: Context, value: str) -> bool:
    return ctx.build.dtype(value).startswith("float")


def _cast_to(ctx: Context, value: str, like: str) -> str:
    return ctx.make("Cast", value, to=ctx.build.dtype(like))


def _known_pow(ctx: Context, x: str, power: float) -> str:
    if power in (1.0, 2.0, 3.0):
        return _chain(ctx, "Mul", *[x] * int(power))
    if power in (0.5, -0.5):
        root = ctx.make("Sqrt", x)
        return root if power > 0 else ctx.make("Reciprocal", root)
    if power == -1.0:
        return ctx.make("Reciprocal", x)
    return ctx.make("Pow", x, ctx.number(power, x))
