"""The record of all that the torch engine knows of one operator. No field has a default.

The records stand in ``kernels.KERNELS``. An operator without one is refused before a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from oocdl.engines.convolution import Convolution
from oocdl.engines.torch.kernel_scratch import DeviceScratch, Scratch
from oocdl.fusion.blockwise import Blockwise
from oocdl.graph.ir.program import Instruction

Run = Callable[[list[Tensor], Instruction], list[Tensor]]
"""A kernel: operands and an instruction to results."""
RunInto = Callable[[list[Tensor], Instruction, Tensor | None], list[Tensor]]
"""A kernel that makes its result in the tensor it is given, if that is not None."""


class Result(Enum):
    """Where the results of an instruction that runs by itself lie."""

    VIEW = auto()
    """Results are views of operand 0, and take no memory of their own, unless that is padded."""
    EITHER = auto()
    """Results count as new memory, but may be views: nothing is written over them or their operands."""
    OWN = auto()
    """Results lie in new memory."""


@dataclass(frozen=True)
class Blocks(Blockwise[Tensor]):
    """How an operator runs as a member of chains."""

    temporaries: int
    """Blocks that the kernel takes while it runs, beside operands and results."""


@dataclass(frozen=True)
class Landing:
    """How a result is made in the memory of the program's output."""

    run: RunInto
    suits: Callable[[Instruction], bool]
    """Whether the kernel makes the result of this instruction there without a copy. Operand 0 and the result
    have their channels last."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The kernels of one operator, and the facts that the engine tells operators apart by."""

    run: Run
    on_device: Run
    """The kernel for tensors of any device, by PyTorch's general functions."""
    takes_unpadded: bool
    """Whether operands come without their padding, because the kernel can do without a padded copy."""
    convolution: Convolution | None
    """Given for convolutions and their gradients, None for other operators."""
    result: Result
    planes: bool
    """Whether results are made contiguous, where they are not to have their channels last."""
    scratch: Scratch
    """Bytes that an instruction outside of chains takes beside operands and results."""
    device_scratch: DeviceScratch
    """Bytes that an instruction takes on a device beside what its operator's rule says."""
    blocks: Blocks | None
    """None: the operator is a member of no chain."""
    landing: Landing | None
    """None: results are always made in new memory."""
