"""Lowers activation functions of ONNX to elementwise operators of ``ops``, which run as one loop.

Derivatives follow from how each is written. At kinks they are PyTorch's: the piece that includes the kink
in the condition of a Where is the one whose derivative counts there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.onnx.context import Context, Lower, Operand


def above(ctx: Context, x: str, bound: float) -> str:
    """Return whether ``x > bound``."""
    return ctx.make("Greater", x, ctx.number(bound, x))


def _scaled(ctx: Context, x: str, factor: float) -> str:
    return x if factor == 1.0 else ctx.make("Mul", x, ctx.number(factor, x))


def _prelu(ctx: Context) -> Sequence[Operand]:
    """``x`` where it is positive, else ``slope x``; the gradient of a slope is summed where it is shared."""
    x, slope = ctx.value(0), ctx.value(1)
    shape = ctx.build.shape(x)
    if np.broadcast_shapes(shape, ctx.build.shape(slope)) != shape:
        raise ModelError(f"slopes {list(ctx.build.shape(slope))} do not broadcast to {list(shape)}")
    return [ctx.make("Where", above(ctx, x, 0.0), x, ctx.make("Mul", slope, x))]


def _hard_sigmoid(ctx: Context, x: str, alpha: float, beta: float) -> str:
    """``alpha x + beta`` between 0 and 1; flat at both ends, as ``torch.nn.functional.hardsigmoid``."""
    line = ctx.make("Add", _scaled(ctx, x, alpha), ctx.number(beta, x))
    one = ctx.number(1.0, x)
    high = ctx.make("Or", ctx.make("Greater", line, one), ctx.make("Equal", line, one))
    return ctx.make("Where", high, one, ctx.make("Relu", line))


def _sixth(alpha: float) -> float:
    """Return 1/6 for the number of float32 that stands for it in files."""
    return 1 / 6 if np.float32(alpha) == np.float32(1 / 6) else alpha


def _hardsigmoid(ctx: Context) -> Sequence[Operand]:
    return [_hard_sigmoid(ctx, ctx.value(0), _sixth(ctx.attr("alpha", 0.2)), ctx.attr("beta", 0.5))]


def _hardswish(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    return [ctx.make("Mul", x, _hard_sigmoid(ctx, x, 1 / 6, 0.5))]


def _selu(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    elu = ctx.make("Elu", x, alpha=float(ctx.attr("alpha", 1.6732632423543772)))
    return [_scaled(ctx, elu, ctx.attr("gamma", 1.0507009873554805))]


def _celu(ctx: Context) -> Sequence[Operand]:
    """``x`` where it is positive, else ``alpha (exp(x / alpha) - 1)``."""
    x, alpha = ctx.value(0), float(ctx.attr("alpha", 1.0))
    if alpha <= 0:
        ctx.refuse(f"alpha {alpha}")
    if alpha == 1.0:
        return [ctx.make("Elu", x, alpha=1.0)]
    falling = _scaled(ctx, ctx.make("Elu", _scaled(ctx, x, 1 / alpha), alpha=1.0), alpha)
    return [ctx.make("Where", above(ctx, x, 0.0), x, falling)]


def _mish(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    return [ctx.make("Mul", x, ctx.make("Tanh", ctx.make("Softplus", x)))]


def _swish(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    return [ctx.make("Mul", x, ctx.make("Sigmoid", _scaled(ctx, x, ctx.attr("alpha", 1.0))))]


def _swiglu(ctx: Context) -> Sequence[Operand]:
    """The Swish of a gate times a value."""
    gate, value = ctx.value(0), ctx.value(1)
    if ctx.shape(0) != ctx.shape(1):
        raise ModelError(f"the gate {list(ctx.shape(0))} has not the shape of the value {list(ctx.shape(1))}")
    chance = ctx.make("Sigmoid", _scaled(ctx, gate, ctx.attr("alpha", 1.0)))
    return [ctx.make("Mul", ctx.make("Mul", gate, chance), value)]


def _softsign(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    return [ctx.make("Div", x, ctx.make("Add", ctx.make("Abs", x), ctx.number(1.0, x)))]


def _thresholded_relu(ctx: Context) -> Sequence[Operand]:
    x = ctx.value(0)
    return [ctx.make("Where", above(ctx, x, ctx.attr("alpha", 1.0)), x, ctx.number(0.0, x))]


def _shrink(ctx: Context) -> Sequence[Operand]:
    """Move what is beyond ``lambd`` by ``bias`` towards 0; all else is 0."""
    x, bound = ctx.value(0), ctx.attr("lambd", 0.5)
    bias = ctx.number(ctx.attr("bias", 0.0), x)
    below = ctx.make("Less", x, ctx.number(-bound, x))
    low = ctx.make("Where", below, ctx.make("Add", x, bias), ctx.number(0.0, x))
    return [ctx.make("Where", above(ctx, x, bound), ctx.make("Sub", x, bias), low)]


ACTIVATIONS: dict[str, Lower] = {
    "PRelu": _prelu,
    "HardSigmoid": _hardsigmoid,
    "HardSwish": _hardswish,
    "Selu": _selu,
    "Celu": _celu,
    "Mish": _mish,
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "Softsign": _softsign,
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": _shrink,
}
"""Lowerings of activation functions, besides those that rules describe."""
