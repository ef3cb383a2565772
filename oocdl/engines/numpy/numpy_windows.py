"""Convolutions, their gradients and pooling in NumPy: a loop over the taps of the window.

At each tap the window sees a box of the operand, a place for each place of the result. Operands come
padded, so that all of a box is there; the gradient of pooling pads its own, one with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from oocdl.engines.convolution import groups_of
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import crop_of, pads_of
from oocdl.graph.ir.program import Instruction, padded_shape

Run = Callable[[Sequence[Array], Instruction], Sequence[Array]]
"""A kernel: operands and an instruction to results."""
Index = tuple[Any, ...]


def _steps(item: Instruction, name: str, rank: int) -> Sequence[int]:
    """Strides or dilations; ones where they are left out."""
    return item.attrs.get(name) or (1,) * rank


def _taps(item: Instruction, kernel: Sequence[int], places: Shape) -> Iterator[tuple[Index, Index]]:
    """Each tap of the window: where its weights are, and the box that it sees from ``places``."""
    strides, dilations = (_steps(item, name, len(kernel)) for name in ("strides", "dilations"))
    outer = (slice(None), slice(None))
    for tap in product(*map(range, kernel)):
        starts = [at * dilation for at, dilation in zip(tap, dilations, strict=True)]
        spans = zip(starts, strides, places, strict=True)
        box = (slice(at, at + max(stride * (n - 1) + 1, 0), stride) for at, stride, n in spans)
        yield (*outer, *tap), (*outer, *box)


def _box(whole: Array, item: Instruction) -> Array:
    """The wanted box of a result, zeros where that reaches beyond ``whole``."""
    found = np.zeros(item.kernel_shapes[0], whole.dtype)
    source, target = [], []
    for start, extent, have in zip(crop_of(item), found.shape, whole.shape, strict=True):
        first, last = max(start, 0), min(start + extent, have)
        source.append(slice(first, max(last, first)))
        target.append(slice(first - start, first - start + max(last - first, 0)))
    found[tuple(target)] = whole[tuple(source)]
    return found


def _padded(args: Sequence[Array], item: Instruction, index: int, fill: float) -> Array:
    pads = pads_of(item.operands[index])
    return args[index] if pads is None else np.pad(args[index], pads, constant_values=fill)


def conv(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """``y[n, o, p] = sum of x[n, c, stride p + dilation t] w[o, c, t]`` over a group's channels and taps."""
    x, w = args
    y = np.zeros(item.kernel_shapes[0], x.dtype)
    for tap, box in _taps(item, w.shape[2:], y.shape[2:]):
        part = np.einsum("ngc...,goc->ngo...", _by_group(x[box], item, 1), _by_group(w[tap], item, 0))
        y += part.reshape(y.shape)
    return [y]


def _by_group(array: Array, item: Instruction, axis: int) -> Array:
    """An array with the groups of its channels as an axis of their own."""
    groups = groups_of(item)
    return array.reshape(*array.shape[:axis], groups, array.shape[axis] // groups, *array.shape[axis + 1 :])


def conv_transpose(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """``y[n, o, stride p + dilation t] = sum of x[n, c, p] w[c, o, t]``, and of that the wanted box."""
    x, w = args
    whole = np.zeros(spread_shape(item), x.dtype)
    for tap, box in _taps(item, w.shape[2:], x.shape[2:]):
        part = np.einsum("ngc...,gco->ngo...", _by_group(x, item, 1), _by_group(w[tap], item, 0))
        whole[box] += part.reshape(whole[box].shape)
    return [_box(whole, item)]


def spread_shape(item: Instruction) -> Shape:
    """Return the shape of a transposed convolution before the wanted box is cut out."""
    x, w = (padded_shape(operand) for operand in item.operands)
    rank = len(x) - 2
    sizes = zip(x[2:], w[2:], _steps(item, "strides", rank), _steps(item, "dilations", rank), strict=True)
    return (
        x[0],
        groups_of(item) * w[1],
        *(stride * (n - 1) + dilation * (k - 1) + 1 for n, k, stride, dilation in sizes),
    )


def conv_weight_grad(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """``dw[o, c, t] = sum of dy[n, o, p] x[n, c, stride p + dilation t]`` over samples and places."""
    x, dy = args
    dw, grads = np.zeros(item.kernel_shapes[0], dy.dtype), _columns(_by_group(dy, item, 1))
    for tap, box in _taps(item, dw.shape[2:], dy.shape[2:]):
        seen = _columns(_by_group(x[box], item, 1))
        dw[tap] = (grads @ seen.swapaxes(1, 2)).reshape(dw[tap].shape)
    return [dw]


def _columns(array: Array) -> Array:
    """``[n, g, c, *space]`` as [g, c, places of all samples]."""
    return np.moveaxis(array, 0, 2).reshape(*array.shape[1:3], -1)


def max_pool(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """The largest of each window; what is no number counts as the largest."""
    y = np.full(item.kernel_shapes[0], -np.inf, args[0].dtype)
    for _, box in _taps(item, item.attrs["kernel_shape"], y.shape[2:]):
        np.maximum(y, args[0][box], out=y)
    return [y]


def max_pool_grad(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """The gradient goes to the first of the largest elements of each window."""
    x = _padded(args, item, 0, item.fill)
    dy = _padded(args, item, 1, 0.0)  # a window that does not exist has no gradient
    largest = np.full(dy.shape, -np.inf, x.dtype)
    for _, box in _taps(item, item.attrs["kernel_shape"], dy.shape[2:]):
        np.maximum(largest, x[box], out=largest)
    dx, left = np.zeros_like(x), np.ones(dy.shape, bool)
    for _, box in _taps(item, item.attrs["kernel_shape"], dy.shape[2:]):
        first = left & (x[box] == largest)
        dx[box] += np.where(first, dy, 0)
        left &= ~first
    return [_box(dx, item)]


KERNELS: Mapping[str, Run] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "ConvWeightGrad": conv_weight_grad,
    "MaxPool": max_pool,
    "MaxPoolGrad": max_pool_grad,
}
