"""Numbers the values that a chain reads and makes as columns, and gives columns inside it memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oocdl.fusion.grouping import Chain
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction

Crop = tuple[tuple[int, int], ...]
Key = tuple[int, Crop | None, Shape]
"""Slot, crop and shape of an operand."""
Kind = tuple[Shape, str]
"""Shape that a value has in its kernel, and dtype."""


@dataclass(frozen=True, eq=False)
class Member:
    """An instruction of a chain, its operands and results given as columns."""

    item: Instruction
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    owned: int
    """The number of leading operands in whose memory a result may lie."""

    def may_take(self, source: int) -> bool:
        """Whether a result may lie in the memory of the operand in column ``source``."""
        return self.owned > 0 and source not in self.ins[self.owned :]


def members_of(chain: Chain, in_place: Callable[[str], int]) -> tuple[list[Member], dict[Key | int, int]]:
    """Return the members, and the column of each operand from outside and of each slot that a member makes.

    ``in_place``: operator -> the number of leading operands in whose memory a result may lie.
    """
    columns: dict[Key | int, int] = {}
    members = []
    for item in chain.members:
        ins = []
        for operand in item.operands:
            key: Key | int = (operand.slot, operand.crop, operand.shape)
            if operand.slot in columns:
                key = operand.slot
            ins.append(columns.setdefault(key, len(columns)))
        outs = [columns.setdefault(slot, len(columns)) for slot in item.outputs]
        members.append(Member(item, tuple(ins), tuple(outs), in_place(item.op)))
    return members, columns


def allocate(members: Sequence[Member], kinds: Mapping[int, Kind]) -> tuple[dict[int, int], list[Kind]]:
    """Give each column in ``kinds`` a register, which is memory of one block that columns use in turn.

    Returns column -> number of its register, and the kind of each register.
    """
    last: dict[int, int] = {}
    for index, member in enumerate(members):
        last |= dict.fromkeys((*member.outs, *member.ins), index)
    registers: list[Kind] = []
    found: dict[int, int] = {}
    free: list[int] = []
    for index, member in enumerate(members):
        ends = [column for column in dict.fromkeys(member.ins) if column in kinds and last[column] == index]
        for column in member.outs:
            if column not in kinds:
                continue
            sources = [c for c in ends if kinds[c] == kinds[column] and member.may_take(c)]
            unused = [register for register in free if registers[register] == kinds[column]]
            if sources:
                found[column] = found[sources[0]]
                ends.remove(sources[0])
            elif unused:
                found[column] = unused[-1]  # the warmest
                free.remove(unused[-1])
            else:
                found[column] = len(registers)
                registers.append(kinds[column])
        free += [found[column] for column in ends]
        free += [found[column] for column in member.outs if column in kinds and last[column] == index]
    return found, registers
