"""Linear maps in PyTorch: Einsum as one matrix product, Resample along one axis."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import Letters, classify
from oocdl.graph.ir.program import Instruction

_ONEDNN: bool = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_LEAST_ONEDNN_MULTIPLY_ADDS = 1 << 16
"""With fewer multiply-adds a call of oneDNN costs more than it saves."""

_GATHER_COLUMNS = 12
"""Columns of a matrix product that cost about as much as one gather and its product."""


def _sum_lone(x: Tensor, term: str, kept: str) -> Tensor:
    """Sum ``x`` over the letters that neither the other operand nor the result has."""
    lone = [axis for axis, letter in enumerate(term) if letter not in kept]
    return x.sum(lone) if lone else x


def _grouped(x: Tensor, term: str, *groups: str) -> Tensor:
    """Transpose and reshape ``x`` so that each group of letters is one axis."""
    extents = dict(zip(term, x.shape, strict=True))
    x = x.permute([term.index(letter) for letter in "".join(groups)])
    return x.reshape([math.prod(extents[letter] for letter in group) for group in groups])


def suits_onednn(a: Tensor, multiply_adds: int, least: int) -> bool:
    """Whether oneDNN computes products of ``a``, and is worth its call from ``least`` multiply-adds on."""
    return a.dtype == torch.float32 and a.device.type == "cpu" and multiply_adds >= least and _ONEDNN


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices; in float32 by oneDNN: MKL takes twice as long on AMD processors."""
    multiply_adds = a.shape[0] * a.shape[1] * b.shape[1]
    if not suits_onednn(a, multiply_adds, _LEAST_ONEDNN_MULTIPLY_ADDS):
        return a @ b
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def contract(a: Tensor, b: Tensor, letters: Letters) -> Tensor:
    """The product of two operands, its axes in the order batch, rows, columns."""
    a = _sum_lone(a, letters.left, letters.left_kept)
    b = _sum_lone(b, letters.right, letters.right_kept)
    left, right = letters.left_kept, letters.right_kept
    batch, rows, inner, columns = letters.batch, letters.rows, letters.inner, letters.columns
    if not inner:
        a, b = _grouped(a, left, batch, rows, ""), _grouped(b, right, batch, "", columns)
        return a * b
    if batch:
        return torch.bmm(_grouped(a, left, batch, rows, inner), _grouped(b, right, batch, inner, columns))
    return matmul(_grouped(a, left, rows, inner), _grouped(b, right, inner, columns))


def einsum(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Einsum of two operands, in whose terms no letter stands twice."""
    letters = classify(instruction.attrs["equation"])
    product = contract(args[0], args[1], letters)
    shape = instruction.kernel_shapes[0]
    extents = dict(zip(letters.out, shape, strict=True))
    in_order = letters.batch + letters.rows + letters.columns
    product = product.reshape([extents[letter] for letter in in_order])
    result = product.permute([in_order.index(letter) for letter in letters.out])
    return [result.to(getattr(torch, instruction.dtypes[0]))]  # products of bfloat16 are summed in float32


def resample(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Multiply a matrix along one axis; by gathers where its rows have few numbers that are not zero."""
    axis = int(instruction.attrs["axis"]) % args[0].dim()
    matrix = np.asarray(instruction.attrs["matrix"])
    before, after = (math.prod(n) for n in (args[0].shape[:axis], args[0].shape[axis + 1 :]))
    x = args[0].reshape((before, -1) if after == 1 else (before, -1, after))
    width = int((matrix != 0).sum(1).max(initial=1))
    if width == 1 or width * _GATHER_COLUMNS < matrix.shape[1]:
        result = _by_taps(x, matrix, width)
    else:
        weights = x.new_tensor(matrix)
        if after == 1:
            result = matmul(x, weights.t())
        else:
            result = torch.bmm(weights.expand(before, *weights.shape), x)
    return [result.reshape(instruction.kernel_shapes[0])]


def _by_taps(x: Tensor, matrix: Array, width: int) -> Tensor:
    """The sum over the at most ``width`` numbers in each row, in the order of columns."""
    places = np.argsort(matrix == 0, axis=1, kind="stable")[:, :width]
    shape = (1, -1, 1)[: x.dim()]
    terms: list[Tensor] = []
    for tap in range(width):
        weights = np.take_along_axis(matrix, places[:, tap : tap + 1], axis=1)[:, 0]
        term = x.index_select(1, torch.tensor(places[:, tap], device=x.device))
        if not (weights == 1).all():
            term.mul_(x.new_tensor(weights).reshape(shape))
        terms.append(term if not terms else terms.pop().add_(term))
    return terms[0]
