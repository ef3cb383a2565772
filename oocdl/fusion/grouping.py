"""Groups instructions into chains, which run block by block so that intermediates stay in the cache.

A chain is a run of elementwise instructions and reductions over one domain (the broadcast of
their shapes). The domain is cut into boxes; all of the chain runs on one before the next.
Everything here depends on the program and the size of a block alone, never on threads:
equal programs give equal bits. The values that a chain reads and makes are numbered as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Generic, TypeVar

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import pads_of
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

A = TypeVar("A")
"""The type that the runtime computes with: a NumPy array or a torch tensor."""
Into = Callable[[list[A], list[A]], None]
"""A function of operands, unpadded and broadcastable, that writes results into memory it is given."""
Bind = Callable[[Mapping[str, Any]], Into[A]]
"""The function for an instruction's attributes."""
Finish = Callable[[list[A], A, tuple[int, ...]], list[A]]
"""(partial results, elements of each part, axes) -> results. The parts lie along ``axes``; the array of
element counts broadcasts with the partial results."""


@dataclass(frozen=True)
class Blockwise(Generic[A]):
    """A runtime's kernel of an elementwise operator or a reduction, for a block of its operands."""

    bind: Bind[A]
    in_place: int
    """The number of leading operands in whose memory a result may lie, if shape and dtype are the same."""
    finish: Finish[A] | None
    """The function that combines the partial results of a reduction; None: the operator is elementwise."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Instructions that run block by block."""

    members: tuple[Instruction, ...]
    domain: Shape
    block: Shape
    """Extents of a block; those at the end of an axis may be smaller."""
    channels_last: bool = False
    """Whether shapes and axes of the members, domain and block have the channels last."""


Group = Chain | Instruction


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


def _runs_channels_last(
    item: Instruction, reductions: frozenset[str], channels_last_slots: Collection[int]
) -> bool:
    """Whether what an instruction runs over lies in slots that have their channels last."""
    slots = [operand.slot for operand in item.operands] if item.op in reductions else item.outputs
    rank = len(item.kernel_shapes[0])
    alike = all(len(o.shape) == rank or prod(o.shape) == 1 for o in item.operands)
    return rank in SPATIAL_RANKS and alike and any(slot in channels_last_slots for slot in slots)


def domain_of(instruction: Instruction, reductions: Iterable[str]) -> Shape:
    """Return the shape that an instruction iterates over: of a reduction's operand, else of the result."""
    return instruction.operands[0].shape if instruction.op in reductions else instruction.kernel_shapes[0]


def block_of(domain: Shape, whole: Iterable[int], elements: int) -> Shape:
    """Return the shape of the largest block of at most ``elements`` elements; axes in ``whole`` are not cut.

    The outermost axes are cut first, into pieces as equal as possible.

    >>> block_of((1, 16, 7, 128, 128), (), 65536)
    (1, 1, 4, 128, 128)
    """
    block = list(domain)
    for axis in range(len(domain)):
        rest = prod(block) // max(block[axis], 1)
        if axis not in whole and prod(block) > elements:
            most = max(elements // rest, 1)
            count = -(-block[axis] // most)
            block[axis] = -(-block[axis] // count)
    return tuple(block)


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


@dataclass(eq=False)
class _Draft:
    """A chain that is being built, and the small instructions around it."""

    elements: int
    reductions: frozenset[str]
    channels_last: bool = False
    before: list[Instruction] = field(default_factory=list)
    members: list[Instruction] = field(default_factory=list)
    after: list[Instruction] = field(default_factory=list)
    domain: Shape = ()
    made: dict[int, Shape] = field(default_factory=dict)
    """Slot that a member makes -> shape."""
    late: set[int] = field(default_factory=set)
    """Slots that are made only after the chain."""
    over: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Slot of a reduction's result -> the axes that are reduced."""
    whole: set[int] = field(default_factory=set)
    """Axes of reductions whose results the chain itself reads: blocks must not cut them."""
    uncut: set[int] = field(default_factory=set)
    """These axes, and those that a member broadcasts along."""

    def add(self, item: Instruction) -> bool:
        """Make ``item`` a member if it fits."""
        shape = domain_of(item, self.reductions)
        domain = _broadcast(self.domain, shape) if self.members else shape
        if domain is None:
            return False
        whole = set(self.whole)
        for operand in item.operands:
            if operand.slot in self.late:
                return False
            if operand.slot in self.made:
                if operand.crop is not None or operand.shape != self.made[operand.slot]:
                    return False
                whole.update(self.over.get(operand.slot, ()))
        uncut = whole | {
            axis
            for member in (*self.members, item)
            for axis, extent in enumerate(domain_of(member, self.reductions))
            if extent != domain[axis]
        }
        if prod(domain[axis] for axis in uncut) > self.elements:
            return False
        self.domain, self.whole, self.uncut = domain, whole, uncut
        self.members.append(item)
        for slot, made in zip(item.outputs, item.kernel_shapes, strict=True):
            self.made[slot] = made
            if item.op in self.reductions:
                rank = len(domain)
                self.over[slot] = tuple(axis % rank for axis in item.attrs["axes"])
        return True

    def add_small(self, item: Instruction) -> None:
        """Run a small instruction before the chain if that can be, else after it."""
        if any(operand.slot in self.late or operand.slot in self.made for operand in item.operands):
            self.after.append(item)
            self.late.update(item.outputs)
        else:
            self.before.append(item)

    def groups(self) -> list[Group]:
        """Return the instructions before the chain, the chain, and those after it."""
        chain: list[Group] = []
        if self.members:
            block = block_of(self.domain, self.uncut, self.elements)
            chain = [Chain(tuple(self.members), self.domain, block, self.channels_last)]
        return [*self.before, *chain, *self.after]


def arrange(program: Program, elements: int, kernels: Mapping[str, Blockwise[Any]]) -> list[Group]:
    """Arrange the instructions of ``program`` in an order that may be run, in chains where possible.

    ``kernels`` has the operators that may be members. Blocks have at most ``elements`` elements; an
    instruction on at most a quarter of that is not worth a place in a chain, and runs before or after it.
    """
    reductions = frozenset(op for op, kernel in kernels.items() if kernel.finish is not None)
    groups: list[Group] = []
    channels_last_slots = frozenset(slot for slot, _ in program.orders)
    draft = _Draft(elements, reductions)
    for item in program.instructions:
        shapes = (*item.kernel_shapes, *(operand.shape for operand in item.operands))
        if all(prod(shape) * 4 <= elements for shape in shapes):
            draft.add_small(item)
            continue
        fits = item.op in kernels and (item.op not in reductions or item.attrs["axes"])
        if not fits or any(map(pads_of, item.operands)) or not prod(domain_of(item, reductions)):
            groups += [*draft.groups(), item]
            draft = _Draft(elements, reductions)
            continue
        channels_last = _runs_channels_last(item, reductions, channels_last_slots)
        member = with_channels_last(item) if channels_last else item
        if draft.channels_last != channels_last or not draft.add(member):
            groups += draft.groups()
            draft = _Draft(elements, reductions, channels_last)
            if not draft.add(member):
                groups.append(item)
    return groups + draft.groups()


def items_of(group: Group) -> Sequence[Instruction]:
    """Return the instructions of a group."""
    return group.members if isinstance(group, Chain) else (group,)


def reads_of(group: Group) -> frozenset[int]:
    """Return the slots that a group reads."""
    return frozenset(operand.slot for item in items_of(group) for operand in item.operands)


def makes_of(group: Group) -> frozenset[int]:
    """Return the slots that a group makes."""
    return frozenset(slot for item in items_of(group) for slot in item.outputs)


# Columns -------------------------------------------------------------------------------------

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
