"""Rows of tables by their numbers, by NumPy: Gather, its gradient, and LastAt.

For engines that have no kernels of their own for it. Indices are checked before they are counted through all
tables: after that, one that is out of range would be another table's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from oocdl.engines.checked_indices import check_indices, rows_of
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

RunInto = Callable[[Sequence[Array], Instruction, Array], None]
"""(operands, instruction, where the result goes)"""


def _places(ids: Array, item: Instruction) -> Array:
    """The place of each row, counted through all tables [table, row]."""
    check_indices(item, ids)
    tables, rows = prod(ids.shape[: int(item.attrs.get("batch", 0))]), rows_of(item)
    found: Array = np.where(ids < 0, ids + rows, ids).reshape(tables, -1)
    found += rows * np.arange(tables)[:, None]
    return found


def _flat(table: Array, item: Instruction) -> Array:
    """All tables, one below the other."""
    row = table.shape[int(item.attrs.get("batch", 0)) + 1 :]
    return table.reshape(prod(table.shape) // max(prod(row), 1), *((prod(row),) if prod(row) != 1 else ()))


def gather(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """Rows of each table."""
    table, places = _flat(args[0], item), _places(args[1], item).ravel()
    np.take(table, places, 0, np.reshape(out, (len(places), *table.shape[1:]), copy=False), mode="clip")


def gather_grad(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """Sums of rows of the gradient, added up in their order."""
    out[...] = 0
    table, places = _flat(out, item), _places(args[0], item).ravel()
    np.add.at(table, places, args[1].reshape(len(places), *table.shape[1:]))


def last_at(args: Sequence[Array], item: Instruction, out: Array) -> None:
    """The last place at which each row is named; -1 for a row that is not."""
    out[...] = -1
    places = _places(args[0], item)
    out.reshape(-1)[places] = np.broadcast_to(np.arange(places.shape[1]), places.shape)


KERNELS: Mapping[str, RunInto] = {"Gather": gather, "GatherGrad": gather_grad, "LastAt": last_at}
