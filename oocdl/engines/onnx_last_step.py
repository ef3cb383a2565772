"""Instructions that run on values with their channels last as they lie, but on no blocks of channels."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from oocdl.engines import onnx_tiles
from oocdl.engines.numpy_chain import crop
from oocdl.engines.numpy_last import KERNELS, is_tiled
from oocdl.engines.onnx_steps import Kinds, Places, Slots
from oocdl.engines.operands import pads_of
from oocdl.graph.ir import Array
from oocdl.graph.program import Instruction

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "ConvWeightGrad"})


def suits_last(item: Instruction, ordered: Collection[int]) -> bool:
    """Whether there is a kernel for it; ``ordered``: slots with channels last."""
    if item.op not in KERNELS and item.op not in _CONVOLUTIONS:
        return False
    slots = [operand.slot for operand in item.operands] + list(item.outputs)
    if item.op == "ConvWeightGrad":
        slots = slots[:2]
    elif item.op in _CONVOLUTIONS:
        slots = [slots[0], slots[2]]
    if len(item.kernel_shapes[0]) != 5 or any(pads_of(operand) for operand in item.operands):
        return False
    if not all(slot in ordered for slot in slots):
        return False
    if item.op in ("Concat", "Slice"):
        return all(len(operand.shape) == 5 for operand in item.operands)
    if item.dtypes[0] != "float32":
        return False
    return is_tiled(item)


class LastStep:
    """One such instruction."""

    def __init__(self, item: Instruction, kinds: Kinds) -> None:
        self._item, self._kinds = item, kinds
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
        if item.op in KERNELS:
            turned = [np.moveaxis(array, 1, -1) for array in (*args, out)]
            KERNELS[item.op](turned[:-1], turned[-1], item)
        else:
            self._convolve(args, out)
        if not np.shares_memory(out, slots[slot]):
            slots[slot][...] = out.reshape(slots[slot].shape)

    def _convolve(self, args: list[Array], out: Array) -> None:
        x = np.ascontiguousarray(np.moveaxis(args[0], 1, -1))
        if self._item.op == "ConvWeightGrad":
            dy = np.ascontiguousarray(np.moveaxis(args[1], 1, -1))
            out[...] = onnx_tiles.weight_gradient(x, dy, out.shape)
            return
        made = np.moveaxis(out, 1, -1)
        target = made if made.flags.c_contiguous else np.empty(made.shape, made.dtype)
        kernel = onnx_tiles.convolve if self._item.op == "Conv" else onnx_tiles.spread
        kernel(x, args[1], target)
        if target is not made:
            made[...] = target
