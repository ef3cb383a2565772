"""CTC by PyTorch's own kernels, on the softmax that they want."""

from __future__ import annotations

import torch
from torch import Tensor

from oocdl.graph.ir.program import Instruction

aten = torch.ops.aten


def _given(args: list[Tensor], item: Instruction) -> tuple[list[object], Tensor]:
    """Return the operands of PyTorch's function, and which samples have a label that is no class."""
    x, labels, counts, frames = args[:4]
    chances = torch.log_softmax(x, 2).transpose(0, 1)
    blank = int(item.attrs["blank"])
    inside = torch.arange(labels.shape[1], device=labels.device) < counts[:, None]
    wrong = inside & ((labels == blank) | (labels < 0) | (labels >= x.shape[2]))
    known = torch.where(inside & ~wrong, labels, 0)
    return [chances, known, frames.tolist(), counts.tolist(), blank], wrong.any(1)


def ctc(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """Ctc."""
    given, wrong = _given(args, item)
    losses, _ = aten._ctc_loss(*given)
    if item.attrs["zero_infinity"]:
        losses.masked_fill_(losses.isinf(), 0)
    return [losses.masked_fill_(wrong, float("nan"))]


def ctc_grad(args: list[Tensor], item: Instruction) -> list[Tensor]:
    """CtcGrad. PyTorch's gradient is that by the logits already."""
    given, wrong = _given(args, item)
    skip = bool(item.attrs["zero_infinity"])
    losses, sums = aten._ctc_loss(*given, skip)
    grads = aten._ctc_loss_backward(args[4].contiguous(), *given[:4], losses, sums, given[4], skip)
    return [grads.transpose(0, 1).masked_fill(wrong[:, None, None], float("nan"))]
