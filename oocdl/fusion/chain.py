"""Chains: elementwise instructions and reductions that run as one loop, and the columns that they compute on.

All members of a chain run over one domain. What they read and make is numbered as columns, so that a loop
depends on neither slots nor names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from oocdl.fusion.loop_axes import Nest
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

Crop = tuple[tuple[int, int], ...]
Key = tuple[int, Crop | None, Shape]
"""Slot, crop and shape of an operand."""
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
    """View the box of an array; all of it where there is none."""
    return array if box is None else array[tuple(slice(start, stop) for start, stop in box)]


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


def with_channels_last(item: Instruction) -> Instruction:
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


def runs_channels_last(item: Instruction, is_reduction: bool, channels_last_slots: Collection[int]) -> bool:
    """Whether what an instruction runs over lies in slots that have their channels last."""
    slots = [operand.slot for operand in item.operands] if is_reduction else item.outputs
    rank = len(item.kernel_shapes[0])
    alike = all(len(o.shape) == rank or prod(o.shape) == 1 for o in item.operands)
    return rank in SPATIAL_RANKS and alike and any(slot in channels_last_slots for slot in slots)


# Columns -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Member:
    """An instruction of a chain, its operands and results given as columns."""

    item: Instruction
    ins: tuple[int, ...]
    outs: tuple[int, ...]


def members_of(chain: Chain) -> tuple[list[Member], dict[Key | int, int]]:
    """Return the members, and the column of each operand from outside and of each slot that they make."""
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
        members.append(Member(item, tuple(ins), tuple(outs)))
    return members, columns
