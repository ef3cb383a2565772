"""Steps of a program of the onnxruntime engine: sessions, and single kernels on arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from oocdl.engines.checked_indices import check_indices
from oocdl.engines.ort.emit import Emitter, Val
from oocdl.engines.ort.lowerings import KERNELS
from oocdl.engines.ort.ort_record import Into, Orders
from oocdl.engines.ort.ort_session import FAILURES, Session, model_of
from oocdl.fusion.executor import crop
from oocdl.graph.ir.array_layout import as_stored, ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import is_empty, pads_of, slot_dtypes, slot_shapes
from oocdl.graph.ir.program import Instruction, Operand, Program, padded_shape

Slots = dict[int, Array]
Places = Mapping[int, Array]
"""Slot -> memory of the program's output that it is."""


@dataclass(frozen=True)
class Kinds:
    """Shape, dtype and order of every slot of a program."""

    shapes: Mapping[int, Shape]
    dtypes: Mapping[int, str]
    orders: Orders

    @classmethod
    def of(cls, program: Program) -> Kinds:
        """The shapes, dtypes and orders of ``program``."""
        return cls(slot_shapes(program), slot_dtypes(program), dict(program.orders))

    def result(self, slot: int, places: Places) -> Array:
        """Return the array that a slot is made in: its place, or a new one."""
        if slot in places:
            return places[slot]
        return ordered(np.empty, self.shapes[slot], self.dtypes[slot], self.orders.get(slot, ()))

    def stored(self, slot: int, name: str) -> Val:
        """A slot as it lies in memory, by a name in a model."""
        shape = self.shapes[slot]
        stored = tuple(shape[axis] for axis in self.orders.get(slot, ())) or shape
        return Val(name, stored, self.dtypes[slot])


def _operand(array: Array, item: Instruction, operand: Operand) -> Array:
    """Return an operand as its kernel takes it: cropped, reshaped and padded."""
    array, pads = crop(array, operand.crop).reshape(operand.shape), pads_of(operand)
    if pads is None or KERNELS[item.op].takes_unpadded:
        return array
    fill = array.dtype.type(item.fill)
    if is_empty(operand):
        return np.full(padded_shape(operand), fill)
    return np.pad(array, pads, constant_values=fill)


class ArrayStep:
    """A step of one instruction by a kernel on whole arrays."""

    def __init__(self, item: Instruction, kinds: Kinds, kernel: Into) -> None:
        self._item, self._kinds, self._kernel = item, kinds, kernel
        self.full: Collection[int] = item.outputs
        """Slots that are made where they belong."""

    def run(self, slots: Slots, places: Places) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        item = self._item
        args = [_operand(slots[operand.slot], item, operand) for operand in item.operands]
        outs = []
        for slot, shape in zip(item.outputs, item.kernel_shapes, strict=True):
            slots[slot] = self._kinds.result(slot, places)
            outs.append(slots[slot].reshape(shape))
            if not np.shares_memory(outs[-1], slots[slot]):  # axes were split or joined, and lie apart
                last = (0, *range(2, len(shape)), 1) if slot in self._kinds.orders else ()
                outs[-1] = ordered(np.empty, shape, slots[slot].dtype, last)
        self._kernel(args, outs)
        for slot, out in zip(item.outputs, outs, strict=True):
            if not np.shares_memory(out, slots[slot]):
                slots[slot][...] = out.reshape(slots[slot].shape)


def _emitted_operand(emit: Emitter, value: Val, item: Instruction, operand: Operand) -> Val:
    """The slot as the kernel sees it."""
    pads = None if KERNELS[item.op].takes_unpadded else pads_of(operand)
    if pads is not None and is_empty(operand):
        return emit.full(padded_shape(operand), item.fill, value.dtype)
    if operand.crop is not None:
        value = emit.slice(value, operand.crop)
    value = emit.reshape(value, operand.shape)
    return value if pads is None else emit.pad(value, pads, item.fill)


def graph_of(
    items: Sequence[Instruction], inputs: Sequence[int], outputs: Sequence[int], kinds: Kinds
) -> onnx.GraphProto:
    """Instructions as a graph of ONNX, lowered one after the other; slots go in and out as they lie."""
    emit, slots = Emitter(), dict[int, Val]()
    given = [kinds.stored(slot, f"x{index}") for index, slot in enumerate(inputs)]
    for slot, value in zip(inputs, given, strict=True):
        order = kinds.orders.get(slot, range(len(value.shape)))
        slots[slot] = emit.transpose(value, [int(axis) for axis in np.argsort(order)])
    for item in items:
        args = [_emitted_operand(emit, slots[operand.slot], item, operand) for operand in item.operands]
        lowering = KERNELS[item.op].lowering
        assert lowering is not None, f"{item.op} is left to NumPy"
        for index, result in enumerate(lowering(emit, args, item)):
            if result.shape != item.kernel_shapes[index] or result.dtype != item.dtypes[index]:
                raise ValueError(
                    f"{item.op} gave {result.dtype} {result.shape}, "
                    f"wanted {item.dtypes[index]} {item.kernel_shapes[index]}"
                )
            slots[item.outputs[index]] = emit.reshape(result, item.shapes[index])
    made: list[Val] = []
    for slot in outputs:
        value = emit.transpose(slots[slot], kinds.orders.get(slot) or range(len(slots[slot].shape)))
        if value in given or value in made:  # an output has a name of its own
            value = emit.node("Identity", [value], value.shape)
        made.append(value)
    infos, results = ([value.info for value in values] for values in (given, made))
    return helper.make_graph(emit.nodes, "program", infos, results, emit.initializers)


def indices_of(item: Instruction) -> Operand | None:
    """Return the operand of an instruction that says where its session reads or writes; None: none does."""
    index = KERNELS[item.op].indices
    return None if index is None else item.operands[index]


class SessionStep:
    """A step of instructions that follow each other, as one session.

    Indices that it looks up are not made in it, so that one that is out of range can be found and told.
    """

    def __init__(self, items: Sequence[Instruction], kinds: Kinds, later: Collection[int]) -> None:
        """``later``: slots that are read after these instructions, or are outputs of the program."""
        made = {slot for item in items for slot in item.outputs}
        self._inputs = sorted({operand.slot for item in items for operand in item.operands} - made)
        self.full: Collection[int] = sorted(made & set(later))
        """Slots that are made where they belong."""
        self._kinds = kinds
        self._lookups = [(item, found) for item in items if (found := indices_of(item)) is not None]
        self._session = Session(model_of(graph_of(items, self._inputs, self.full, kinds)))

    def run(self, slots: Slots, places: Places) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        orders = self._kinds.orders
        made = {slot: self._kinds.result(slot, places) for slot in self.full}
        arrays = [as_stored(slots[slot], orders.get(slot, ())) for slot in self._inputs]
        stored = [as_stored(array, orders.get(slot, ())) for slot, array in made.items()]
        try:
            self._session.run(arrays, stored)
        except FAILURES:
            for item, indices in self._lookups:
                check_indices(item, crop(slots[indices.slot], indices.crop))
            raise
        slots |= made
