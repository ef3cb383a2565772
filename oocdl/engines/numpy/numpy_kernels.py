"""The table of the NumPy engine: operators as their definitions say.

Operands come cropped, reshaped and padded, but for kernels that take them unpadded (the operands of a
Concat follow each other, see ``concat_pieces``); floating-point operands come in float64. Results may be of
any dtype: the engine casts them to theirs.

Convolutions, their gradients and pooling are a loop over the taps of the window. At each tap the window sees
a box of the operand, a place for each place of the result; operands come padded, so that all of it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from oocdl.engines import numpy_attention, numpy_ctc, numpy_moves, recurrent_steps
from oocdl.engines.checked_indices import check_divisor
from oocdl.engines.convolution import groups_of, slide_of
from oocdl.engines.numpy_functions import FUNCTIONS, SLOW
from oocdl.engines.numpy_moves import Run, boxed, padded, places_of
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction, padded_shape
from oocdl.graph.ir.score_tiles import tiling
from oocdl.ops.activation import FORMULAS
from oocdl.ops.expression import AUXILIARY, compute
from oocdl.ops.pointwise import Row

Scratch = Callable[[Instruction], int]
"""Upper bound of the elements of float64 that a kernel holds at once beside operands and results."""
Index = tuple[Any, ...]


@dataclass(frozen=True)
class Kernel:
    """All that the NumPy engine knows of one operator."""

    run: Run
    scratch: Scratch
    takes_unpadded: bool = False
    """Whether operands come without their padding."""


def _dropout(x: Array, u: Array, item: Instruction) -> Array:
    """Compares with the ratio rounded to the dtype of the result."""
    ratio = item.attrs["ratio"]
    least = float(np.dtype(item.dtypes[0]).type(ratio))
    return np.zeros_like(x) if ratio >= 1 else np.where(u >= least, x / (1 - ratio), 0)


def _gelu_grad(dy: Array, x: Array, item: Instruction) -> Array:
    if item.attrs.get("approximate", "none") == "none":
        normal = (1 + SLOW["Erf"](x * math.sqrt(0.5))) / 2
        return np.asarray(dy * (normal + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)))
    y, rise = np.tanh(_tanh_inside(x)), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return np.asarray(dy * ((1 + y) / 2 + x / 2 * (1 - y * y) * rise))


def _gelu(x: Array, item: Instruction) -> Array:
    if item.attrs.get("approximate", "none") == "none":
        return np.asarray(x * ((1 + SLOW["Erf"](x * math.sqrt(0.5))) / 2))
    return np.asarray(x / 2 * (1 + np.tanh(_tanh_inside(x))))


def _tanh_inside(x: Array) -> Array:
    return np.asarray(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


_FUNCTIONS = {**FUNCTIONS, **SLOW}


def _log_sum_exp(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    axes = tuple(item.attrs["axes"])
    largest = args[0].max(axes, keepdims=True)
    # Infinity minus itself is not a number.
    largest = np.where(np.isfinite(largest), largest, 0)
    return [np.log(np.exp(args[0] - largest).sum(axes, keepdims=True)) + largest]


def _moments(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    axes = tuple(item.attrs["axes"])
    return [args[0].mean(axes, keepdims=True), args[0].var(axes, keepdims=True)]


def _concat(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    found = np.empty(item.kernel_shapes[0], args[0].dtype)
    numpy_moves.concat(args, item, found)
    return [found]


def _gather_grad(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    (ids, dy), shape, batch = args, item.kernel_shapes[0], int(item.attrs.get("batch", 0))
    places = places_of(ids, item)
    tables = np.zeros((prod(shape[:batch]), *shape[batch:]), dy.dtype)
    np.add.at(tables, places, dy.reshape(*places[1].shape, *tables.shape[2:]))
    return [tables.reshape(shape)]


def _resample(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    x = np.moveaxis(args[0], item.attrs["axis"], -1)
    taps = zip(item.attrs["columns"], item.attrs["weights"].astype(x.dtype), strict=True)
    total = sum(x[..., columns] * weights for columns, weights in taps)
    return [np.moveaxis(np.asarray(total), -1, item.attrs["axis"])]


def _taps(item: Instruction, kernel: Sequence[int], places: Shape) -> Iterator[tuple[Index, Index]]:
    """Each tap of the window: where its weights are, and the box that it sees from ``places``."""
    strides, dilations, _ = slide_of(item)
    outer = (slice(None), slice(None))
    for tap in product(*map(range, kernel)):
        starts = [at * dilation for at, dilation in zip(tap, dilations, strict=True)]
        spans = zip(starts, strides, places, strict=True)
        box = (slice(at, at + max(stride * (n - 1) + 1, 0), stride) for at, stride, n in spans)
        yield (*outer, *tap), (*outer, *box)


def _box(whole: Array, item: Instruction) -> Array:
    found = np.empty(item.kernel_shapes[0], whole.dtype)
    boxed(whole, item, found)
    return found


def _conv(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
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


def _conv_transpose(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """``y[n, o, stride p + dilation t] = sum of x[n, c, p] w[c, o, t]``, and of that the wanted box."""
    x, w = args
    whole = np.zeros(_spread_shape(item), x.dtype)
    for tap, box in _taps(item, w.shape[2:], x.shape[2:]):
        part = np.einsum("ngc...,gco->ngo...", _by_group(x, item, 1), _by_group(w[tap], item, 0))
        whole[box] += part.reshape(whole[box].shape)
    return [_box(whole, item)]


def _spread_shape(item: Instruction) -> Shape:
    """Return the shape of a transposed convolution before the wanted box is cut out."""
    x, w = (padded_shape(operand) for operand in item.operands)
    strides, dilations, groups = slide_of(item)
    axes = zip(x[2:], w[2:], strides, dilations, strict=True)
    return (x[0], groups * w[1], *(step * (n - 1) + apart * (k - 1) + 1 for n, k, step, apart in axes))


def _conv_weight_grad(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """``dw[o, c, t] = sum of dy[n, o, p] x[n, c, stride p + dilation t]`` over samples and places."""
    x, dy = args
    dw, grads = np.zeros(item.kernel_shapes[0], dy.dtype), _columns(_by_group(dy, item, 1))
    for tap, box in _taps(item, dw.shape[2:], dy.shape[2:]):
        seen = _columns(_by_group(x[box], item, 1))
        dw[tap] = (grads @ seen.swapaxes(1, 2)).reshape(dw[tap].shape)
    return [dw]


def _columns(array: Array) -> Array:
    """``[n, g, c, *space]`` as [g, c, places of all samples]."""
    return np.moveaxis(array, 0, 2).reshape(*array.shape[1:3], array.shape[0] * prod(array.shape[3:]))


def _max_pool(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """The largest of each window; what is no number counts as the largest."""
    y = np.full(item.kernel_shapes[0], -np.inf, args[0].dtype)
    for _, box in _taps(item, item.attrs["kernel_shape"], y.shape[2:]):
        np.maximum(y, args[0][box], out=y)
    return [y]


def _max_pool_grad(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
    """The gradient goes to the first of the largest elements of each window."""
    x = padded(args[0], item.operands[0], item.fill)
    dy = padded(args[1], item.operands[1], 0.0)  # a window that does not exist has no gradient
    largest = np.full(dy.shape, -np.inf, x.dtype)
    for _, box in _taps(item, item.attrs["kernel_shape"], dy.shape[2:]):
        np.maximum(largest, x[box], out=largest)
    dx, left = np.zeros_like(x), np.ones(dy.shape, bool)
    for _, box in _taps(item, item.attrs["kernel_shape"], dy.shape[2:]):
        first = left & (x[box] == largest)
        dx[box] += np.where(first, dy, 0)
        left &= ~first
    return [_box(dx, item)]


def _times(count: int) -> Scratch:
    """Count operands and results ``count`` times."""
    return lambda item: count * sum(map(prod, [*map(padded_shape, item.operands), *item.kernel_shapes]))


def _product(item: Instruction) -> int:
    """Count one tap's part of the result, and its operands twice: a product may transpose them."""
    return prod(item.kernel_shapes[0]) + 2 * sum(map(prod, map(padded_shape, item.operands)))


def _pool_grad(item: Instruction) -> int:
    """Count the gradient of all that is padded, and what is kept of each window."""
    x, dy = (prod(padded_shape(operand)) for operand in item.operands)
    return x + 4 * dy


def _lattice(item: Instruction) -> int:
    """Count what CTC keeps of each class, and of each place of a label, in each frame."""
    (samples, steps, classes), (_, labels) = (operand.shape for operand in item.operands[:2])
    return samples * steps * (6 * classes + 8 * (2 * labels + 1))


def _score_tiles(item: Instruction) -> int:
    """Count tiles of scores, and parts of operands and results."""
    q, k = (operand.shape for operand in item.operands[:2])
    found = tiling(q, k[2], k[2])
    scores = prod((found.batch, found.groups, q[2], found.queries, k[2]))
    return 6 * scores + _times(2)(item)


def _elementwise(function: Callable[..., Any]) -> Kernel:
    """An operator by a function of its operands and the instruction.

    It takes four times, for values between the steps of a formula (objects in the error function).
    """

    def run(args: Sequence[Array], item: Instruction) -> Sequence[Array]:
        check_divisor(item, args[-1])
        return [np.broadcast_to(function(*args, item), item.kernel_shapes[0])]

    return Kernel(run, _times(4))


def _primitive(op: str) -> Kernel:
    return _elementwise(lambda *args: _FUNCTIONS[op](*args[:-1]))


def _by_formula(row: Row) -> Kernel:
    def function(*args: Any) -> Array:
        return compute(row.steps(args[-1].attrs), args[:-1], lambda op, given: _FUNCTIONS[op](*given))

    return _elementwise(function)


def _sequential(run: recurrent_steps.Run, scratch: Scratch) -> Kernel:
    return Kernel(lambda args, item: run(args, item.attrs), scratch)


KERNELS: Mapping[str, Kernel] = {
    **{op: _primitive(op) for op in _FUNCTIONS.keys() - AUXILIARY.keys()},
    **{op: _by_formula(row) for op, row in FORMULAS.items()},
    "Mod": _elementwise(lambda x, y, item: (np.fmod if item.attrs.get("fmod", 0) else np.mod)(x, y)),
    "Dropout": _elementwise(_dropout),
    "Normalize": _elementwise(lambda x, mean, var, item: (x - mean) / np.sqrt(var + item.attrs["eps"])),
    # In another order than in their formulas: runs that were begun before end with the same bits.
    "Gelu": _elementwise(_gelu),
    "GeluGrad": _elementwise(_gelu_grad),
    "SigmoidGrad": _elementwise(lambda dy, y, item: dy * y * (1 - y)),
    "Cast": _elementwise(lambda x, item: x),  # to the dtype of the result, as all are
    "Conv": Kernel(_conv, _product),
    "ConvTranspose": Kernel(_conv_transpose, lambda item: 2 * prod(_spread_shape(item)) + _product(item)),
    "ConvWeightGrad": Kernel(_conv_weight_grad, _product),
    "MaxPool": Kernel(_max_pool, _times(0)),
    "MaxPoolGrad": Kernel(_max_pool_grad, _pool_grad, takes_unpadded=True),
    **{op: Kernel(run, _times(0)) for op, run in numpy_moves.KERNELS.items()},
    "Top": Kernel(numpy_moves.KERNELS["Top"], _times(3)),
    "Concat": Kernel(_concat, _times(1), takes_unpadded=True),
    "GatherGrad": Kernel(_gather_grad, _times(0)),
    "ReduceSum": Kernel(lambda args, i: [args[0].sum(tuple(i.attrs["axes"]), keepdims=True)], _times(0)),
    "ReduceMax": Kernel(lambda args, i: [args[0].max(tuple(i.attrs["axes"]), keepdims=True)], _times(0)),
    "LogSumExp": Kernel(_log_sum_exp, _times(2)),
    "Moments": Kernel(_moments, _times(2)),
    **{op: _sequential(run, _times(2)) for op, run in recurrent_steps.KERNELS.items()},
    **{op: _sequential(run, _lattice) for op, run in numpy_ctc.KERNELS.items()},
    **{op: _sequential(run, _score_tiles) for op, run in numpy_attention.KERNELS.items()},
    "Einsum": Kernel(lambda args, item: [np.einsum(item.attrs["equation"], *args, optimize=True)], _times(2)),
    "Resample": Kernel(_resample, _times(2)),
}
