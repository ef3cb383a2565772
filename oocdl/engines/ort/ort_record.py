"""The record of all that the onnxruntime engine knows of one operator. No field has a default.

The records stand in ``lowerings.KERNELS``. An operator without one is refused before a run. What a kernel
takes while it runs is what the operator's rule says (``OpRule.scratch_elements``), which is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oocdl.engines.convolution import Convolution
from oocdl.engines.ort.emit import Lowering
from oocdl.fusion import grouping
from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

Into = grouping.Into[Array]
Bind = grouping.Bind[Array]
Orders = Mapping[int, Order]
"""Slot -> the order of its axes in memory, of those that are not in C order."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernels of one operator, and the facts that the engine tells operators apart by."""

    lowering: Lowering | None
    """Writes the operator as standard ONNX operators, for a session; None: ``on_arrays`` never is."""
    on_arrays: Callable[[Instruction, Orders], Into | None]
    """Returns the kernel on whole arrays of an instruction; None where it is left to a session."""
    blocks: grouping.Blockwise[Array] | None
    """The operator as a member of chains, where NumPy has vector loops for it."""
    takes_unpadded: bool
    """Whether kernels get operands without their padding, because they can do without a padded copy."""
    convolution: Convolution | None
    """Given for convolutions and their gradients."""
    indices: int | None
    """Number of the operand of indices that the lowering does not check; None: there is none."""


def left_to_sessions(lowering: Lowering) -> Kernel:
    """Return the record of an operator that NumPy has no fast loop for."""
    return Kernel(
        lowering=lowering,
        on_arrays=lambda item, orders: None,
        blocks=None,
        takes_unpadded=False,
        convolution=None,
        indices=None,
    )


def by_numpy(bind: Callable[[Instruction], Into]) -> Kernel:
    """Return the record of an operator that no session computes, or not as fast as NumPy does."""
    return Kernel(
        lowering=None,
        on_arrays=lambda item, orders: bind(item),
        blocks=None,
        takes_unpadded=False,
        convolution=None,
        indices=None,
    )
