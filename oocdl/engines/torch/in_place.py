"""Which values of a program are made in the memory of its outputs, or over an input.

Such a value takes nothing of the heap, faults in no page, and is not copied in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oocdl.engines.torch.torch_chain import ChainStep
from oocdl.engines.torch.torch_kernels import KERNELS
from oocdl.graph.ir.operands import slot_dtypes, slot_shapes
from oocdl.graph.ir.program import Instruction, Program


def lands(item: Instruction, channels_last_slots: Collection[int]) -> bool:
    """Whether an instruction outside of chains can make its result in the memory of an output.

    ``channels_last_slots`` have their channels last.
    """
    landing = KERNELS[item.op].landing
    if landing is None or not {item.operands[0].slot, item.outputs[0]} <= set(channels_last_slots):
        return False
    return landing.suits(item)


def placed(program: Program, steps: Sequence[ChainStep | Instruction]) -> dict[int, int]:
    """Slot -> number of the output in whose memory it is made.

    An output that is not cropped lies where it belongs. So does a value before it that a chain
    writes it over.
    """
    channels_last_slots = frozenset(slot for slot, _ in program.orders)
    able = {slot for step in steps for slot in _able(step, channels_last_slots)}
    found: dict[int, int] = {}
    for number, item in enumerate(program.outputs):
        if item.slot in able and item.crop is None:
            found.setdefault(item.slot, number)
    dtypes, shapes, orders = slot_dtypes(program), slot_shapes(program), dict(program.orders)

    def kind(slot: int) -> object:
        return dtypes[slot], shapes[slot], orders.get(slot)

    for step in reversed(steps):
        for slot, old in step.reuse.items() if isinstance(step, ChainStep) else ():
            if slot in found and old in able and kind(slot) == kind(old):
                found[old] = found[slot]
    return found


def _able(step: ChainStep | Instruction, channels_last_slots: Collection[int]) -> Collection[int]:
    """Slots that a chain or an instruction can make in the memory of an output."""
    if isinstance(step, ChainStep):
        return step.full
    return step.outputs[:1] if lands(step, channels_last_slots) else ()


def overwritten(program: Program, steps: Sequence[ChainStep | Instruction]) -> frozenset[int]:
    """Numbers of the inputs that chains write over."""
    taken = {old for step in steps if isinstance(step, ChainStep) for old in step.reuse.values()}
    return frozenset(number for number, slot in enumerate(program.inputs) if slot in taken)
