"""The record of all that the NumPy engine knows of one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

Run = Callable[[Sequence[Array], Instruction], Sequence[Array]]
"""A kernel: operands and an instruction to results."""
Scratch = Callable[[Instruction], int]
"""Upper bound of the elements of float64 that a kernel holds at once beside operands and results."""


@dataclass(frozen=True)
class Kernel:
    """The kernel of one operator, and its scratch."""

    run: Run
    scratch: Scratch
    takes_unpadded: bool
    """Whether operands come without their padding."""
