"""Convolutions whose windows lie side by side, of values with their channels last, as matrix products.

A window sees rows of the kernel's width times the channels; onnxruntime's own kernels for strides make an
im2col of the whole operand, and want planes. Arrays are ``[n, d, h, w, c]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod

import numpy as np
from onnx import TensorProto, helper

from oocdl.engines.ort.ort_channels_last import copy
from oocdl.engines.ort.ort_session import Session
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

SCRATCH_BYTES = 1 << 20
"""Bytes of the windows that are multiplied at once."""


@cache
def _product(transposed: bool, adds: bool) -> Session:
    """``a @ b``, or ``a.T @ b``, or that added to a third matrix."""
    names = ["a", "b", "sum"] if adds else ["a", "b"]
    node = helper.make_node("Gemm", names, ["y"], transA=int(transposed))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [f"{n}0", f"{n}1"]) for n in (*names, "y")]
    graph = helper.make_graph([node], "product", infos[:-1], infos[-1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return Session(model.SerializeToString(), names, ["y"])


def _parts(small: Array, taps: int) -> Iterator[tuple[int, slice, slice]]:
    """(sample, plane, rows) of the side with fewer places, few enough windows at once."""
    n, depth, height, width, _ = small.shape
    most = max(SCRATCH_BYTES // (4 * taps * width), 1)
    for sample in range(n):
        for plane in range(depth):
            for row in range(0, height, most):
                yield sample, slice(plane, plane + 1), slice(row, min(row + most, height))


def _tiles(x: Array, kernel: Sequence[int]) -> Array:
    """``x[n, d, h, w, c]`` as ``[n, d, h, w, kd, kh, kw * c]``, a view."""
    n, d, h, w, c = x.shape
    i, j, k = kernel
    return x.reshape(n, d // i, i, h // j, j, w // k, k * c).transpose(0, 1, 3, 5, 2, 4, 6)


def _gathered(tiles: Array) -> Array:
    """Windows as rows of a matrix."""
    made = tiles
    if not tiles.flags.c_contiguous:
        made = np.empty(tiles.shape, np.float32)
        copy(tiles, made)
    return made.reshape(-1, prod(tiles.shape[3:]))


def convolve(x: Array, w: Array, out: Array) -> None:
    """Convolve ``x`` with ``w[o, c, d, h, w]``."""
    matrix = np.ascontiguousarray(w.transpose(2, 3, 4, 1, 0)).reshape(-1, w.shape[0])
    tiles = _tiles(x, w.shape[2:])
    for sample, plane, rows in _parts(out, len(matrix)):
        seen = _gathered(tiles[sample, plane, rows])
        _product(False, False).run([seen, matrix], [out[sample, plane, rows].reshape(len(seen), -1)])


def spread(x: Array, w: Array, out: Array) -> None:
    """The transposed convolution with ``w[c, o, d, h, w]``."""
    matrix = np.ascontiguousarray(w.transpose(0, 2, 3, 4, 1)).reshape(len(w), -1)
    tiles = _tiles(out, w.shape[2:])
    for sample, plane, rows in _parts(x, matrix.shape[1]):
        part = x[sample, plane, rows]
        made = np.empty((part.size // len(w), matrix.shape[1]), np.float32)
        _product(False, False).run([part.reshape(-1, len(w)), matrix], [made])
        target = tiles[sample, plane, rows]
        copy(made.reshape(target.shape), target)


def weight_gradient(x: Array, dy: Array, shape: Sequence[int]) -> Array:
    """The gradient of the weights, ``[o, c, d, h, w]``."""
    o, c, *kernel = shape
    tiles = _tiles(x, kernel)
    total = np.zeros((c * prod(kernel), o), np.float32)
    for sample, plane, rows in _parts(dy, len(total)):
        seen = _gathered(tiles[sample, plane, rows])
        _product(True, True).run([seen, dy[sample, plane, rows].reshape(-1, o), total], [total])
    return total.reshape(*kernel, c, o).transpose(4, 3, 0, 1, 2)


def _last(array: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def _run(kernel: Callable[[Array, Array, Array], None], args: Sequence[Array], out: Array) -> None:
    made = np.moveaxis(out, 1, -1)
    target = made if made.flags.c_contiguous else np.empty(made.shape, made.dtype)
    kernel(_last(args[0]), args[1], target)
    if target is not made:
        made[...] = target


def run_conv(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """Run a Conv."""
    _run(convolve, args, out)


def run_conv_transpose(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """Run a ConvTranspose."""
    _run(spread, args, out)


def run_conv_weight_grad(args: Sequence[Array], out: Array, item: Instruction) -> None:
    """Run a ConvWeightGrad."""
    out[...] = weight_gradient(_last(args[0]), _last(args[1]), out.shape)
