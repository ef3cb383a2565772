"""All that the NumPy engine knows of one operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

Run = Callable[[Sequence[Array], Instruction], Sequence[Array]]
"""A kernel: operands and an instruction to results."""
Scratch = Callable[[Instruction], int]
"""Numbers of float64 that a kernel makes at once beside operands and results, at most."""


@dataclass(frozen=True)
class Kernel:
    """One operator."""

    run: Run
    scratch: Scratch
    takes_unpadded: bool
    """Whether operands come without their padding."""
