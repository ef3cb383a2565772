"""Records of the elementwise operators and reductions of the onnxruntime engine.

NumPy computes those that it has vector loops for, by their formulas where no faster kernel stands here. A
chain runs on blocks of a few hundred KiB, for which a session's call is too slow and too hungry. So its
members are kernels that write into memory they are given; they take operands, unpadded and broadcastable,
and the arrays their results go to. All else is left to sessions. Closed forms of the ONNX operators and
their measured costs: `docs/explanation/kernel-measurements.md`, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from oocdl.engines.numpy_functions import FUNCTIONS, SLOW, TESTS, by_steps, reads_first_operand_once
from oocdl.engines.ort.emit import Emitter, Lowering, Val
from oocdl.engines.ort.ort_record import Bind, Into, Kernel, by_numpy, left_to_sessions
from oocdl.fusion import grouping
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute
from oocdl.ops.pointwise import POINTWISE, Row

Attrs = Mapping[str, Any]


def _into(function: Callable[[Attrs, Sequence[Array], Array], Any]) -> Bind:
    """Bind a function of attributes, operands and the array of the result."""

    def bind(attrs: Attrs) -> Into:
        def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
            function(attrs, args, outs[0])

        return kernel

    return bind


def _out(function: Callable[..., Any], *constants: float) -> Bind:
    """Bind a function of the operands and constants with an ``out`` argument."""
    return _into(lambda attrs, args, out: function(*args, *constants, out=out))


def _relu_grad(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    dy, x = args
    np.greater(x, 0, out=out)
    np.multiply(out, dy, out=out)


def _dropout(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, u = args
    ratio = float(attrs["ratio"])
    if ratio >= 1.0:
        out[...] = 0
        return
    np.greater_equal(u, ratio, out=out)
    np.multiply(out, 1.0 / (1.0 - ratio), out=out)
    np.multiply(out, x, out=out)


def _normalize(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, mean, var = args
    scale = np.reciprocal(np.sqrt(var + float(attrs["eps"])))
    np.subtract(x, mean, out=out)
    np.multiply(out, scale, out=out)


def _same(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Lower to the ONNX operator of the same name."""
    return [emit(instruction.op, *args)]


def _by_formula(row: Row) -> Lowering:
    """Lower to the primitives of the operator's formula."""

    def lower(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
        def apply(op: str, given: list[Val | float]) -> Val:
            values = [g if isinstance(g, Val) else emit.scalar(g, args[0]) for g in given]
            return emit(op, *values, dtype="bool" if op in TESTS else args[0].dtype)

        return [compute(row.steps(instruction.attrs), args, apply)]

    return lower


def _emit_mod(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    x, divisor = args
    like_dividend = int(instruction.attrs.get("fmod", 0))
    if like_dividend or not x.dtype.startswith("float"):
        return [emit("Mod", x, divisor, fmod=like_dividend)]
    rest = emit("Mod", x, divisor, fmod=1)  # all that there is for floating-point numbers
    wrong = emit("Less", emit("Mul", emit("Sign", rest), emit("Sign", divisor)), 0.0, dtype="bool")
    return [emit("Where", wrong, emit("Add", rest, divisor), rest, dtype=x.dtype)]


def in_blocks(bind: Bind, *, in_place: int, finish: grouping.Finish[Array] | None = None) -> Kernel:
    """An operator by NumPy, also as a member of chains: what the arguments are, see ``Blockwise``."""
    kernel = by_numpy(lambda item: bind(item.attrs))
    return replace(kernel, blocks=grouping.Blockwise(bind, in_place, finish))


def _derived(row: Row) -> Kernel:
    """An operator by its formula: by NumPy where that has a loop for each primitive, else by a session."""
    steps = row.steps(row.sample)
    if any(step.op not in VECTOR_LOOPS for step in steps):
        return left_to_sessions(_by_formula(row))

    def bind(attrs: Attrs) -> Into:
        return by_steps(row.steps(attrs), row.arity)

    return in_blocks(bind, in_place=int(reads_first_operand_once(steps)))


_SEQUENTIAL_ELEMENTS = 512
"""Elements that are added up one by one; longer sums are made of several parts, whose errors differ."""


def _reduced(function: np.ufunc, x: Array, axes: Sequence[int]) -> Array:
    """``function`` over ``axes``, which are kept, one after the other.

    Outer axes first: rows are added up whole, which is as fast as memory, and only a row is left
    to the inner axes.
    """
    for axis in sorted(axis % x.ndim for axis in axes):
        length = x.shape[axis]
        # The innermost axis is added up in pairs by NumPy.
        if function is np.add and length > _SEQUENTIAL_ELEMENTS and prod(x.shape[axis + 1 :]) > 1:
            starts = np.arange(0, length, _SEQUENTIAL_ELEMENTS)
            x = np.add.reduceat(x, starts, axis=axis)
        x = function.reduce(x, axis=axis, keepdims=True)
    return x


def _reduction(function: Callable[[Array, Sequence[int]], Array]) -> Bind:
    """Bind a function of the operand and the axes."""
    return _into(lambda attrs, args, out: np.copyto(out, function(args[0], attrs["axes"]), casting="unsafe"))


def _log_sum_exp(x: Array, axes: Sequence[int]) -> Array:
    """``log(sum(exp(x)))`` over ``axes``."""
    largest = _reduced(np.maximum, x, axes)
    # Kept finite: infinity minus itself is not a number.
    bound = np.finfo(x.dtype).max
    largest = np.clip(largest, -bound, bound)
    powers = np.subtract(x, largest)
    total = _reduced(np.add, np.exp(powers, out=powers), axes)
    np.log(total, out=total)
    return np.add(total, largest, out=total)


def _moments(attrs: Attrs) -> Into:
    axes = tuple(attrs["axes"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x = args[0]
        share = float(np.divide(1.0, prod(x.shape[axis] for axis in axes)))
        np.multiply(_reduced(np.add, x, axes), share, out=outs[0])
        centred = np.subtract(x, outs[0])
        np.multiply(_reduced(np.add, np.multiply(centred, centred, out=centred), axes), share, out=outs[1])

    return kernel


def _finish_sum(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    dtype = parts[0].dtype
    wide = np.float64 if dtype.kind == "f" else dtype
    return [parts[0].sum(axes, keepdims=True, dtype=wide).astype(dtype)]


def _finish_moments(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    """Combine moments by Chan, Golub and LeVeque (1983), in float64."""
    dtype = parts[0].dtype
    means, variances = (part.astype(np.float64) for part in parts)
    shares = counts / counts.sum()
    mean = (means * shares).sum(axes, keepdims=True)
    variance = ((variances + (means - mean) ** 2) * shares).sum(axes, keepdims=True)
    return [mean.astype(dtype), variance.astype(dtype)]


_WITHOUT_LOOPS = ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Pow")
VECTOR_LOOPS = FUNCTIONS.keys() - set(_WITHOUT_LOOPS)
"""Primitives that NumPy has fast loops for."""

KERNELS: Mapping[str, Kernel] = {
    **{op: _derived(row) for op, row in FORMULAS.items()},
    **{op: left_to_sessions(_same) for op in (*_WITHOUT_LOOPS, *SLOW)},
    **{
        row.op: in_blocks(_out(FUNCTIONS[row.op]), in_place=0 if row.op in (*TESTS, "Where") else row.arity)
        for row in POINTWISE
        if row.op in VECTOR_LOOPS
    },
    "Mod": left_to_sessions(_emit_mod),
    "Cast": in_blocks(_into(lambda attrs, args, out: np.copyto(out, args[0], casting="unsafe")), in_place=0),
    "Normalize": in_blocks(_into(_normalize), in_place=1),
    # Faster than their formulas, with zeros of another sign in places.
    "Relu": in_blocks(_out(np.maximum, 0), in_place=1),
    "ReluGrad": in_blocks(_into(_relu_grad), in_place=0),
    "Dropout": in_blocks(_into(_dropout), in_place=0),
    "ReduceSum": in_blocks(_reduction(partial(_reduced, np.add)), in_place=0, finish=_finish_sum),
    "ReduceMax": in_blocks(
        _reduction(partial(_reduced, np.maximum)),
        in_place=0,
        finish=lambda parts, counts, axes: [parts[0].max(axes, keepdims=True)],
    ),
    "LogSumExp": in_blocks(
        _reduction(_log_sum_exp),
        in_place=0,
        finish=lambda parts, counts, axes: [_log_sum_exp(parts[0], axes)],
    ),
    "Moments": in_blocks(_moments, in_place=0, finish=_finish_moments),
}
