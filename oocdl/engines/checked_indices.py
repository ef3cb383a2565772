"""Checks numbers that programs compute, for all engines: indices of a table, and divisors."""

from __future__ import annotations

from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction
from oocdl.ops.pointwise import DIVISIONS


class IndexOutside(Exception):
    """An instruction was given an index that is no row of its table."""

    def __init__(self, slot: int, index: int, rows: int) -> None:
        """``slot``: the first that the instruction makes."""
        super().__init__(slot, index, rows)  # all that a copy in another process is made of
        self.slot, self.index, self.rows = slot, index, rows

    def __str__(self) -> str:
        return f"there is no row {self.index} in a table of {self.rows} rows"


class ZeroDivisor(Exception):
    """An instruction was to divide whole numbers by 0."""

    def __init__(self, slot: int) -> None:
        """``slot``: the first that the instruction makes."""
        super().__init__(slot)
        self.slot = slot

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
