"""Records of the elementwise operators and reductions of the onnxruntime engine that are in no loop.

NumPy computes them, by their formulas where no faster kernel stands here. They take operands, unpadded and
broadcastable, and the arrays their results go to. The costs of onnxruntime's own operators:
`docs/explanation/kernel-measurements.md`, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from oocdl.engines.checked_indices import check_divisor
from oocdl.engines.numpy_functions import FUNCTIONS
from oocdl.engines.ort.ort_record import Kernel, kernel_of
from oocdl.engines.ort.ort_session import run
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import compute
from oocdl.ops.pointwise import POINTWISE, Row

Attrs = Mapping[str, Any]
Run = Callable[[Attrs, Sequence[Array], Array], Any]
"""A kernel of attributes, operands, and the array of its one result."""


def _record(run: Run) -> Kernel:
    """Return the record of a kernel of one result."""

    def kernel(args: list[Array], item: Instruction, out: Array) -> None:
        check_divisor(item, args[-1])
        run(item.attrs, args, out)

    return kernel_of(kernel)


def _out(function: Callable[..., Any]) -> Run:
    """Return the kernel of a function of the operands with an ``out`` argument."""
    return lambda attrs, args, out: function(*args, out=out)


def _mod(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, divisor = args
    (np.fmod if attrs.get("fmod", 0) else np.mod)(x, divisor, out=out)


def _normalize(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
    x, mean, var = args
    scale = np.reciprocal(np.sqrt(var + float(attrs["eps"])))
    np.subtract(x, mean, out=out)
    np.multiply(out, scale, out=out)


def _erf(x: Array, out: Array | None = None) -> Array:
    """The error function, for which NumPy has no loop; that of onnxruntime is 1 of what is no number."""
    out, unknown = np.empty_like(x) if out is None else out, np.isnan(x)
    run("Erf", [x], [out])
    np.copyto(out, x.dtype.type(np.nan), where=unknown)
    return out


def _softplus(x: Array, out: Array | None = None) -> Array:
    """``max(x, 0) + log(1 + exp(-|x|))``: NumPy's ``logaddexp`` has no vectors."""
    rest = np.abs(x)
    np.log1p(np.exp(np.negative(rest, out=rest), out=rest), out=rest)
    return np.asarray(np.add(np.maximum(x, 0, out=out), rest, out=out))


def _by_formula(row: Row) -> Run:
    def run(attrs: Attrs, args: Sequence[Array], out: Array) -> None:
        np.copyto(out, compute(row.steps(attrs), args, lambda op, given: _FUNCTIONS[op](*given)))

    return run


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


def _reduction(function: Callable[[Array, Sequence[int]], Array]) -> Run:
    return lambda attrs, args, out: np.copyto(out, function(args[0], attrs["axes"]), casting="unsafe")


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


def _moments(args: Sequence[Array], item: Instruction, outs: Sequence[Array]) -> None:
    x, axes = args[0], tuple(item.attrs["axes"])
    share = float(np.divide(1.0, prod(x.shape[axis] for axis in axes)))
    np.multiply(reduced(np.add, x, axes), share, out=outs[0])
    centred = np.subtract(x, outs[0])
    np.multiply(reduced(np.add, np.multiply(centred, centred, out=centred), axes), share, out=outs[1])


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {**FUNCTIONS, "Erf": _erf, "Softplus": _softplus}
_RUNS: Mapping[str, Run] = {
    **{op: _by_formula(row) for op, row in FORMULAS.items()},
    **{row.op: _out(_FUNCTIONS[row.op]) for row in POINTWISE if row.op in _FUNCTIONS},
    "Mod": _mod,
    "Cast": lambda attrs, args, out: np.copyto(out, args[0], casting="unsafe"),
    "Normalize": _normalize,
    "ReduceSum": _reduction(partial(reduced, np.add)),
    "ReduceMax": _reduction(partial(reduced, np.maximum)),
    "LogSumExp": _reduction(_log_sum_exp),
}
KERNELS: Mapping[str, Kernel] = {
    **{op: _record(run) for op, run in _RUNS.items()},
    "Moments": Kernel(bind=lambda item, orders: lambda args, outs: _moments(args, item, outs)),
}
