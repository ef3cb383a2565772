"""Rows of tables by their numbers in PyTorch: Gather, its gradient, LastAt, Top."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oocdl.engines.checked_indices import check_indices, rows_of
from oocdl.graph.ir.program import Instruction

aten = torch.ops.aten


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


def gather(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Rows of each table."""
    (table, ids), batch = args, _batch(instruction)
    tables, extent = math.prod(table.shape[:batch]), table.shape[batch]
    rows = table.reshape(tables * extent, *table.shape[batch + 1 :])
    return [rows.index_select(0, _through(ids, instruction, tables)).reshape(instruction.kernel_shapes[0])]


def gather_grad(args: list[Tensor], instruction: Instruction, ordered: bool = False) -> list[Tensor]:
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


def last_at(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """The largest place at which each row is named; a maximum, so that no order of writing matters."""
    ids, batch, shape = args[0], _batch(instruction), instruction.kernel_shapes[0]
    tables = math.prod(shape[:batch])
    flat = _wrap(ids, instruction).reshape(tables, math.prod(ids.shape[batch:]))
    places = torch.arange(flat.shape[1], device=ids.device).expand(flat.shape)
    found = torch.full((tables, shape[-1]), -1, dtype=torch.int64, device=ids.device)
    return [found.scatter_reduce_(1, flat, places, "amax").reshape(shape)]


def top(args: list[Tensor], instruction: Instruction) -> list[Tensor]:
    """Places of the largest or smallest, by a stable sort: ``topk`` takes any of equal ones."""
    x, axis, k = args[0], int(instruction.attrs["axis"]), int(instruction.attrs["k"])
    places = torch.sort(x, dim=axis, descending=bool(instruction.attrs["largest"]), stable=True).indices
    return [places.narrow(axis, 0, k).clone()]
