"""Rows of tables by their numbers as ONNX operators: Gather, its gradient, LastAt.

Indices stay apart from the numbers of their tables: counted through all tables, one that is out of range
would be another table's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from oocdl.engines.checked_indices import check_indices
from oocdl.engines.ort.emit import Emitter, Val
from oocdl.engines.ort.ort_record import Into, Orders
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction


def _batch(instruction: Instruction) -> int:
    return int(instruction.attrs.get("batch", 0))


def take(item: Instruction, orders: Orders) -> Into | None:
    """Gather of one table, by NumPy: of short rows a session takes four times as long. None for several."""
    if _batch(item):
        return None

    def kernel(args: Sequence[Array], outs: Sequence[Array]) -> None:
        check_indices(item, args[1])
        np.take(args[0], args[1], 0, outs[0], mode="wrap")

    return kernel


def gather(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Rows of each of several tables."""
    (table, ids), batch, shape = args, _batch(instruction), instruction.kernel_shapes[0]
    if len(table.shape) > batch + 1:
        places = emit.reshape(ids, (*ids.shape, 1))
        return [emit.node("GatherND", [table, places], shape, batch_dims=batch)]
    tables = prod(table.shape[:batch])
    flat = emit.reshape(table, (tables, table.shape[-1]))
    where = emit.reshape(ids, (tables, prod(ids.shape[batch:])))
    return [emit.reshape(emit.node("GatherElements", [flat, where], where.shape, axis=1), shape)]


def _spread(emit: Emitter, numbers: Array, shape: tuple[int, int]) -> Val:
    """Numbers, expanded to a matrix."""
    return emit.node("Expand", [emit.constant(numbers), emit.ints(shape)], shape)


def gather_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Sums of rows of the gradient, in their order; NumPy takes up to 50 times as long as ScatterND."""
    (ids, dy), batch, shape = args, _batch(instruction), instruction.kernel_shapes[0]
    tables, row, count = prod(shape[:batch]), prod(shape[batch + 1 :]), prod(ids.shape)
    places = emit.reshape(ids, (count, 1))
    before: Shape = ()
    if tables != 1:
        numbers = _spread(emit, np.arange(tables).reshape(tables, 1), (tables, prod(ids.shape[batch:])))
        pair = [emit.reshape(numbers, (count, 1)), places]
        places, before = emit.node("Concat", pair, (count, 2), axis=1), (tables,)
    zeros = emit.full((*before, shape[batch], row), 0.0, dy.dtype)
    rows = emit.reshape(dy, (count, row))
    table = emit.node("ScatterND", [zeros, places, rows], zeros.shape, reduction="add")
    return [emit.reshape(table, shape)]


def last_at(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The largest place at which each row is named."""
    ids, batch, shape = args[0], _batch(instruction), instruction.kernel_shapes[0]
    tables, count = prod(shape[:batch]), prod(ids.shape[batch:])
    none = emit.full((tables, shape[-1]), -1, "int64")
    spread = _spread(emit, np.arange(count).reshape(1, count), (tables, count))
    where = emit.reshape(ids, (tables, count))
    found = emit.node("ScatterElements", [none, where, spread], none.shape, axis=1, reduction="max")
    return [emit.reshape(found, shape)]
