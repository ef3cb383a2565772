"""Steps of a program of the onnxruntime engine: sessions, and single NumPy kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oocdl.engines.checked_indices import check_indices
from oocdl.engines.ort.lowerings import BLOCKWISE, KERNELS
from oocdl.engines.ort.model import model_of
from oocdl.engines.ort.ort_chain import crop
from oocdl.engines.ort.ort_record import Into
from oocdl.engines.ort.ort_session import FAILURES, Session
from oocdl.graph.ir.array_layout import Order, as_stored, ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import is_empty, pads_of
from oocdl.graph.ir.program import Instruction, Operand, Program, make_program, padded_shape

Slots = dict[int, Array]
Places = Mapping[int, Array]
"""Slot -> where the program's output is wanted that the slot is."""


@dataclass(frozen=True)
class Kinds:
    """Shape, dtype and order of every slot of a program."""

    shapes: Mapping[int, Shape]
    dtypes: Mapping[int, str]
    orders: Mapping[int, Order]

    @classmethod
    def of(cls, program: Program) -> Kinds:
        """The shapes, dtypes and orders of ``program``."""
        shapes = dict(zip(program.inputs, program.input_shapes, strict=True))
        dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
        for item in program.instructions:
            shapes |= dict(zip(item.outputs, item.shapes, strict=True))
            dtypes |= dict(zip(item.outputs, item.dtypes, strict=True))
        return cls(shapes, dtypes, dict(program.orders))

    def empty(self, slot: int) -> Array:
        """A new array for a slot."""
        return ordered(np.empty, self.shapes[slot], self.dtypes[slot], self.orders.get(slot, ()))


def suits_numpy(item: Instruction) -> bool:
    """Whether NumPy has a kernel for an instruction."""
    return KERNELS[item.op].lowering is None


def numpy_kernel(item: Instruction) -> Into:
    """Return NumPy's kernel for an instruction, on whole arrays."""
    return (KERNELS[item.op].whole or BLOCKWISE[item.op].bind)(item.attrs)


def _operand(array: Array, item: Instruction, operand: Operand) -> Array:
    """Return an operand as its kernel takes it: cropped, reshaped and padded."""
    array, pads = crop(array, operand.crop).reshape(operand.shape), pads_of(operand)
    if pads is None or KERNELS[item.op].takes_unpadded:
        return array
    fill = array.dtype.type(item.fill)
    if is_empty(operand):
        return np.full(padded_shape(operand), fill)
    return np.pad(array, pads, constant_values=fill)


class NumpyStep:
    """A step of one instruction by a kernel on whole arrays."""

    def __init__(self, item: Instruction, kinds: Kinds, kernel: Into) -> None:
        self._item, self._kinds, self._kernel = item, kinds, kernel
        self.outputs = item.outputs

    def run(self, slots: Slots, places: Places) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        item = self._item
        args = [_operand(slots[operand.slot], item, operand) for operand in item.operands]
        outs = []
        for slot, shape in zip(item.outputs, item.kernel_shapes, strict=True):
            slots[slot] = places[slot] if slot in places else self._kinds.empty(slot)
            outs.append(slots[slot].reshape(shape))
            if not np.shares_memory(outs[-1], slots[slot]):  # axes were split or joined, and lie apart
                outs[-1] = np.empty(shape, slots[slot].dtype)
        self._kernel(args, outs)
        for slot, out in zip(item.outputs, outs, strict=True):
            if not np.shares_memory(out, slots[slot]):
                slots[slot][...] = out.reshape(slots[slot].shape)


def indices_of(item: Instruction) -> Operand | None:
    """The operand of an instruction that says where it reads or writes, if one does."""
    place = KERNELS[item.op].indices
    return None if place is None else item.operands[place]


class SessionStep:
    """A step of instructions that follow each other, as one session.

    Indices that it looks up are not made in it, so that one that is out of range can be found and told.
    """

    def __init__(
        self,
        items: Sequence[Instruction],
        program: Program,
        kinds: Kinds,
        later: Collection[int],
        threads: int,
    ) -> None:
        """``later``: slots that are read after these instructions."""
        made = {slot for item in items for slot in item.outputs}
        reads = {operand.slot for item in items for operand in item.operands} - made
        self._inputs = tuple(sorted(reads))
        self.numbers = [n for n, operand in enumerate(program.outputs) if operand.slot in made]
        """Outputs of the program (by number) that are made here."""
        self._kept = sorted(made & set(later))
        self._kinds = kinds
        outputs = [program.outputs[n] for n in self.numbers]
        outputs += [Operand(slot, None, kinds.shapes[slot], None) for slot in self._kept]
        of = {*reads, *made}
        part = make_program(
            self._inputs,
            tuple(kinds.shapes[slot] for slot in self._inputs),
            tuple(kinds.dtypes[slot] for slot in self._inputs),
            tuple(items),
            tuple(outputs),
            tuple((slot, order) for slot, order in kinds.orders.items() if slot in of),
        )
        looked_up = [(item, indices_of(item)) for item in items]
        self._lookups = [(item, indices) for item, indices in looked_up if indices is not None]
        model, values = model_of(part)
        threads = 1 if any(KERNELS[item.op].one_thread for item in items) else threads
        names = [f"x{index}" for index in range(len(self._inputs))]
        self._session = Session(model.SerializeToString(), names, [v.name for v in values], threads)
        self._orders = part.output_orders

    def run(self, slots: Slots, outs: Sequence[Array]) -> None:
        """Read operands from ``slots``, put results there; outputs go to ``outs``."""
        orders = self._kinds.orders
        arrays = [as_stored(slots[slot], orders.get(slot, ())) for slot in self._inputs]
        kept = [self._kinds.empty(slot) for slot in self._kept]
        results = [*(outs[number] for number in self.numbers), *kept]
        stored = [as_stored(a, order) for a, order in zip(results, self._orders, strict=True)]
        try:
            self._session.run(arrays, stored)
        except FAILURES:
            for item, indices in self._lookups:
                check_indices(item, crop(slots[indices.slot], indices.crop))
            raise
        slots |= dict(zip(self._kept, kept, strict=True))
