"""The table of PyTorch kernels: one record for each operator, on ONNX axes.

Operands come cropped, reshaped and padded, but for kernels that take them unpadded. Kernels of convolutions
and pooling are in ``conv.dispatch``, those of elementwise operators and reductions in ``torch_pointwise``.
Here are those that move elements or look them up, and CTC, by PyTorch's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from oocdl.engines.checked_indices import check_indices, rows_of
from oocdl.engines.convolution import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD, Convolution
from oocdl.engines.torch import torch_pointwise, torch_record
from oocdl.engines.torch.conv import conv_scratch
from oocdl.engines.torch.conv import dispatch as windows
from oocdl.engines.torch.conv.dispatch import pad
from oocdl.engines.torch.linear import einsum, resample, resample_by_gathers
from oocdl.engines.torch.sequences import torch_attention, torch_recurrent
from oocdl.engines.torch.torch_pooling import DEVICE_CHUNK_ELEMENTS
from oocdl.engines.torch.torch_record import Kernel, Result, Run
from oocdl.graph.ir.operands import concat_axis, concat_pieces, crop_of
from oocdl.graph.ir.program import Instruction, padded_shape
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

aten = torch.ops.aten


def _concat(args: list[Tensor], item: Instruction) -> list[Tensor]:
    axis, pieces = concat_axis(item), []
    for index in concat_pieces(item):
        pads = item.operands[index].pads or ((0, 0),) * args[index].dim()
        other = [(0, 0) if i == axis else pair for i, pair in enumerate(pads)]
        pieces.append(pad(args[index], other, item.fill))
    return [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)]


def _slice(args: list[Tensor], item: Instruction) -> list[Tensor]:
    # The operand holds just what is wanted, from the first element to the last.
    axis = int(item.attrs["axis"]) % args[0].dim()
    return [args[0][(slice(None),) * axis + (slice(None, None, int(item.attrs.get("step", 1))),)]]


def _batch(instruction: Instruction) -> int:
    return int(instruction.attrs.get("batch", 0))


def _wrap(ids: Tensor, instruction: Instruction) -> Tensor:
    """Flatten indices; negative ones count from the end, others out of range are an error."""
    flat, extent = ids.reshape(-1), rows_of(instruction)
    flat = torch.where(flat < 0, flat + extent, flat)
    # embedding_dense_backward does not check, and would write outside of its result.
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= extent):
        check_indices(instruction, ids.numpy(force=True))
    return flat


def _through(ids: Tensor, instruction: Instruction, tables: int) -> Tensor:
    """Flatten indices into ``tables`` tables, and count their rows from the first to the last table."""
    flat, extent = _wrap(ids, instruction), rows_of(instruction)
    if tables == 1:
        return flat
    first = torch.arange(tables, device=ids.device).mul_(extent).reshape(-1, 1)
    return flat.reshape(tables, flat.numel() // max(tables, 1)).add_(first).reshape(-1)


def _gather(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    (table, ids), batch = args, _batch(instruction)
    tables, extent = math.prod(table.shape[:batch]), table.shape[batch]
    rows = table.reshape(tables * extent, *table.shape[batch + 1 :])
    return [rows.index_select(0, _through(ids, instruction, tables)).reshape(instruction.kernel_shapes[0])]


def _gather_grad(args: list[Tensor], instruction: Instruction, ordered: bool = False) -> list[Tensor]:
    """Sums of rows of the gradient, by the kernel that is the fastest on a processor.

    ``ordered``: by the one that PyTorch promises to be deterministic on any device, if asked to be.
    """
    (ids, dy), batch, shape = args, _batch(instruction), instruction.kernel_shapes[0]
    tables, row = math.prod(shape[:batch]), shape[batch + 1 :]
    flat, count = _through(ids, instruction, tables), tables * shape[batch]
    if ordered:
        grad = dy.new_zeros((count, *row)).index_add_(0, flat, dy.reshape(-1, *row))
    else:
        rows = dy.reshape(ids.numel(), math.prod(row))
        grad = aten.embedding_dense_backward(rows, flat, count, -1, False)
    return [grad.reshape(shape)]


def _last_at(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """The largest place at which each row is named; a maximum, so that no order of writing matters."""
    ids, batch, shape = args[0], _batch(instruction), instruction.kernel_shapes[0]
    tables = math.prod(shape[:batch])
    flat = _wrap(ids, instruction).reshape(tables, math.prod(ids.shape[batch:]))
    places = torch.arange(flat.shape[1], device=ids.device).expand(flat.shape)
    found = torch.full((tables, shape[-1]), -1, dtype=torch.int64, device=ids.device)
    return [found.scatter_reduce_(1, flat, places, "amax").reshape(shape)]


def _top(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Places of the largest or smallest, by a stable sort: ``topk`` takes any of equal ones."""
    x, axis, k = args[0], int(instruction.attrs["axis"]), int(instruction.attrs["k"])
    places = torch.sort(x, dim=axis, descending=bool(instruction.attrs["largest"]), stable=True).indices
    return [places.narrow(axis, 0, k).clone()]


def _of_ctc(args: list[Tensor], item: Instruction) -> tuple[list[object], Tensor]:
    """Return the operands of PyTorch's function, and which samples have a label that is no class."""
    x, labels, counts, frames = args[:4]
    chances = torch.log_softmax(x, 2).transpose(0, 1)
    blank = int(item.attrs["blank"])
    inside = torch.arange(labels.shape[1], device=labels.device) < counts[:, None]
    wrong = inside & ((labels == blank) | (labels < 0) | (labels >= x.shape[2]))
    known = torch.where(inside & ~wrong, labels, 0)
    return [chances, known, frames.tolist(), counts.tolist(), blank], wrong.any(1)


def _ctc(args: list[Tensor], item: Instruction) -> list[Tensor]:
    given, wrong = _of_ctc(args, item)
    losses, _ = aten._ctc_loss(*given)
    if item.attrs["zero_infinity"]:
        losses.masked_fill_(losses.isinf(), 0)
    return [losses.masked_fill_(wrong, float("nan"))]


def _ctc_grad(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """CtcGrad. PyTorch's gradient is that by the logits already."""
    given, wrong = _of_ctc(args, item)
    skip = bool(item.attrs["zero_infinity"])
    losses, sums = aten._ctc_loss(*given, skip)
    grads = aten._ctc_loss_backward(args[4].contiguous(), *given[:4], losses, sums, given[4], skip)
    return [grads.transpose(0, 1).masked_fill(wrong[:, None, None], float("nan"))]


def _convolution(kind: Convolution, run: Run) -> Kernel:
    return Kernel(
        run, Result.OWN, on_device=partial(run, tuned=False), takes_unpadded=True, convolution=kind,
        planes=not kind.makes_weights,  # of weights one copy is enough
        scratch=partial(conv_scratch.convolution, kind),
        device_scratch=partial(conv_scratch.device_convolution, kind),
        lands=None if kind.makes_weights else partial(conv_scratch.lands, kind),
    )  # fmt: skip


def _pooling(run: Run, lands: Callable[[Instruction], bool] | None) -> Kernel:
    return Kernel(
        run, Result.OWN, on_device=partial(run, chunk=DEVICE_CHUNK_ELEMENTS), takes_unpadded=True,
        planes=True, scratch=torch_record.pooling, device_scratch=torch_record.device_pooling, lands=lands,
    )  # fmt: skip


def _pooling_lands(item: Instruction) -> bool:
    """Whether all of a pooling's gradient is wanted, and channels lie last."""
    made = item.kernel_shapes[0]
    whole = made == padded_shape(item.operands[0]) and not any(crop_of(item))
    return whole and len(made) in SPATIAL_RANKS and made[1] > 1


KERNELS: Mapping[str, Kernel] = {
    **torch_pointwise.KERNELS,
    "Identity": Kernel(lambda args, item: args, Result.VIEW),
    "Transpose": Kernel(lambda args, item: [args[0].permute(tuple(item.attrs["perm"]))], Result.VIEW),
    "Reshape": Kernel(lambda args, item: [args[0].reshape(item.kernel_shapes[0])], Result.EITHER),
    "Expand": Kernel(lambda args, item: [args[0].expand(item.kernel_shapes[0])], Result.VIEW),
    "Concat": Kernel(_concat, Result.EITHER, takes_unpadded=True),
    "Slice": Kernel(_slice, Result.VIEW),
    "Reverse": Kernel(lambda args, item: [args[0].flip(int(item.attrs["axis"]))], Result.OWN),
    "Pad": Kernel(lambda args, item: args, Result.VIEW),  # the operand comes padded
    **torch_recurrent.KERNELS,
    **{op: Kernel(run, Result.OWN) for op, run in torch_attention.KERNELS.items()},
    "Ctc": Kernel(_ctc, Result.OWN),
    "CtcGrad": Kernel(_ctc_grad, Result.OWN, on_host=True),
    "Gather": Kernel(_gather, Result.EITHER),
    "GatherGrad": Kernel(_gather_grad, Result.EITHER, on_device=partial(_gather_grad, ordered=True)),
    "Top": Kernel(_top, Result.OWN),
    "LastAt": Kernel(_last_at, Result.OWN),
    "Einsum": Kernel(einsum, Result.EITHER),
    "Resample": Kernel(resample, Result.OWN, on_device=resample_by_gathers, planes=True),
    "Conv": _convolution(CONV, windows.conv),
    "ConvTranspose": _convolution(CONV_TRANSPOSE, windows.conv_transpose),
    "ConvWeightGrad": _convolution(CONV_WEIGHT_GRAD, windows.conv_weight_grad),
    "MaxPool": _pooling(windows.pool, None),
    "MaxPoolGrad": _pooling(windows.pool_grad, _pooling_lands),
}
