"""Instructions that run on values with their channels last as they are, but not on blocks of channels."""

from __future__ import annotations

from collections.abc import Collection

from oocdl.engines.ort.lowerings import KERNELS
from oocdl.engines.ort.ort_record import Into
from oocdl.graph.ir.operands import pads_of
from oocdl.graph.ir.program import Instruction


def suits_channels_last(item: Instruction, channels_last: Collection[int]) -> bool:
    """Whether an instruction has a kernel for channels last; slots in ``channels_last`` lie so."""
    kernel = KERNELS[item.op].channels_last
    if kernel is None or len(item.kernel_shapes[0]) != 5 or any(map(pads_of, item.operands)):
        return False
    return all(slot in channels_last for slot in kernel.slots(item)) and kernel.suits(item)


def channels_last_kernel(item: Instruction) -> Into:
    """Return the kernel that an instruction's record has for channels last."""
    kernel = KERNELS[item.op].channels_last
    assert kernel is not None, "there is no kernel for channels last"
    run = kernel.run
    return lambda args, outs: run(args, outs[0], item)
