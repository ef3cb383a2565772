"""Reductions of the onnxruntime engine, a record each, by NumPy on blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from oocdl.engines.ort.ort_pointwise import in_blocks
from oocdl.engines.ort.ort_record import Kernel
from oocdl.fusion import blockwise
from oocdl.graph.ir.graph import Array

Into = blockwise.Into[Array]
Bind = blockwise.Bind[Array]

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
        share = float(np.divide(1.0, prod(x.shape[axis] for axis in axes)))
        np.multiply(reduced(np.add, x, axes), share, out=outs[0])
        centred = np.subtract(x, outs[0])
        np.multiply(reduced(np.add, np.multiply(centred, centred, out=centred), axes), share, out=outs[1])

    return kernel


def _finish_max(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    return [parts[0].max(axes, keepdims=True)]


def _finish_sum(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    dtype = parts[0].dtype
    wide = np.float64 if dtype.kind == "f" else dtype
    return [parts[0].sum(axes, keepdims=True, dtype=wide).astype(dtype)]


def _finish_log_sum_exp(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    return [log_sum_exp(parts[0], axes)]


def _finish_moments(parts: list[Array], counts: Array, axes: tuple[int, ...]) -> list[Array]:
    """Combine moments by Chan, Golub and LeVeque (1983), in float64."""
    dtype = parts[0].dtype
    means, variances = (part.astype(np.float64) for part in parts)
    shares = counts / counts.sum()
    mean = (means * shares).sum(axes, keepdims=True)
    variance = ((variances + (means - mean) ** 2) * shares).sum(axes, keepdims=True)
    return [mean.astype(dtype), variance.astype(dtype)]


KERNELS: Mapping[str, Kernel] = {
    "ReduceSum": in_blocks(_reduction(np.add), in_place=0, finish=_finish_sum),
    "ReduceMax": in_blocks(_reduction(np.maximum), in_place=0, finish=_finish_max),
    "LogSumExp": in_blocks(_log_sum_exp, in_place=0, finish=_finish_log_sum_exp),
    "Moments": in_blocks(_moments, in_place=0, finish=_finish_moments),
}
