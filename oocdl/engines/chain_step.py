"""How a chain runs, whatever computes it: columns of blocks, memory for them, one block after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

from oocdl.engines.chains import Chain
from oocdl.graph.ir import Shape
from oocdl.graph.program import Instruction

ROW = 1 << 14
"""Most elements that are worth copying to be a row."""
Crop = tuple[tuple[int, int], ...]
Key = tuple[int, Crop | None, Shape]
"""Slot, crop and shape of an operand."""
Kind = tuple[Shape, str]
"""Shape of a value in its kernel, and dtype."""


@dataclass(frozen=True, eq=False)
class Member:
    """One instruction: its operands and results as columns, an array a block each."""

    item: Instruction
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    owned: int
    """In the memory of how many of its first operands a result may lie."""

    def may_take(self, source: int) -> bool:
        """Whether a result may lie in the memory of column ``source``."""
        return self.owned > 0 and source not in self.ins[self.owned :]


def members_of(
    chain: Chain, in_place: Mapping[str, int], reductions: Collection[str]
) -> tuple[list[Member], dict[Key | int, int]]:
    """The members, and the column of each operand from outside and of each slot made here.

    ``in_place``: operator -> how many of its first operands a result may lie in; all where it is not
    named. ``reductions`` take no operand's memory.
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
        owned = 0 if item.op in reductions else in_place.get(item.op, len(ins))
        members.append(Member(item, tuple(ins), tuple(outs), owned))
    return members, columns


def allocate(members: Sequence[Member], kinds: Mapping[int, Kind]) -> tuple[dict[int, int], list[Kind]]:
    """Memory of a block each for the columns in ``kinds``: the register of each, and their kinds."""
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


A = TypeVar("A")
"""What the runtime computes with: an array, or a tensor."""


@dataclass(frozen=True)
class Kernels(Generic[A]):
    """What a runtime has for the members of chains."""

    in_place: Mapping[str, int]
    """Operator -> how many of its first operands a result may lie in; all where it is not named."""
    reductions: Collection[str]
    bound: Callable[[Instruction], Callable[[list[A], list[A]], None]]
    """The kernel of an instruction: from operands into results."""


class Blocks(Protocol[A]):
    """The blocks of a domain in row-major order."""

    def pieces(self, array: A, over: tuple[int, ...] = ()) -> list[A]:
        """Views of ``array``, a block each; along axes in ``over`` it has one element a block."""
        ...

    def of_buffer(self, buffer: A, shape: Shape) -> list[A]:
        """The same memory in every block, as large as a value of ``shape`` is there."""
        ...


class BlockStep(ABC, Generic[A]):
    """One chain, with all that can be decided before it runs."""

    def __init__(self, chain: Chain, needed: frozenset[int], blocks: Blocks[A], kernels: Kernels[A]) -> None:
        """``needed``: slots that are read after the chain."""
        self.chain, self.rank = chain, len(chain.domain)
        self._blocks, self._reductions = blocks, kernels.reductions
        self.members, self.columns = members_of(chain, kernels.in_place, kernels.reductions)
        """Members; operands from outside, and slots made here -> columns."""
        self.parts = {item.outputs: axes for item in chain.members if (axes := self._axes(item))}
        """Outputs of reductions whose blocks are put together at the end; the axes these lie along."""
        split = {slot for slots in self.parts for slot in slots}
        self.full = {slot for item in chain.members for slot in item.outputs if slot in needed} - split
        """Slots made whole."""
        self.kinds = {
            self.columns[slot]: (shape, dtype)
            for item in chain.members
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True)
            if slot not in self.full | split
        }
        self.register_of, self.registers = allocate(self.members, self.kinds)
        self._kernels = [(kernels.bound(member.item), member.ins, member.outs) for member in self.members]

    def _axes(self, item: Instruction) -> tuple[int, ...]:
        """The axes that a reduction has to be put together along; none of another instruction."""
        if item.op not in self._reductions:
            return ()
        return self._cut_axes(tuple(sorted({axis % self.rank for axis in item.attrs["axes"]})))

    def run(self, slots: dict[int, A], places: Mapping[int, A]) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        columns: list[list[A]] = [[]] * len(self.columns)
        for key, column in self.columns.items():
            if isinstance(key, tuple):
                columns[column] = self._blocks.pieces(self._operand(slots[key[0]], key[1], key[2]))
        extents = [self._extents(shape) for shape, _ in self.registers]
        buffers = [self._empty(n, dtype) for n, (_, dtype) in zip(extents, self.registers, strict=True)]
        for column, register in self.register_of.items():
            columns[column] = self._blocks.of_buffer(buffers[register], self.kinds[column][0])
        results: dict[int, A] = {}
        for item in self.chain.members:
            axes = self.parts.get(item.outputs, ())
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
                if axes:
                    results[slot] = self._empty(self._part_shape(shape, axes), dtype)
                elif slot in self.full:
                    results[slot] = self._whole(slot, (shape, dtype), slots, places)
                else:
                    continue
                columns[self.columns[slot]] = self._blocks.pieces(results[slot], axes)
        for row in zip(*columns, strict=True):
            for kernel, ins, outs in self._kernels:
                kernel([row[i] for i in ins], [row[i] for i in outs])
        for item in self.chain.members:
            self._keep(item, results, slots)

    def _extents(self, shape: Shape) -> Shape:
        """Of a block's memory, as one axis."""
        sizes = zip(shape, self.chain.block, strict=True)
        return (prod(1 if n == 1 else size for n, size in sizes),)

    def _keep(self, item: Instruction, results: dict[int, A], slots: dict[int, A]) -> None:
        """Put a member's results into ``slots``, blocks of reductions put together."""
        if axes := self.parts.get(item.outputs, ()):
            made = self._finished(item, [results[slot] for slot in item.outputs], axes)
            results |= dict(zip(item.outputs, made, strict=True))
        for slot, shape in zip(item.outputs, item.shapes, strict=True):
            if slot in results:
                slots[slot] = self._result(results[slot], shape)

    @abstractmethod
    def _cut_axes(self, over: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that blocks of a reduction over ``over`` are put together along; none if it is not cut."""

    @abstractmethod
    def _operand(self, array: A, box: Crop | None, shape: Shape) -> A:
        """What lies in a slot, cropped, in a shape of the chain."""

    @abstractmethod
    def _empty(self, shape: Shape, dtype: str) -> A:
        """New memory."""

    @abstractmethod
    def _part_shape(self, shape: Shape, axes: tuple[int, ...]) -> Shape:
        """Of a reduction's results, a block each along ``axes``."""

    @abstractmethod
    def _whole(self, slot: int, kind: Kind, slots: Mapping[int, A], places: Mapping[int, A]) -> A:
        """Memory of a result made whole: where it is wanted, or another's that ends, or new."""

    @abstractmethod
    def _finished(self, item: Instruction, parts: list[A], axes: tuple[int, ...]) -> list[A]:
        """Results of a reduction from those of its blocks."""

    @abstractmethod
    def _result(self, array: A, shape: Shape) -> A:
        """A result as its slot has it."""
