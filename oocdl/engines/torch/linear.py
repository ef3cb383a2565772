"""Linear maps in PyTorch: Einsum as one matrix product, Resample along one axis."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from oocdl.fusion.taps import DTYPES, weigh
from oocdl.graph.ir.operands import Letters
from oocdl.graph.ir.program import Instruction

linear_pointwise: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""oneDNN's product of two matrices, the second transposed."""
_LEAST_ONEDNN_MULTIPLY_ADDS = 1 << 16
"""Minimum multiply-adds for which a call of oneDNN saves more than it costs."""


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
    known = a.dtype == torch.float32 and a.device.type == "cpu" and linear_pointwise is not None
    return known and multiply_adds >= least


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices; in float32 by oneDNN: MKL takes twice as long on AMD processors."""
    multiply_adds = a.shape[0] * a.shape[1] * b.shape[1]
    if not suits_onednn(a, multiply_adds, _LEAST_ONEDNN_MULTIPLY_ADDS):
        return a @ b
    # Of one element for many oneDNN has only a reference kernel, a hundred times slower.
    a, b = (x.contiguous() if 0 in x.stride() else x for x in (a, b))
    if a.stride(0) == b.stride(1) == 1 and a.shape[0] > b.shape[1]:
        return matmul(b.t(), a.t()).t()  # oneDNN copies a transposed first operand: let it be the smaller one
    product: Tensor = linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def contract(a: Tensor, b: Tensor, letters: Letters) -> Tensor:
    """The product of two operands, its axes in the order batch, rows, columns."""
    left, right = letters.left_kept, letters.right_kept
    a, b = _sum_lone(a, letters.left, left), _sum_lone(b, letters.right, right)
    batch, rows, inner, columns = letters.batch, letters.rows, letters.inner, letters.columns
    if not inner:
        a, b = _grouped(a, left, batch, rows, ""), _grouped(b, right, batch, "", columns)
        return a * b
    if batch:
        return torch.bmm(_grouped(a, left, batch, rows, inner), _grouped(b, right, batch, inner, columns))
    return matmul(_grouped(a, left, rows, inner), _grouped(b, right, inner, columns))


def einsum(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Einsum of two operands, in whose terms no letter stands twice."""
    letters = Letters(instruction.attrs["equation"])
    product = contract(args[0], args[1], letters)
    extents = dict(zip(letters.out, instruction.kernel_shapes[0], strict=True))
    in_order = letters.batch + letters.rows + letters.columns
    product = product.reshape([extents[letter] for letter in in_order])
    result = product.permute([in_order.index(letter) for letter in letters.out])
    return [result.to(getattr(torch, instruction.dtypes[0]))]  # products of bfloat16 are summed in float32


def resample(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Sum weighted elements along one axis, by a compiled loop."""
    (x,), attrs = args, instruction.attrs
    if instruction.dtypes[0] not in DTYPES:
        return resample_by_gathers(args, instruction)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: -strides[axis])
    result = torch.empty_permuted(instruction.kernel_shapes[0], order, dtype=x.dtype)
    weigh(x.numpy(), int(attrs["axis"]) % x.dim(), attrs["columns"], attrs["weights"], result.numpy())
    return [result]


def resample_by_gathers(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Sum weighted elements along one axis, tap after tap, on any device and in any dtype."""
    (x,), attrs = args, instruction.attrs
    axis = int(attrs["axis"]) % x.dim()
    shape = [-1 if place == axis else 1 for place in range(x.dim())]
    terms: list[Tensor] = []
    for columns, weights in zip(attrs["columns"], attrs["weights"], strict=True):
        term = x.index_select(axis, torch.from_numpy(columns).to(x.device))
        term.mul_(x.new_tensor(weights).reshape(shape))
        terms.append(term if not terms else terms.pop().add_(term))
    return terms
