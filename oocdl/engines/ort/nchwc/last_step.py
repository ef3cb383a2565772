"""Instructions that run on values with their channels last as they are, but not on blocks of channels."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from oocdl.engines.ort.lowerings import KERNELS
from oocdl.engines.ort.ort_chain import crop
from oocdl.engines.ort.steps import Kinds, Places, Slots
from oocdl.graph.ir.operands import pads_of
from oocdl.graph.ir.program import Instruction


def suits_channels_last(item: Instruction, channels_last: Collection[int]) -> bool:
    """Whether an instruction has a kernel for channels last; slots in ``channels_last`` lie so."""
    kernel = KERNELS[item.op].channels_last
    if kernel is None or len(item.kernel_shapes[0]) != 5 or any(map(pads_of, item.operands)):
        return False
    return all(slot in channels_last for slot in kernel.slots(item)) and kernel.suits(item)


class ChannelsLastStep:
    """A step of one instruction, by the kernel that its record has for channels last."""

    def __init__(self, item: Instruction, kinds: Kinds) -> None:
        kernel = KERNELS[item.op].channels_last
        assert kernel is not None, "there is no kernel for channels last"
        self._item, self._kinds, self._kernel = item, kinds, kernel
        self.outputs = item.outputs

    def run(self, slots: Slots, places: Places) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        item = self._item
        (slot,) = item.outputs
        slots[slot] = places[slot] if slot in places else self._kinds.empty(slot)
        out = slots[slot].reshape(item.kernel_shapes[0])
        if not np.shares_memory(out, slots[slot]):  # axes were split or joined, and lie apart
            out = np.empty(out.shape, out.dtype)
        args = [crop(slots[o.slot], o.crop).reshape(o.shape) for o in item.operands]
        self._kernel.run(args, out, item)
        if not np.shares_memory(out, slots[slot]):
            slots[slot][...] = out.reshape(slots[slot].shape)
