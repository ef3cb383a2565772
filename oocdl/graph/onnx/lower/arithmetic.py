"""Lowers ONNX operators to those of ``ops``: arithmetic, contractions."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.folding.constant_folding import numpy_type
from oocdl.graph.onnx.lower.random import mean_of


def _same(op: str, attrs: Mapping[str, Any]) -> Lower:
    def lower(ctx: Context) -> Sequence[Operand]:
        given = {name: ctx.attr(name, default) for name, default in attrs.items()}
        return [ctx.make(op, *ctx.values(), **given)]

    return lower


def of_rules(rules: Rules) -> dict[str, Lower]:
    """Return the lowerings of ONNX operators whose rules say that they are ours, too."""
    return {
        f"{rule.domain}::{op}".removeprefix("::"): _same(op, rule.onnx)
        for op, rule in rules.items()
        if rule.onnx is not None
    }


def _chain(op: str) -> Lower:
    return lambda ctx: [reduce(lambda a, b: ctx.make(op, a, b), ctx.values())]


def _ceil(ctx: Context) -> Sequence[Operand]:
    return [ctx.make("Neg", ctx.make("Floor", ctx.make("Neg", ctx.value(0))))]


def _sign(ctx: Context) -> Sequence[Operand]:
    """-1, 0 or 1. Floor makes the slope zero, where comparisons alone would give none."""
    x = ctx.value(0)
    zero = ctx.number(0, x)
    low = ctx.make("Where", ctx.make("Less", x, zero), ctx.number(-1, x), x)
    found = ctx.make("Where", ctx.make("Greater", x, zero), ctx.number(1, x), low)
    return [ctx.make("Floor", found) if ctx.build.dtype(x) == ctx.precision else found]


def _mean(ctx: Context) -> Sequence[Operand]:
    total = reduce(lambda a, b: ctx.make("Add", a, b), ctx.values())
    return [ctx.make("Div", total, ctx.number(len(ctx.node.inputs), total))]


def _pass(ctx: Context) -> Sequence[Operand]:
    return [ctx.operand(0)]


def _cast(ctx: Context) -> Sequence[Operand]:
    found = ctx.operand(0)
    if ctx.node.op == "Cast":
        target = numpy_type(ctx.attr("to"))
    else:
        like = ctx.operand(1)
        target = np.dtype(ctx.build.dtype(like)) if isinstance(like, str) else like.dtype
    if not isinstance(found, str):
        return [found.astype(target)]
    number = target.kind not in "iub"
    dtype = ctx.precision if number else "bool" if target.kind == "b" else "int64"
    if number and (mean := mean_of(ctx, found)) is not None:
        return [mean]
    return [found if ctx.build.dtype(found) == dtype else ctx.make("Cast", found, to=dtype)]


def bounded(ctx: Context, x: str, low: float | None, high: float | None) -> str:
    """Return ``x`` between two numbers, flat where it is one of them."""
    for op, bound in (("Max", low), ("Min", high)):
        if bound is not None:
            x = ctx.make(op, x, ctx.number(float(bound), x), bound=True)
    return x


def _clip(ctx: Context) -> Sequence[Operand]:
    ctx.constants("bounds", 1, 2)
    known = (ctx.known(1), ctx.known(2))
    low, high = (
        ctx.attr(name) if found is None else float(found.reshape(-1)[0])
        for name, found in zip(("min", "max"), known, strict=True)
    )
    return [bounded(ctx, ctx.value(0), low, high)]


def _extreme(op: str) -> Lower:
    """Lower Max or Min; that of a value and a number is a bound where dynamo has made it of a clamp."""

    def lower(ctx: Context) -> Sequence[Operand]:
        number = ctx.known(1)
        if number is not None and number.ndim == 0 and "aten.clamp" in ctx.node.origin:
            return [ctx.make(op, ctx.value(0), ctx.value(1), bound=True)]
        return _chain(op)(ctx)

    return lower


def need_floats(ctx: Context, *indices: int) -> None:
    """Raise ModelError if an input at ``indices`` holds whole numbers or booleans."""
    for index in indices:
        found = ctx.operand(index)
        dtype = ctx.build.dtype(found) if isinstance(found, str) else found.dtype.name
        if np.dtype(dtype).kind in "iub":
            raise ModelError(f"input '{ctx.node.inputs[index]}' is {dtype}; training needs float")


def _matmul(ctx: Context) -> Sequence[Operand]:
    need_floats(ctx, 0, 1)
    operands = [ctx.value(0), ctx.value(1)]
    shapes = [ctx.shape(0), ctx.shape(1)]
    letters = iter(string.ascii_lowercase)
    m, k, n = next(letters), next(letters), next(letters)
    ends = ["" if len(shapes[0]) == 1 else m, "" if len(shapes[1]) == 1 else n]
    batches = [list(shape[:-2]) for shape in shapes]
    rank = max(len(batch) for batch in batches)
    terms: list[str] = ["", ""]
    drop: list[list[int]] = [[], []]
    out = ""
    for position in range(-rank, 0):
        extents = [batch[position] if -position <= len(batch) else None for batch in batches]
        letter = next(letters)
        out += letter
        for side in (0, 1):
            extent, other = extents[side], extents[1 - side]
            if extent is None:
                continue
            if extent == 1 and other is not None and other != 1:
                drop[side].append(len(batches[side]) + position)
            else:
                terms[side] += letter
    for side in (0, 1):
        if drop[side]:
            kept = [extent for axis, extent in enumerate(shapes[side]) if axis not in drop[side]]
            operands[side] = ctx.reshape(operands[side], kept)
    equation = f"{terms[0]}{ends[0]}{k},{terms[1]}{k}{ends[1]}->{out}{ends[0]}{ends[1]}"
    return [ctx.make("Einsum", *operands, equation=equation)]


def _gemm(ctx: Context) -> Sequence[Operand]:
    need_floats(ctx, 0, 1)
    left = "km" if ctx.attr("transA", 0) else "mk"
    right = "nk" if ctx.attr("transB", 0) else "kn"
    y = ctx.make("Einsum", ctx.value(0), ctx.value(1), equation=f"{left},{right}->mn")
    alpha, beta = ctx.attr("alpha", 1.0), ctx.attr("beta", 1.0)
    if alpha != 1.0:
        y = ctx.make("Mul", y, ctx.number(alpha, y))
    if ctx.has(2) and beta:
        bias = ctx.value(2)
        y = ctx.make("Add", y, bias if beta == 1.0 else ctx.make("Mul", bias, ctx.number(beta, bias)))
    return [y]


ARITHMETIC: dict[str, Lower] = {
    "Max": _extreme("Max"),
    "Min": _extreme("Min"),
    "Sum": _chain("Add"),
    "Mean": _mean,
    "Ceil": _ceil,
    "Sign": _sign,
    "Identity": _pass,
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clip,
    "MatMul": _matmul,
    "Gemm": _gemm,
}
"""Lowerings of operators that compute, besides those of ``layers`` and those that rules describe."""
