"""The record of all that the torch engine knows of one operator.

The records stand in ``torch_kernels.KERNELS``. An operator without one is refused before a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from oocdl.engines.convolution import Convolution
from oocdl.engines.torch.kernel_scratch import DeviceScratch, Scratch, by_rule
from oocdl.graph.ir.program import Instruction

Run = Callable[..., list[Tensor]]
"""A kernel: operands and an instruction to results; the tensor to make its result in, where it ``lands``, or
one for each result, or None, where results are ``placed``."""


class Result(Enum):
    """Memory of the results of an instruction outside of chains."""

    VIEW = auto()
    """Results are views of operand 0, and take no memory of their own, unless that is padded."""
    EITHER = auto()
    """Results count as new memory, but may be views: nothing is written over them or their operands."""
    OWN = auto()
    """Results lie in new memory."""


@dataclass(frozen=True)
class Kernel:
    """The kernels of one operator, and the facts that the engine tells operators apart by.

    Defaults are those of an operator without windows that runs by itself.
    """

    run: Run
    result: Result
    on_device: Run | None = None
    """The kernel for tensors of any device, by PyTorch's general functions; None: ``run`` is one."""
    on_host: bool = False
    """Whether devices have no kernel that gives equal bits in all runs: then the processor does the work."""
    takes_unpadded: bool = False
    """Whether operands come without their padding, because the kernel can do without a padded copy."""
    convolution: Convolution | None = None
    """Given for convolutions and their gradients, None for other operators."""
    planes: bool = False
    """Whether results are made contiguous, where they are not to have their channels last."""
    scratch: Scratch = by_rule
    """Bytes that an instruction outside of chains takes beside operands and results."""
    device_scratch: DeviceScratch | None = None
    """Bytes that an instruction takes on a device beside what its operator's rule says; None: nothing."""
    lands: Callable[[Instruction], bool] | None = None
    """Whether ``run`` makes the result in the memory of the program's output without a copy, if operand 0 and
    the result have their channels last; None: it never does."""
    placed: int = 0
    """Number of first results that ``run`` makes where the program's outputs lie, in whatever order."""
