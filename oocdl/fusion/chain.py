"""Chains: elementwise instructions and reductions that run as one loop, so that what only they read never is
in memory.

All members of a chain run over one domain. Everything here depends on the program alone, never on threads:
equal programs give equal bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from oocdl.fusion.loop_axes import REDUCTIONS, Draft, Nest, computes
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import pads_of, slot_dtypes
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

Crop = tuple[tuple[int, int], ...]
Kind = tuple[Shape, str]
"""Shape that a value has in its kernel, and dtype."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Instructions that run as one loop."""

    members: tuple[Instruction, ...]
    domain: Shape
    nest: Nest
    channels_last: bool = False
    """Whether shapes and axes of the members and the domain have the channels last."""


Group = Chain | Instruction


def items_of(group: Group) -> Sequence[Instruction]:
    """Return the instructions of a group."""
    return group.members if isinstance(group, Chain) else (group,)


def reads_of(group: Group) -> frozenset[int]:
    """Return the slots that a group reads."""
    return frozenset(operand.slot for item in items_of(group) for operand in item.operands)


def makes_of(group: Group) -> frozenset[int]:
    """Return the slots that a group makes."""
    return frozenset(slot for item in items_of(group) for slot in item.outputs)


def crop(array: Any, box: Crop | None) -> Any:
    """View the box of an array, or all of it without a box; the box of a single number has one axis."""
    if box is None:
        return array
    return (array if array.ndim else array.reshape(1))[tuple(slice(start, stop) for start, stop in box)]


# Channels last -------------------------------------------------------------------------------


def to_channels_last(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Put the entry of the channels, one of each axis, behind those of space.

    >>> to_channels_last((1, 16, 2, 3, 4))
    (1, 2, 3, 4, 16)
    """
    return (shape[0], *shape[2:], shape[1])


def from_channels_last(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Undo ``to_channels_last``."""
    return (shape[0], shape[-1], *shape[1:-1])


def _with_channels_last(item: Instruction) -> Instruction:
    """The same instruction, its operands, results and axes given in the order that has channels last."""
    rank = len(item.kernel_shapes[0])
    attrs = dict(item.attrs)
    if "axes" in attrs:
        places = from_channels_last(range(rank))
        attrs["axes"] = tuple(sorted(places[axis % rank] for axis in attrs["axes"]))
    operands = tuple(
        o._replace(shape=to_channels_last(o.shape)) if len(o.shape) == rank else o for o in item.operands
    )
    shapes = tuple(to_channels_last(shape) for shape in item.kernel_shapes)
    return replace(item, operands=operands, kernel_shapes=shapes, attrs=attrs)


def _runs_channels_last(item: Instruction, channels_last_slots: Collection[int]) -> bool:
    """Whether what an instruction runs over lies in slots that have their channels last."""
    slots = [operand.slot for operand in item.operands] if item.op in REDUCTIONS else item.outputs
    rank = len(item.kernel_shapes[0])
    alike = all(len(o.shape) == rank or prod(o.shape) == 1 for o in item.operands)
    return rank in SPATIAL_RANKS and alike and any(slot in channels_last_slots for slot in slots)


# Grouping ------------------------------------------------------------------------------------


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
        self.channels_last = channels_last
        self.draft = Draft(item.operands[0].shape if item.op in REDUCTIONS else item.kernel_shapes[0])
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
            channels_last = _runs_channels_last(item, channels_last_slots)
            if found.add(_with_channels_last(item) if channels_last else item, channels_last):
                continue
        found.end().append(item)
    return found.end()
