"""The table of PyTorch kernels: operands and an instruction to results, on ONNX axes.

Operands come cropped, reshaped and padded; only operators in ``PAD_THEMSELVES``
get theirs unpadded. Convolutions and pooling are in ``torch_windows``, elementwise operators
and reductions in ``torch_into``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oocdl.engines.operands import concat_axis, concat_pieces
from oocdl.engines.torch_into import POINTWISE, REDUCTIONS, bound
from oocdl.engines.torch_linear import einsum, resample
from oocdl.engines.torch_windows import UNTUNED, WINDOW_KERNELS, pad
from oocdl.graph.program import Instruction

Kernel = Callable[[list[Tensor], Instruction], list[Tensor]]

aten = torch.ops.aten


def _into(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """An operator of ``torch_into``, in new memory."""
    made = [
        args[0].new_empty(shape, dtype=getattr(torch, dtype))
        for shape, dtype in zip(instruction.kernel_shapes, instruction.dtypes, strict=True)
    ]
    bound(instruction)(args, made)
    return made


def _same(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0]]


def _transpose(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].permute(tuple(instruction.attrs["perm"]))]


def _reshape(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].reshape(instruction.kernel_shapes[0])]


def _expand(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].expand(instruction.kernel_shapes[0])]


def _concat(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    axis = concat_axis(instruction)
    pieces = []
    for index in concat_pieces(instruction):
        pads = instruction.operands[index].pads
        if pads is not None:
            other = tuple((0, 0) if i == axis else pair for i, pair in enumerate(pads))
            pieces.append(pad(args[index], other, instruction.fill))
        else:
            pieces.append(args[index])
    return [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)]


def _slice(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    # The operand holds just what is wanted, from the first element to the last.
    step = int(instruction.attrs.get("step", 1))
    axis = int(instruction.attrs["axis"]) % args[0].dim()
    index = [slice(None)] * args[0].dim()
    index[axis] = slice(None, None, step)
    return [args[0][tuple(index)]]


def _gather(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    table, ids = args
    flat = _wrap(ids, table.shape[0])
    return [table.index_select(0, flat).reshape(instruction.kernel_shapes[0])]


def _gather_grad(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    ids, dy = args
    shape = instruction.kernel_shapes[0]
    rows = dy.reshape(ids.numel(), math.prod(shape[1:]))
    grad: Tensor = aten.embedding_dense_backward(rows, _wrap(ids, shape[0]), shape[0], -1, False)
    return [grad.reshape(shape)]


def _gather_grad_in_order(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """By the kernel that PyTorch promises to be deterministic on any device, where it is asked to be."""
    ids, dy = args
    shape = instruction.kernel_shapes[0]
    rows = dy.reshape(ids.numel(), *shape[1:])
    return [dy.new_zeros(shape).index_add_(0, _wrap(ids, shape[0]), rows)]


def _wrap(ids: Tensor, extent: int) -> Tensor:
    """Flat indices; negative ones count from the end, others out of range are an error."""
    flat = ids.reshape(-1)
    flat = torch.where(flat < 0, flat + extent, flat)
    # embedding_dense_backward does not check, and would write outside of its result.
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= extent):
        raise IndexError(f"an index is outside of a table of {extent} rows")
    return flat


KERNELS: dict[str, Kernel] = {
    **dict.fromkeys((*POINTWISE, *REDUCTIONS), _into),
    "Identity": _same,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _same,  # the operand comes padded
    "Gather": _gather,
    "GatherGrad": _gather_grad,
    "Einsum": einsum,
    "Resample": resample,
    **WINDOW_KERNELS,
}
DEVICE_KERNELS: dict[str, Kernel] = {**KERNELS, **UNTUNED, "GatherGrad": _gather_grad_in_order}
"""The same for tensors of any device."""
