"""Groups instructions into chains, which run as loops, so that what only they read never is in memory.

A chain is a run of elementwise instructions and reductions over one domain. Everything here depends on the
program alone, never on threads: equal programs give equal bits.
"""

from __future__ import annotations

from math import prod

from oocdl.fusion.chain import Chain, Group, runs_channels_last, with_channels_last
from oocdl.fusion.loop_axes import REDUCTIONS, Draft, computes
from oocdl.graph.ir.operands import pads_of, slot_dtypes
from oocdl.graph.ir.program import Instruction, Program


class _Grouping:
    """A chain that is being built, and the small instructions around it."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        """What is before the chain."""
        self._begin(False)

    def _begin(self, channels_last: bool) -> None:
        self.channels_last, self.members, self.draft = channels_last, list[Instruction](), Draft(())
        self.before, self.after, self.late = list[Group](), list[Group](), set[int]()

    def end(self) -> list[Group]:
        """End the chain; return all groups so far."""
        self.groups += self.before
        if (nest := self.draft.nest) is not None:
            self.groups.append(Chain(tuple(self.members), self.draft.domain, nest, self.channels_last))
        self.groups += self.after
        self._begin(False)
        return self.groups

    def add(self, item: Instruction, channels_last: bool) -> bool:
        """Make an instruction a member of the chain, or of a new one; returns whether loops can have it."""
        waits = any(operand.slot in self.late for operand in item.operands)
        if self.members and channels_last == self.channels_last and not waits and self.draft.add(item):
            self.members.append(item)
            return True
        self.end()
        reads = item.op in REDUCTIONS
        self.channels_last = channels_last
        self.draft = Draft(item.operands[0].shape if reads else item.kernel_shapes[0])
        self.members = [item] if self.draft.add(item) else []
        return bool(self.members)

    def add_small(self, item: Instruction) -> None:
        """Run a small instruction before the chain if that can be, else after it."""
        read = {operand.slot for operand in item.operands}
        if read & self.late or read & self.draft.made:
            self.after.append(item)
            self.late.update(item.outputs)
        else:
            self.before.append(item)


def arrange(program: Program, small_elements: int) -> list[Group]:
    """Arrange the instructions of ``program`` in an order that may be run, in chains where possible.

    An instruction on at most ``small_elements`` is not worth a place in a chain, and runs before or after it.
    """
    found, dtypes = _Grouping(), slot_dtypes(program)
    channels_last_slots = frozenset(slot for slot, _ in program.orders)
    for item in program.instructions:
        sizes = [prod(shape) for shape in (*item.kernel_shapes, *[o.shape for o in item.operands])]
        if max(sizes) <= small_elements:
            found.add_small(item)
            continue
        if all(sizes) and not any(map(pads_of, item.operands)) and computes(item, dtypes):
            channels_last = runs_channels_last(item, item.op in REDUCTIONS, channels_last_slots)
            if found.add(with_channels_last(item) if channels_last else item, channels_last):
                continue
        found.end().append(item)
    return found.end()
