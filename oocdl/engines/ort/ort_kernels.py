"""The table of the onnxruntime engine: one record for each operator.

onnxruntime computes convolutions, pooling, sums by index and the error function; all else is NumPy's. The
records of elementwise operators and reductions are in ``ort_pointwise``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from oocdl.engines import numpy_attention, numpy_ctc, numpy_moves, recurrent_steps
from oocdl.engines.checked_indices import check_indices
from oocdl.engines.convolution import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD, Convolution
from oocdl.engines.numpy_moves import places_of
from oocdl.engines.ort import ort_channels_last as tiled
from oocdl.engines.ort import ort_pointwise, ort_windows
from oocdl.engines.ort.block_volumes import in_blocks
from oocdl.engines.ort.ort_channels_last import is_tiled, with_channels_last
from oocdl.engines.ort.ort_record import Into, Kernel, Orders, Single, copied, kernel_of
from oocdl.engines.ort.ort_session import run
from oocdl.fusion.taps import weigh
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import Letters, aligned
from oocdl.graph.ir.program import Instruction


def _sum_lone(x: Array, term: str, kept: str) -> Array:
    """The operand with the letters that nothing else has summed away."""
    lone = [axis for axis, letter in enumerate(term) if letter not in kept]
    return ort_pointwise.reduced(np.add, x, lone).squeeze(tuple(lone))


def _grouped(x: Array, term: str, *groups: str) -> Array:
    """The operand with one axis a group of letters."""
    extents = dict(zip(term, x.shape, strict=True))
    ordered = x.transpose([term.index(letter) for letter in "".join(groups)])
    return aligned(ordered.reshape([prod(extents[letter] for letter in group) for group in groups]))


def _einsum(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """Einsum of two operands as one matrix product; see ``Letters``."""
    letters = Letters(item.attrs["equation"])
    left, right, batch = letters.left_kept, letters.right_kept, (letters.batch,) if letters.batch else ()
    first = _grouped(_sum_lone(args[0], letters.left, left), left, *batch, letters.rows, letters.inner)
    second = _grouped(_sum_lone(args[1], letters.right, right), right, *batch, letters.inner, letters.columns)
    extents = dict(zip(letters.out, out.shape, strict=True))
    in_order = letters.batch + letters.rows + letters.columns
    product = np.matmul(first, second) if letters.inner else first * second
    product = product.reshape([extents[letter] for letter in in_order])
    numpy_moves.copy(product.transpose([in_order.index(letter) for letter in letters.out]), out)


def _take(args: Sequence[Array], item: Instruction, out: Array) -> None:
    if item.attrs.get("batch"):
        out[...] = numpy_moves.KERNELS["Gather"](args, item)[0]
    else:
        check_indices(item, args[1])
        np.take(args[0], args[1], 0, out, mode="wrap")


def _gather_grad(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """Sums of rows of the gradient, in their order; NumPy takes up to 50 times as long as ScatterND."""
    (ids, dy), batch = args, int(item.attrs.get("batch", 0))
    tables, rows = places_of(ids, item)
    row = out.shape[batch + 1 :]
    places, sums = rows.reshape(-1, 1), np.zeros((len(tables), *out.shape[batch:]), dy.dtype)
    if len(tables) == 1:
        sums = sums[0]
    else:
        places = np.stack(np.broadcast_arrays(tables, rows), -1).reshape(-1, 2)
    run("ScatterND", [sums, places, dy.reshape(-1, *row)], [sums], reduction="add")
    out[...] = sums.reshape(out.shape)


def _resample(args: Sequence[Array], item: Instruction, out: Array) -> None:
    axis, columns, weights = (item.attrs[name] for name in ("axis", "columns", "weights"))
    weigh(args[0], int(axis) % args[0].ndim, columns, weights, out)


def _sequential(run: recurrent_steps.Run) -> Kernel:
    return copied(lambda args, item: run(list(map(aligned, args)), item.attrs))


def _first_of(*ways: Callable[[Instruction, Orders], Into | None], default: Kernel) -> Kernel:
    """The record of an operator that the first of ``ways`` that suits computes, else that of ``default``."""

    def bind(item: Instruction, orders: Orders) -> Into:
        suiting = (into for way in ways if (into := way(item, orders)) is not None)
        return next(suiting, None) or default.bind(item, orders)

    return replace(default, bind=bind)


def _pooling(default: Single, by_tiles: tiled.Kernel, pooled: Callable[[Instruction], Shape]) -> Kernel:
    """``pooled``: the shape of what has one place for each window."""

    def side_by_side(item: Instruction, orders: Orders) -> Into | None:
        large, small = item.operands[0].shape, pooled(item)
        # Of a gradient, a part may be wanted that does not end between two windows.
        whole = item.kernel_shapes[0] in (large, small)
        suits = whole and is_tiled(item, large, small, item.attrs["kernel_shape"])
        return with_channels_last(by_tiles, item, orders, None) if suits else None

    return _first_of(side_by_side, default=kernel_of(default, takes_unpadded=True))


def _convolution(kind: Convolution, default: Single, by_tiles: tiled.Kernel) -> Kernel:
    """A convolution; ``by_tiles`` computes it where windows lie side by side."""

    def side_by_side(item: Instruction, orders: Orders) -> Into | None:
        large, small = item.operands[0].shape, kind.other_data(item)
        if kind.transposed:
            large, small = small, large
        suits = is_tiled(item, large, small, kind.weights(item)[2:])
        return with_channels_last(by_tiles, item, orders, kind) if suits else None

    return _first_of(partial(in_blocks, kind), side_by_side, default=kernel_of(default, takes_unpadded=True))


_SEQUENTIAL = {**recurrent_steps.KERNELS, **numpy_ctc.KERNELS, **numpy_attention.KERNELS}
KERNELS: Mapping[str, Kernel] = {
    **{op: copied(run) for op, run in numpy_moves.KERNELS.items()},
    **ort_pointwise.KERNELS,
    "Concat": kernel_of(numpy_moves.concat, takes_unpadded=True),
    "Gather": kernel_of(_take),
    "GatherGrad": kernel_of(_gather_grad),
    **{op: _sequential(run) for op, run in _SEQUENTIAL.items()},
    "Resample": kernel_of(_resample),
    "Einsum": kernel_of(_einsum),
    "Conv": _convolution(CONV, ort_windows.conv, tiled.convolve),
    "ConvTranspose": _convolution(CONV_TRANSPOSE, ort_windows.conv_transpose, tiled.spread),
    "ConvWeightGrad": _convolution(CONV_WEIGHT_GRAD, ort_windows.conv_weight_grad, tiled.weight_gradient),
    "MaxPool": _pooling(ort_windows.max_pool, tiled.max_pool, lambda item: item.kernel_shapes[0]),
    "MaxPoolGrad": _pooling(ort_windows.max_pool_grad, tiled.max_pool_grad, lambda i: i.operands[1].shape),
}
