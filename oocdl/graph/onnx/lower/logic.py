"""Lowers tests, logic and powers of mixed types: what exporters make masks and positions of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from oocdl.graph.onnx.context import Context, Lower, Operand


def _is_float(ctx: Context, value: str) -> bool:
    return ctx.build.dtype(value).startswith("float")


def _or_equal(op: str) -> Lower:
    """Build a comparison that also holds for equal numbers, and for nothing that is no number."""
    return lambda ctx: [ctx.make("Or", ctx.make(op, *ctx.values()), ctx.make("Equal", *ctx.values()))]


def _is_nan(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    return [ctx.make("Not", ctx.make("Equal", x, x))]


def _is_inf(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    high, low = bool(ctx.attr("detect_positive", 1)), bool(ctx.attr("detect_negative", 1))
    if not high and not low:
        return [ctx.make("Less", ctx.make("Abs", x), ctx.number(0.0, x))]  # nothing is
    infinity = ctx.number(float("inf") if high else float("-inf"), x)
    return [ctx.make("Equal", ctx.make("Abs", x) if high and low else x, infinity)]


def _xor(ctx: Context) -> Sequence[Operand]:
    return [ctx.make("Not", ctx.make("Equal", *ctx.values()))]


def _pow(ctx: Context) -> Sequence[Operand]:
    """Lower Pow; the result has the type of the base, whatever that of the exponent is."""
    x, exponent = ctx.value(0), ctx.known(1)
    number = float(exponent.reshape(-1)[0]) if exponent is not None and exponent.size == 1 else None
    if number is not None and (_is_float(ctx, x) or (number >= 0 and number.is_integer())):
        return [_known_pow(ctx, x, number)]
    if _is_float(ctx, x):
        power = ctx.value(1)
        return [ctx.make("Pow", x, power if _is_float(ctx, power) else _cast(ctx, power, x))]
    if number is None and not _is_float(ctx, ctx.value(1)):
        return [ctx.make("Pow", x, ctx.value(1))]
    wide = ctx.make("Cast", x, to=ctx.precision)
    power = ctx.value(1) if number is None else ctx.number(number, wide)
    return [_cast(ctx, ctx.make("Pow", wide, power if _is_float(ctx, power) else _cast(ctx, power, wide)), x)]


def _cast(ctx: Context, value: str, like: str) -> str:
    return ctx.make("Cast", value, to=ctx.build.dtype(like))


def _known_pow(ctx: Context, x: str, power: float) -> str:
    if power in (1.0, 2.0, 3.0):
        return reduce(lambda a, b: ctx.make("Mul", a, b), [x] * int(power))
    if power in (0.5, -0.5):
        root = ctx.make("Sqrt", x)
        return root if power > 0 else ctx.make("Reciprocal", root)
    if power == -1.0:
        return ctx.make("Reciprocal", x)
    return ctx.make("Pow", x, ctx.number(power, x))


LOGIC: dict[str, Lower] = {
    "LessOrEqual": _or_equal("Less"),
    "GreaterOrEqual": _or_equal("Greater"),
    "IsNaN": _is_nan,
    "IsInf": _is_inf,
    "Xor": _xor,
    "Pow": _pow,
}
"""Lowerings of comparisons, of logic, and of powers."""
