"""Records of the elementwise operators and reductions of the onnxruntime engine.

NumPy computes them, by their formulas where no faster kernel stands here; all can be members of chains. They
take operands, unpadded and broadcastable, and the arrays their results go to. The costs of onnxruntime's own
operators: `docs/explanation/kernel-measurements.md`, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from oocdl.engines.numpy_functions import FUNCTIONS, TESTS
from oocdl.engines.ort.ort_record import Into, Kernel
from oocdl.engines.ort.ort_session import run
from oocdl.engines.partial_results import combine_moments
from oocdl.fusion import grouping
from oocdl.graph.ir.graph import Array
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute
from oocdl.ops.pointwise import POINTWISE, Row

Bind = grouping.Bind[Array]
Attrs = Mapping[str, Any]


def _into(function: Callable[[Attrs, Sequence[Array], Array], Any]) -> Bind:
    """Bind a function of attributes, operands and the array of the result."""

    def bind(attrs: Attrs) -> Into:
        def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
            function(attrs, args, outs[0])

        return kernel

    return bind


def _out(function: Callable[..., Any]) -> Bind:
    """Bind a function of the operands with an ``out`` argument."""
    return _into(lambda attrs, args, out: function(*args, out=out))


def _mod(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, divisor = args
    (np.fmod if attrs.get("fmod", 0) else np.mod)(x, divisor, out=out)


def _normalize(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, mean, var = args
    scale = np.reciprocal(np.sqrt(var + float(attrs["eps"])))
    np.subtract(x, mean, out=out)
    np.multiply(out, scale, out=out)


def _erf(x: Array, out: Array | None = None) -> Array:
    """The error function, for which NumPy has no loop."""
    out = np.empty_like(x) if out is None else out
    run("Erf", [x], [out])
    return out


def _softplus(x: Array, out: Array | None = None) -> Array:
    """``max(x, 0) + log(1 + exp(-|x|))``: NumPy's ``logaddexp`` has no vectors."""
    rest = np.abs(x)
    np.log1p(np.exp(np.negative(rest, out=rest), out=rest), out=rest)
    return np.asarray(np.add(np.maximum(x, 0, out=out), rest, out=out))


def _in_blocks(bind: Bind, *, in_place: int, finish: grouping.Finish[Array] | None = None) -> Kernel:
    """An operator by NumPy, also as a member of chains: what the arguments are, see ``Blockwise``."""
    return Kernel(
        bind=lambda item, orders: bind(item.attrs), blocks=grouping.Blockwise(bind, in_place, finish)
    )


def _by_formula(row: Row) -> Kernel:
    """An operator by its formula."""

    def bind(attrs: Attrs) -> Into:
        steps = row.steps(attrs)

        def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
            np.copyto(outs[0], compute(steps, args, lambda op, given: _FUNCTIONS[op](*given)))

        return kernel

    return _in_blocks(bind, in_place=row.arity)


_SEQUENTIAL_ELEMENTS = 512
"""Elements that are added up one by one; longer sums are made of several parts, whose errors differ."""


def reduced(function: np.ufunc, x: Array, axes: Sequence[int]) -> Array:
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
    largest = reduced(np.maximum, x, axes)
    # Kept finite: infinity minus itself is not a number.
    bound = np.finfo(x.dtype).max
    largest = np.clip(largest, -bound, bound)
    powers = np.subtract(x, largest)
    total = reduced(np.add, np.exp(powers, out=powers), axes)
    np.log(total, out=total)
    return np.add(total, largest, out=total)


def _moments(attrs: Attrs) -> Into:
    axes = tuple(attrs["axes"])

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        x = args[0]
        share = float(np.divide(1.0, prod(x.shape[axis] for axis in axes)))
        np.multiply(reduced(np.add, x, axes), share, out=outs[0])
        centred = np.subtract(x, outs[0])
        np.multiply(reduced(np.add, np.multiply(centred, centred, out=centred), axes), share, out=outs[1])

    return kernel


def _finish_sum(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    dtype = parts[0].dtype
    wide = np.float64 if dtype.kind == "f" else dtype
    return [parts[0].sum(axes, keepdims=True, dtype=wide).astype(dtype)]


_APART = (*TESTS, "Where", "Erf")
"""Primitives whose result lies in no operand's memory."""
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {**FUNCTIONS, "Erf": _erf, "Softplus": _softplus}

KERNELS: Mapping[str, Kernel] = {
    **{op: _by_formula(row) for op, row in FORMULAS.items()},
    **{
        row.op: _in_blocks(_out(_FUNCTIONS[row.op]), in_place=0 if row.op in _APART else row.arity)
        for row in POINTWISE
        if row.op in _FUNCTIONS
    },
    "Mod": _in_blocks(_into(_mod), in_place=0),
    "Cast": _in_blocks(_into(lambda attrs, args, out: np.copyto(out, args[0], casting="unsafe")), in_place=0),
    "Normalize": _in_blocks(_into(_normalize), in_place=1),
    "ReduceSum": _in_blocks(_reduction(partial(reduced, np.add)), in_place=0, finish=_finish_sum),
    "ReduceMax": _in_blocks(
        _reduction(partial(reduced, np.maximum)),
        in_place=0,
        finish=lambda parts, counts, axes: [parts[0].max(axes, keepdims=True)],
    ),
    "LogSumExp": _in_blocks(
        _reduction(_log_sum_exp),
        in_place=0,
        finish=lambda parts, counts, axes: [_log_sum_exp(parts[0], axes)],
    ),
    "Moments": _in_blocks(_moments, in_place=0, finish=partial(combine_moments, np)),
}
