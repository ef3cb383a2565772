"""Rows of tables by their numbers as ONNX operators: Gather, its gradient, LastAt, Top.

Indices stay apart from the numbers of their tables: counted through all tables, one that is out of range
would be another table's.
"""

from __future__ import annotations

from math import prod

import numpy as np

from oocdl.engines.ort.emit import Emitter, Val
from oocdl.graph.ir.program import Instruction


def _batch(instruction: Instruction) -> int:
    return int(instruction.attrs.get("batch", 0))


def _places(emit: Emitter, ids: Val, tables: int) -> Val:
    """The index of each place as a row of a matrix: its table where there are several, and its row there."""
    count = prod(ids.shape)
    rows = emit.reshape(ids, (count, 1))
    if tables == 1:
        return rows
    numbers = emit.constant(np.arange(tables).reshape(tables, 1))
    spread = emit.node("Expand", [numbers, emit.ints((tables, count // tables))], (tables, count // tables))
    return emit.node("Concat", [emit.reshape(spread, (count, 1)), rows], (count, 2), axis=1)


def gather(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Rows of each table."""
    (table, ids), batch, shape = args, _batch(instruction), instruction.kernel_shapes[0]
    if not batch:
        return [emit.node("Gather", args, shape, axis=0)]
    if len(table.shape) == batch + 1:
        tables = prod(table.shape[:batch])
        flat = emit.reshape(table, (tables, table.shape[-1]))
        where = emit.reshape(ids, (tables, prod(ids.shape[batch:])))
        return [emit.reshape(emit.node("GatherElements", [flat, where], where.shape, axis=1), shape)]
    places = emit.reshape(ids, (*ids.shape, 1))
    return [emit.node("GatherND", [table, places], shape, batch_dims=batch)]


def gather_grad(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Sums of rows of the gradient."""
    (ids, dy), batch, shape = args, _batch(instruction), instruction.kernel_shapes[0]
    tables, row = prod(shape[:batch]), prod(shape[batch + 1 :])
    zeros = emit.full((*((tables,) if tables > 1 else ()), shape[batch], row), 0.0, dy.dtype)
    rows = emit.reshape(dy, (prod(ids.shape), row))
    table = emit.node("ScatterND", [zeros, _places(emit, ids, tables), rows], zeros.shape, reduction="add")
    return [emit.reshape(table, shape)]


def last_at(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """The largest place at which each row is named."""
    ids, batch, shape = args[0], _batch(instruction), instruction.kernel_shapes[0]
    tables = prod(shape[:batch])
    count = prod(ids.shape) // tables
    none = emit.full((tables, shape[-1]), -1, "int64")
    places = emit.constant(np.arange(count).reshape(1, count))
    spread = emit.node("Expand", [places, emit.ints((tables, count))], (tables, count))
    where = emit.reshape(ids, (tables, count))
    found = emit.node("ScatterElements", [none, where, spread], none.shape, axis=1, reduction="max")
    return [emit.reshape(found, shape)]


def top(emit: Emitter, args: list[Val], instruction: Instruction) -> list[Val]:
    """Places of the largest or smallest; ONNX takes the lower index of equal ones, too."""
    shape, attrs = instruction.kernel_shapes[0], instruction.attrs
    k, specs = emit.ints([int(attrs["k"])]), [(shape, args[0].dtype), (shape, "int64")]
    axis, largest = int(attrs["axis"]), int(attrs["largest"])
    return [emit.many("TopK", [args[0], k], specs, axis=axis, largest=largest)[1]]
