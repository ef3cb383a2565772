"""All that the onnxruntime engine knows of one operator, as one record: nothing of it has a default.

The records stand in ``lowerings.KERNELS``. An operator without one is refused before a run. What a kernel
takes while it runs is what the operator's rule says (``OpRule.scratch_elements``), which is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oocdl.engines.convolution import Convolution
from oocdl.engines.ort.emit import Lowering
from oocdl.fusion.blockwise import Blockwise
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction

RunChannelsLast = Callable[[Sequence[Array], Array, Instruction], None]
"""(operands ``[n, c, *space]``, where the result goes, instruction)."""


@dataclass(frozen=True)
class ChannelsLast:
    """A kernel by NumPy on volumes with their channels last, which onnxruntime has none for."""

    run: RunChannelsLast
    slots: Callable[[Instruction], Sequence[int]]
    """What must have its channels last."""
    suits: Callable[[Instruction], bool]
    """Whether it can run an instruction that pads nothing, and whose result has three axes of space."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One operator."""

    lowering: Lowering
    """It as standard ONNX operators, for a session."""
    blocks: Blockwise[Array] | None
    """It by NumPy, where that has vector loops for it; None: it is left to sessions."""
    channels_last: ChannelsLast | None
    """None: values with their channels last are sorted for it."""
    takes_unpadded: bool
    """Whether the lowering gets operands without their padding, because it can do without a padded copy."""
    convolution: Convolution | None
    """Given for convolutions and their gradients, which may run on blocks of channels (``nchwc.volumes``)."""
    one_thread: bool
    """Whether a session that has it runs on one thread: it adds in an order that depends on them."""
