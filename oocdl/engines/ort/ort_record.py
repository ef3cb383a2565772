"""The record of all that the onnxruntime engine knows of one operator. No field has a default.

The records stand in ``lowerings.KERNELS``. An operator without one is refused before a run. What a kernel
takes while it runs is what the operator's rule says (``OpRule.scratch_elements``), which is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oocdl.engines.convolution import Convolution
from oocdl.engines.ort.emit import Lowering
from oocdl.fusion import blockwise
from oocdl.fusion.blockwise import Blockwise
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

RunChannelsLast = Callable[[Sequence[Array], Array, Instruction], None]
"""(operands ``[n, c, *space]``, where the result goes, instruction)."""

Into = blockwise.Into[Array]
Bind = blockwise.Bind[Array]


@dataclass(frozen=True)
class ChannelsLast:
    """A NumPy kernel on volumes with their channels last, for which onnxruntime has none."""

    run: RunChannelsLast
    slots: Callable[[Instruction], Sequence[int]]
    """Slots that must have their channels last."""
    suits: Callable[[Instruction], bool]
    """Whether the kernel can run an instruction that pads nothing, and whose result has rank 5."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernels of one operator, and the facts that the engine tells operators apart by."""

    lowering: Lowering | None
    """Writes the operator as standard ONNX operators, for a session; None: ``whole`` is given."""
    whole: Bind | None
    """The operator by NumPy on whole arrays, where no session computes it, or not as fast."""
    blocks: Blockwise[Array] | None
    """The operator by NumPy, where that has vector loops; None: it is left to sessions."""
    channels_last: ChannelsLast | None
    """None: operands with their channels last are transposed for the session."""
    takes_unpadded: bool
    """Whether the lowering gets operands without their padding, because it can do without a padded copy."""
    convolution: Convolution | None
    """Given for convolutions and their gradients, which may run on blocks of channels (``nchwc.volumes``)."""
    indices: int | None
    """Which operand holds indices that may be outside of their table; None: none does."""
    one_thread: bool
    """Whether sessions with this operator run on one thread: its order of additions depends on threads."""
