"""NumPy kernels that write into memory they are given: what the chains of onnxruntime are made of.

A chain runs on blocks of a few hundred KiB, for which a session's call is too slow and too hungry.
A kernel takes operands, unpadded and broadcastable, and the arrays its results go to. A result may
lie in the memory of an operand of its own shape and dtype: of any operand where ``IN_PLACE`` says
nothing, of the first one alone where it says 1, of none where it says 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from oocdl.graph.ir import Array
from oocdl.graph.program import Instruction

Into = Callable[[Sequence[Array], Sequence[Array]], None]
Bind = Callable[[Mapping[str, Any]], Into]

_LONG = 512
"""Elements that are added up one by one; longer sums are made of several, whose errors differ."""


def _out(function: Callable[..., Any], *constants: float) -> Bind:
    """A function of the operands and constants with an ``out`` argument."""

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        function(*args, *constants, out=outs[0])

    return lambda attrs: kernel


def _divide(args: Sequence[Array], outs: Sequence[Array]) -> None:
    a, b = args
    if outs[0].dtype.kind == "f":
        np.divide(a, b, out=outs[0])
    else:  # ONNX truncates
        np.multiply(np.abs(a) // np.abs(b), np.sign(a) * np.sign(b), out=outs[0])


def _sigmoid(args: Sequence[Array], outs: Sequence[Array]) -> None:
    out = outs[0]
    np.exp(np.negative(args[0], out=out), out=out)
    np.add(out, 1.0, out=out)
    np.reciprocal(out, out=out)


def _where(args: Sequence[Array], outs: Sequence[Array]) -> None:
    condition, a, b = args
    np.copyto(outs[0], b)
    np.copyto(outs[0], a, where=condition)


def _cast(args: Sequence[Array], outs: Sequence[Array]) -> None:
    np.copyto(outs[0], args[0], casting="unsafe")


def _leaky_relu(attrs: Mapping[str, Any]) -> Into:
    alpha = float(attrs["alpha"])
    larger = np.maximum if alpha <= 1 else np.minimum

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        np.multiply(args[0], alpha, out=outs[0])
        larger(args[0], outs[0], out=outs[0])

    return kernel


def _relu_grad(args: Sequence[Array], outs: Sequence[Array]) -> None:
    dy, x = args
    np.greater(x, 0, out=outs[0])
    np.multiply(outs[0], dy, out=outs[0])


def _leaky_relu_grad(attrs: Mapping[str, Any]) -> Into:
    alpha = np.float32(attrs["alpha"])
    rise = np.float32(1) - alpha

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        dy, x = args
        out = outs[0]
        if rise + alpha != 1 or out.dtype != np.float32:
            out[...] = np.where(x > 0, dy, dy * out.dtype.type(attrs["alpha"]))
            return
        # Choosing branches; alpha + (1 - alpha) is exactly one, and takes a third of the time.
        np.greater(x, 0, out=out)
        np.multiply(out, rise, out=out)
        np.add(out, alpha, out=out)
        np.multiply(out, dy, out=out)

    return kernel


def _sigmoid_grad(args: Sequence[Array], outs: Sequence[Array]) -> None:
    dy, y = args
    np.subtract(1.0, y, out=outs[0])
    np.multiply(outs[0], y, out=outs[0])
    np.multiply(outs[0], dy, out=outs[0])


def _tanh_grad(args: Sequence[Array], outs: Sequence[Array]) -> None:
    dy, y = args
    np.multiply(y, y, out=outs[0])
    np.subtract(1.0, outs[0], out=outs[0])
    np.multiply(outs[0], dy, out=outs[0])


def _dropout(attrs: Mapping[str, Any]) -> Into:
    ratio = float(attrs["ratio"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x, u = args
        if ratio >= 1.0:
            outs[0][...] = 0
            return
        np.greater_equal(u, ratio, out=outs[0])
        np.multiply(outs[0], 1.0 / (1.0 - ratio), out=outs[0])
        np.multiply(outs[0], x, out=outs[0])

    return kernel


def _normalize(attrs: Mapping[str, Any]) -> Into:
    eps = float(attrs["eps"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x, mean, var = args
        scale = np.reciprocal(np.sqrt(var + eps))
        np.subtract(x, mean, out=outs[0])
        np.multiply(outs[0], scale, out=outs[0])

    return kernel


POINTWISE: Mapping[str, Bind] = {
    "Add": _out(np.add),
    "Sub": _out(np.subtract),
    "Mul": _out(np.multiply),
    "Div": lambda attrs: _divide,
    "Max": _out(np.maximum),
    "Min": _out(np.minimum),
    "Neg": _out(np.negative),
    "Sqrt": _out(np.sqrt),
    "Exp": _out(np.exp),
    "Log": _out(np.log),
    "Abs": _out(np.absolute),
    "Sigmoid": lambda attrs: _sigmoid,
    "Tanh": _out(np.tanh),
    "Reciprocal": _out(np.reciprocal),
    "Relu": _out(np.maximum, 0),
    "LeakyRelu": _leaky_relu,
    "Cast": lambda attrs: _cast,
    "Greater": _out(np.greater),
    "Less": _out(np.less),
    "Equal": _out(np.equal),
    "Not": _out(np.logical_not),
    "And": _out(np.logical_and),
    "Or": _out(np.logical_or),
    "Where": lambda attrs: _where,
    "ReluGrad": lambda attrs: _relu_grad,
    "LeakyReluGrad": _leaky_relu_grad,
    "SigmoidGrad": lambda attrs: _sigmoid_grad,
    "TanhGrad": lambda attrs: _tanh_grad,
    "Dropout": _dropout,
    "Normalize": _normalize,
}
"""What NumPy has vector loops for. The others are left to onnxruntime."""

IN_PLACE: Mapping[str, int] = {
    **dict.fromkeys(("Cast", "LeakyRelu", "ReluGrad", "LeakyReluGrad", "SigmoidGrad", "TanhGrad"), 0),
    **dict.fromkeys(("Dropout", "Where", "Greater", "Less", "Equal"), 0),
    "Normalize": 1,
}
"""How many of the first operands a result may lie in; all where an operator is not named."""


def reduced(function: np.ufunc, x: Array, axes: Sequence[int]) -> Array:
    """``function`` over ``axes``, which are kept, one after the other.

    Outer axes first: rows are added up whole, which is as fast as memory, and only a row is left
    to the inner axes.
    """
    for axis in sorted(axis % x.ndim for axis in axes):
        length = x.shape[axis]
        # The innermost axis is added up in pairs by NumPy.
        if function is np.add and length > _LONG and prod(x.shape[axis + 1 :]) > 1:
            starts = np.arange(0, length, _LONG)
            x = np.add.reduceat(x, starts, axis=axis)
        x = function.reduce(x, axis=axis, keepdims=True)
    return x


def _reduction(function: np.ufunc) -> Bind:
    def bind(attrs: Mapping[str, Any]) -> Into:
        axes = tuple(attrs["axes"])

        def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
            outs[0][...] = reduced(function, args[0], axes)

        return kernel

    return bind


def log_sum_exp(x: Array, axes: Sequence[int]) -> Array:
    """``log(sum(exp(x)))`` over ``axes``."""
    largest = reduced(np.maximum, x, axes)
    # Kept finite: infinity minus itself is not a number.
    bound = np.finfo(x.dtype).max
    largest = np.clip(largest, -bound, bound)
    powers = np.subtract(x, largest)
    total = reduced(np.add, np.exp(powers, out=powers), axes)
    np.log(total, out=total)
    return np.add(total, largest, out=total)


def _log_sum_exp(attrs: Mapping[str, Any]) -> Into:
    axes = tuple(attrs["axes"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        outs[0][...] = log_sum_exp(args[0], axes)

    return kernel


def _moments(attrs: Mapping[str, Any]) -> Into:
    axes = tuple(attrs["axes"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x = args[0]
        share = 1.0 / prod(x.shape[axis] for axis in axes)
        np.multiply(reduced(np.add, x, axes), share, out=outs[0])
        centred = np.subtract(x, outs[0])
        np.multiply(reduced(np.add, np.multiply(centred, centred, out=centred), axes), share, out=outs[1])

    return kernel


REDUCTIONS: Mapping[str, Bind] = {
    "ReduceSum": _reduction(np.add),
    "ReduceMax": _reduction(np.maximum),
    "LogSumExp": _log_sum_exp,
    "Moments": _moments,
}


def bound(instruction: Instruction) -> Into:
    """The kernel of an instruction of these tables."""
    return (POINTWISE.get(instruction.op) or REDUCTIONS[instruction.op])(instruction.attrs)


def finish(op: str, parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    """Results of a reduction from those of its parts, which lie along ``axes``.

    ``counts``: elements of each part, broadcastable. Moments by Chan, Golub and LeVeque (1983),
    in float64.
    """
    dtype = parts[0].dtype
    if op == "ReduceMax":
        return [parts[0].max(axes, keepdims=True)]
    if op == "ReduceSum":
        wide = np.float64 if dtype.kind == "f" else dtype
        return [parts[0].sum(axes, keepdims=True, dtype=wide).astype(dtype)]
    if op == "LogSumExp":
        return [log_sum_exp(parts[0], axes)]
    means, variances = (part.astype(np.float64) for part in parts)
    shares = counts / counts.sum()
    mean = (means * shares).sum(axes, keepdims=True)
    variance = ((variances + (means - mean) ** 2) * shares).sum(axes, keepdims=True)
    return [mean.astype(dtype), variance.astype(dtype)]
