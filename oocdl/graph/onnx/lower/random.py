"""Lowers what draws numbers: RandomUniform, RandomNormal and Bernoulli.

All are made of uniform numbers that are keyed by the run's seed, the step, the node's name and the global
index, as those of Dropout are: any cut gives the same bits, and so does a resume. The attribute ``seed`` is
not read. In predictions they stay random, as ONNX says, but for what is 1 with a known probability: there its
mean takes its place, as dropout is left out. So stochastic depth, which multiplies a branch with such numbers
over their mean, leaves the branch as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from oocdl.graph.ir.graph import Array, Role, Shape
from oocdl.graph.onnx.bounds import check_shape
from oocdl.graph.onnx.constant_folding import numpy_type
from oocdl.graph.onnx.context import Context, Operand, lowers

_MEAN_ELEMENTS = 1 << 16
"""Elements of a known array that a mean is made as; a larger one is expanded where it is used."""


def uniform(ctx: Context, shape: Shape) -> str:
    """Add uniform numbers in [0, 1); returns their name."""
    check_shape(shape, "what it draws")
    name = ctx.build.unique(f"{ctx.build.scope}uniform")
    return ctx.build.value(name, shape, ctx.precision, Role.RANDOM)


def _shape(ctx: Context) -> Shape:
    """Return the shape of what is drawn: that of the operand, or the attribute."""
    if ctx.attr("dtype") is not None and numpy_type(ctx.attr("dtype")).kind in "iub":
        ctx.refuse("a type of whole numbers")
    if ctx.node.op.endswith("Like"):
        return ctx.shape(0)
    return tuple(int(extent) for extent in ctx.attr("shape"))


@lowers("RandomUniform", "RandomUniformLike")
def _random_uniform(ctx: Context) -> Sequence[Operand]:
    low, high = float(ctx.attr("low", 0.0)), float(ctx.attr("high", 1.0))
    y = uniform(ctx, _shape(ctx))
    if high - low != 1.0:
        y = ctx.make("Mul", y, ctx.number(high - low, y))
    return [ctx.make("Add", y, ctx.number(low, y)) if low else y]


@lowers("RandomNormal", "RandomNormalLike")
def _random_normal(ctx: Context) -> Sequence[Operand]:
    """Box and Muller (1958): a radius and an angle. Of 24 random bits, numbers reach 5.8 deviations."""
    shape = _shape(ctx)
    first, second = uniform(ctx, shape), uniform(ctx, shape)
    kept = ctx.make("Sub", ctx.number(1.0, first), first)  # above 0, of which there is a logarithm
    radius = ctx.make("Sqrt", ctx.make("Mul", ctx.make("Log", kept), ctx.number(-2.0, first)))
    y = ctx.make("Mul", radius, ctx.make("Cos", ctx.make("Mul", second, ctx.number(2 * math.pi, second))))
    scale, mean = float(ctx.attr("scale", 1.0)), float(ctx.attr("mean", 0.0))
    y = ctx.make("Mul", y, ctx.number(scale, y)) if scale != 1.0 else y
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
    drawn = ctx.make("Less", uniform(ctx, ctx.build.shape(p)), p)
    return [drawn if dtype == "bool" else ctx.make("Cast", drawn, to=dtype)]


def mean_of(ctx: Context, drawn: str) -> Operand | None:
    """Return the mean of what a Less of uniform numbers with a known probability is, cast to numbers.

    None while training, and for any other value. PyTorch exports ``bernoulli_(p)`` so.
    """
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
