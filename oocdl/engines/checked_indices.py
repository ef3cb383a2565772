"""Checks numbers that programs compute, for all engines: indices of a table, and divisors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction
from oocdl.ops.pointwise import DIVISIONS


@dataclass(eq=False)
class IndexOutside(Exception):
    """An instruction, whose first result is ``slot``, was given an index that is no row of its table."""

    slot: int
    index: int
    rows: int

    def __str__(self) -> str:
        return f"there is no row {self.index} in a table of {self.rows} rows"


@dataclass(eq=False)
class ZeroDivisor(Exception):
    """An instruction, whose first result is ``slot``, was to divide whole numbers by 0."""

    slot: int

    def __str__(self) -> str:
        return "whole numbers are divided by 0"


def divides_whole_numbers(item: Instruction) -> bool:
    """Whether an instruction has no result where its last operand is 0."""
    return item.op in DIVISIONS and item.dtypes[0] == "int64"


def check_divisor(item: Instruction, divisor: Any) -> None:
    """Raise ZeroDivisor if a divisor of whole numbers, an array or a tensor, is 0 somewhere."""
    if divides_whole_numbers(item) and bool((divisor == 0).any()):
        raise ZeroDivisor(item.outputs[0])


def rows_of(item: Instruction) -> int:
    """Return how many rows the indices of an instruction may name, of the table it makes or reads first."""
    made = item.attrs.get("rows")
    return int(item.operands[0].shape[int(item.attrs.get("batch", 0))] if made is None else made)


def check_indices(item: Instruction, indices: Array) -> None:
    """Raise IndexOutside for the first index that is no row, also when counted from the end."""
    rows = rows_of(item)
    if indices.size and (int(indices.min()) < -rows or int(indices.max()) >= rows):
        wrong = indices[(indices < -rows) | (indices >= rows)]
        raise IndexOutside(item.outputs[0], int(np.ravel(wrong)[0]), rows)
