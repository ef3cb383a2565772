"""The record of all that the onnxruntime engine knows of one operator.

The records stand in ``ort_kernels.KERNELS``. An operator without one is refused before a run. What a kernel
takes while it runs is what the operator's rule says (``OpRule.scratch_elements``), which is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oocdl.engines import numpy_moves
from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

Into = Callable[[list[Array], list[Array]], None]
"""A kernel of operands, and of the arrays that its results go to."""
Orders = Mapping[int, Order]
"""Slot -> the order of its axes in memory, of those that are not in C order."""


@dataclass(frozen=True)
class Kernel:
    """The kernels of one operator, and the facts that the engine tells operators apart by."""

    bind: Callable[[Instruction, Orders], Into]
    """Returns the kernel of an instruction on whole arrays."""
    takes_unpadded: bool = False
    """Whether kernels get operands without their padding, because they can do without a padded copy."""


Single = Callable[[list[Array], Instruction, Array], None]
"""A kernel of operands, an instruction, and the array of its one result."""


def kernel_of(run: Single, takes_unpadded: bool = False) -> Kernel:
    """Return the record of a kernel of one result."""
    return Kernel(lambda item, orders: lambda args, outs: run(args, item, outs[0]), takes_unpadded)


def copied(run: numpy_moves.Run) -> Kernel:
    """Return the record of a function of operands and an instruction that returns results."""

    def bind(item: Instruction, orders: Orders) -> Into:
        def kernel(args: list[Array], outs: list[Array]) -> None:
            for out, result in zip(outs, run(args, item), strict=True):
                numpy_moves.copy(result, out)

        return kernel

    return Kernel(bind=bind)
