"""All that the torch engine knows of one operator, as one record: nothing of it has a default.

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
"""A kernel that can be told where its result goes."""


class Result(Enum):
    """Where the results of an instruction that runs by itself lie."""

    VIEW = auto()
    """They are a way to see operand 0, and take no memory of their own, where that is not padded."""
    EITHER = auto()
    """They count as new memory, but may be a view: nothing is written over them or what they see."""
    OWN = auto()
    """They lie in memory of their own, and in no one else's."""


@dataclass(frozen=True)
class Blocks(Blockwise[Tensor]):
    """An operator as a member of chains."""

    temporaries: int
    """Blocks that it takes while it runs, beside operands and results."""


@dataclass(frozen=True)
class Landing:
    """How a result is made where the program's output belongs."""

    run: RunInto
    suits: Callable[[Instruction], bool]
    """Whether the kernel makes the result of this instruction there, and no copy of it first. Its operand 0
    and its result have their channels last."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One operator."""

    run: Run
    on_device: Run
    """The same for tensors of any device, by PyTorch's general kernels."""
    takes_unpadded: bool
    """Whether operands come without their padding, because the kernel can do without a padded copy."""
    convolution: Convolution | None
    """Given for convolutions and their gradients."""
    result: Result
    planes: bool
    """Whether results are made contiguous, where they are not to have their channels last."""
    scratch: Scratch
    """Bytes that an instruction that runs by itself takes beside operands and results."""
    device_scratch: DeviceScratch
    """Bytes that an instruction takes on a device beside what its operator's rule says."""
    blocks: Blocks | None
    """None: the operator is a member of no chain."""
    landing: Landing | None
    """None: results are always made in new memory."""
