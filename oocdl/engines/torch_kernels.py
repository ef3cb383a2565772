"""The table of PyTorch kernels: operands and an instruction to results, on ONNX axes.

Operands come cropped, reshaped and padded; only operators in ``PAD_THEMSELVES``
get theirs unpadded. Convolutions and pooling are in ``torch_windows``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oocdl.engines.operands import concat_axis, concat_pieces
from oocdl.engines.torch_linear import einsum, resample
from oocdl.engines.torch_windows import WINDOW_KERNELS, pad
from oocdl.graph.program import Instruction

Kernel = Callable[[list[Tensor], Instruction], list[Tensor]]

aten = torch.ops.aten


def _plain(function: Callable[..., Tensor]) -> Kernel:
    """A function of the operands alone."""
    return lambda args, instruction: [function(*args)]


def _divide(a: Tensor, b: Tensor) -> Tensor:
    # Integer division truncates in ONNX; torch.div would return floats.
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _softplus(x: Tensor) -> Tensor:
    # F.softplus is linear above a threshold, which costs digits in float64.
    return torch.logaddexp(x, x.new_zeros(()))


def _relu_grad(dy: Tensor, x: Tensor) -> Tensor:
    grad: Tensor = aten.threshold_backward(dy, x, 0)
    return grad


def _leaky_relu(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [F.leaky_relu(args[0], float(instruction.attrs["alpha"]))]


def _leaky_relu_grad(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    alpha = float(instruction.attrs["alpha"])
    return [aten.leaky_relu_backward(args[0], args[1], alpha, False)]


def _gelu(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [F.gelu(args[0], approximate=instruction.attrs.get("approximate", "none"))]


def _gelu_grad(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    approximate = instruction.attrs.get("approximate", "none")
    return [aten.gelu_backward(args[0], args[1], approximate=approximate)]


def _cast(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].to(getattr(torch, instruction.attrs["to"]))]


def _dropout(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    x, u = args
    ratio = float(instruction.attrs["ratio"])
    if ratio >= 1.0:
        return [torch.zeros_like(x)]
    # This kernel keeps x where u is above a threshold, ten times as fast as a mask:
    # u >= ratio is u > the number before it.
    at = torch.tensor(ratio, dtype=u.dtype)
    before = float(torch.nextafter(at, torch.full_like(at, -1)))
    kept: Tensor = aten.threshold_backward(x, u.to(x.dtype), before)
    return [kept.mul_(1.0 / (1.0 - ratio))]


def _normalize(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    x, mean, var = args
    return [(x - mean).mul_(torch.rsqrt(var + float(instruction.attrs["eps"])))]


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


def _wrap(ids: Tensor, extent: int) -> Tensor:
    """Flat indices; negative ones count from the end, others out of range are an error."""
    flat = ids.reshape(-1)
    flat = torch.where(flat < 0, flat + extent, flat)
    # embedding_dense_backward does not check, and would write outside of its result.
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= extent):
        raise IndexError(f"an index is outside of a table of {extent} rows")
    return flat


def _reduce_sum(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    axes = tuple(instruction.attrs["axes"])
    return [args[0].sum(dim=axes, keepdim=True) if axes else args[0]]


def _reduce_max(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].amax(dim=tuple(instruction.attrs["axes"]), keepdim=True)]


def _log_sum_exp(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    return [args[0].logsumexp(dim=tuple(instruction.attrs["axes"]), keepdim=True)]


def _moments(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    axes = tuple(instruction.attrs["axes"])
    # In two passes: torch.var_mean is not vectorised, and takes ten times as long.
    mean = args[0].mean(dim=axes, keepdim=True)
    centred = args[0] - mean
    return [mean, centred.square_().mean(dim=axes, keepdim=True)]


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


KERNELS: dict[str, Kernel] = {
    "Add": _plain(torch.add),
    "Sub": _plain(torch.sub),
    "Mul": _plain(torch.mul),
    "Div": _plain(_divide),
    "Pow": _plain(torch.pow),
    "Max": _plain(torch.maximum),
    "Min": _plain(torch.minimum),
    "Neg": _plain(torch.neg),
    "Sqrt": _plain(torch.sqrt),
    "Exp": _plain(torch.exp),
    "Log": _plain(torch.log),
    "Abs": _plain(torch.abs),
    "Erf": _plain(torch.special.erf),
    "Sigmoid": _plain(torch.sigmoid),
    "Tanh": _plain(torch.tanh),
    "Softplus": _plain(_softplus),
    "Reciprocal": _plain(torch.reciprocal),
    "Identity": _plain(lambda x: x),
    "Relu": _plain(torch.relu),
    "LeakyRelu": _leaky_relu,
    "Gelu": _gelu,
    "Cast": _cast,
    "Greater": _plain(torch.gt),
    "Less": _plain(torch.lt),
    "Equal": _plain(torch.eq),
    "Not": _plain(torch.logical_not),
    "And": _plain(torch.logical_and),
    "Or": _plain(torch.logical_or),
    "Where": _plain(_where),
    "ReluGrad": _plain(_relu_grad),
    "LeakyReluGrad": _leaky_relu_grad,
    "GeluGrad": _gelu_grad,
    "SigmoidGrad": _plain(lambda dy, y: aten.sigmoid_backward(dy, y)),
    "TanhGrad": _plain(lambda dy, y: aten.tanh_backward(dy, y)),
    "Dropout": _dropout,
    "Normalize": _normalize,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _plain(lambda x: x),  # the operand comes padded
    "Gather": _gather,
    "GatherGrad": _gather_grad,
    "ReduceSum": _reduce_sum,
    "ReduceMax": _reduce_max,
    "LogSumExp": _log_sum_exp,
    "Moments": _moments,
    "Einsum": einsum,
    "Resample": resample,
    **WINDOW_KERNELS,
}
"""Every operator of the vocabulary."""
