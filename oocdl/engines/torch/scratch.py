"""Heap that a program takes with PyTorch beside its inputs and the arrays of its results, and the values that
it makes in these arrays or over an input.

Bytes are counted stage by stage, as the program runs: a value in the memory of another takes nothing, and
oneDNN makes fewer copies where operands have their channels last. The plan reserves this much for each
program, so it is an upper bound; a test measures it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from oocdl.engines.torch.torch_chain import ChainStep
from oocdl.engines.torch.torch_kernels import KERNELS
from oocdl.engines.torch.torch_record import Result, Slots, nbytes
from oocdl.fusion.chain import crop
from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import pads_of, slot_dtypes, slot_shapes
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.ir.program_cost import HEAP_QUARTERS

Stage = tuple[ChainStep | Instruction, Collection[int]]


class _Heap(Slots):
    """Memory that is alive, by the slot it was made for; slots that are views of another count with it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.owner: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.views: dict[int, Tensor] = {}
        """Slots that are views -> tensors without memory that lie as they do."""
        self.peak = 0

    def add(self, slot: int, nbytes: int) -> None:
        self.owner[slot], self.size[slot] = slot, nbytes

    def share(self, slot: int, other: int) -> None:
        """Let a slot lie in the memory of another, which may be an input."""
        if other in self.owner:
            self.owner[slot] = self.owner[other]

    def drop(self, slot: int) -> None:
        """Free the memory of a slot, if no other lies in it."""
        self.owner.pop(slot, None)

    def need(self, nbytes: int) -> None:
        """Count scratch beside what is alive, for one stage."""
        alive = sum(self.size[owner] for owner in set(self.owner.values()))
        self.peak = max(self.peak, alive + nbytes)


def _lying(shape: Shape, dtype: str, order: Order) -> Tensor:
    """A tensor without memory that lies as a slot does whose axes are in ``order`` in memory."""
    order = order or tuple(range(len(shape)))
    made = torch.empty([shape[axis] for axis in order], dtype=getattr(torch, dtype), device="meta")
    return made.permute([order.index(axis) for axis in range(len(shape))])


def _seen(heap: _Heap, slot: int) -> Tensor:
    """How a slot lies, as a tensor without memory."""
    lying = (heap.shape_of[slot], heap.dtype_of[slot], heap.order_of.get(slot, ()))
    return heap.views[slot] if slot in heap.views else _lying(*lying)


def _view(heap: _Heap, item: Instruction) -> Tensor:
    """The view that an instruction makes, as a tensor without memory: PyTorch tells how it lies."""
    operand = item.operands[0]
    source = _seen(heap, operand.slot)
    (made,) = KERNELS[item.op].run([crop(source, operand.crop).reshape(operand.shape)], item)
    return made.reshape(item.shapes[0])


def _loop_bytes(heap: _Heap, step: ChainStep) -> int:
    """Bytes that a loop takes beside its results: its sums in memory, and copies of operands."""
    outside = [key for key in step.columns if isinstance(key, tuple)]
    copied = [key for key in outside if step.copies(key, _seen(heap, key[0]))]
    return step.loop.scratch_bytes + sum(nbytes(shape, heap.dtype_of[slot]) for slot, _, shape in copied)


def _run_chain(heap: _Heap, step: ChainStep) -> None:
    """Count a chain: the values that are read after it."""
    for item in step.chain.members:
        heap.shape_of.update(zip(item.outputs, item.shapes, strict=True))
        for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
            heap.dtype_of[slot] = dtype
            if slot in step.summed:
                heap.add(slot, nbytes(shape, dtype))
            if slot not in step.full or slot in heap.direct:
                continue
            old = step.reuse.get(slot)
            # A part of a larger result has gaps if there are several samples, and is not taken over.
            if old is not None and (shape[0] == 1 or old in heap.inputs):
                heap.share(slot, old)
            else:
                heap.add(slot, nbytes(shape, dtype))
    heap.need(_loop_bytes(heap, step))


def _run_alone(heap: _Heap, item: Instruction, rules: Rules) -> None:
    kernel = KERNELS[item.op]
    scratch = kernel.scratch(item, heap, rules)
    for slot, shape, dtype in zip(item.outputs, item.shapes, item.dtypes, strict=True):
        heap.dtype_of[slot], heap.shape_of[slot] = dtype, shape
        if kernel.result is Result.VIEW and pads_of(item.operands[0]) is None:
            heap.share(slot, item.operands[0].slot)
            heap.views[slot] = _view(heap, item)
        elif slot not in heap.direct:
            heap.add(slot, nbytes(shape, dtype))
    heap.need(scratch)


def scratch_bytes(program: Program, stages: Iterable[Stage], direct: Collection[int], rules: Rules) -> int:
    """Upper bound of the heap that a run of ``program`` takes.

    ``stages``: each chain or instruction in order, and the slots that nothing reads after it.
    ``direct``: slots that are made where the program's results belong.
    """
    heap = _Heap(program)
    heap.direct = direct
    for step, dying in stages:
        if isinstance(step, ChainStep):
            _run_chain(heap, step)
        else:
            _run_alone(heap, step, rules)
        for slot in dying:
            heap.drop(slot)
    return heap.peak * HEAP_QUARTERS // 4


def placed(program: Program, steps: Sequence[ChainStep | Instruction]) -> dict[int, int]:
    """Slot -> number of the output in whose memory it is made.

    An output that is not cropped lies where it belongs. So does a value before it that a chain
    writes it over. Such a value takes nothing of the heap, faults in no page, and is not copied in the end.
    """
    dtypes, shapes, orders = slot_dtypes(program), slot_shapes(program), dict(program.orders)
    able = {slot for step in steps for slot in _able(step, orders)}
    found: dict[int, int] = {}
    for number, item in enumerate(program.outputs):
        if item.slot in able and item.crop is None:
            found.setdefault(item.slot, number)

    def kind(slot: int) -> object:
        return dtypes[slot], shapes[slot], orders.get(slot)

    for step in reversed(steps):
        for slot, old in step.reuse.items() if isinstance(step, ChainStep) else ():
            if slot in found and old in able and kind(slot) == kind(old):
                found[old] = found[slot]
    return found


def _able(step: ChainStep | Instruction, orders: Mapping[int, Order]) -> Collection[int]:
    """Slots that a chain or an instruction can make in the memory of an output."""
    if isinstance(step, ChainStep):
        return step.able(lambda slot, shape, dtype: _lying(shape, dtype, orders.get(slot, ())))
    lands, number = KERNELS[step.op].lands, KERNELS[step.op].placed
    if number:
        return step.outputs[:number]
    if lands is None or not {step.operands[0].slot, step.outputs[0]} <= orders.keys():
        return ()
    return step.outputs[:1] if lands(step) else ()


def overwritten(program: Program, steps: Sequence[ChainStep | Instruction]) -> frozenset[int]:
    """Numbers of the inputs that chains write over."""
    taken = {old for step in steps if isinstance(step, ChainStep) for old in step.reuse.values()}
    return frozenset(number for number, slot in enumerate(program.inputs) if slot in taken)
