"""How a chain runs, whatever computes it: columns of blocks, memory for them, one block after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

from oocdl.engines.chain_members import Crop, Kind, allocate, members_of
from oocdl.engines.chains import Chain
from oocdl.engines.fused import Fused, View, fuse
from oocdl.graph.ir import Array, Shape
from oocdl.graph.program import Instruction

ROW = 1 << 14
"""Most elements that are worth copying to be a row."""
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

    def __init__(
        self,
        chain: Chain,
        needed: frozenset[int],
        dtype_of: Mapping[int, str],
        blocks: Blocks[A],
        kernels: Kernels[A],
    ) -> None:
        """``needed``: slots that are read after the chain. ``dtype_of``: of each slot."""
        self.chain, self.rank = chain, len(chain.domain)
        self._blocks, self._reductions = blocks, kernels.reductions
        self.members, self.columns = members_of(chain, kernels.in_place, kernels.reductions)
        """Members; operands from outside, and slots made here -> columns."""
        self.full = {slot for item in chain.members for slot in item.outputs if slot in needed}
        """Slots made whole."""
        single = {slot for slot in self.full if slot not in self._reduced()}
        self.fused = fuse(chain, self.members, self.columns, single, dtype_of)
        """The chain as one loop, if it can be one."""
        if self.fused is not None:
            self.summed, self.full = self.full - single, single
            return
        self.parts = {item.outputs: axes for item in chain.members if (axes := self._axes(item))}
        """Outputs of reductions whose blocks are put together at the end; the axes these lie along."""
        split = {slot for slots in self.parts for slot in slots}
        self.summed = split
        """Slots made of sums after the loop, or of those of blocks."""
        self.full -= split
        self.kinds = {
            self.columns[slot]: (shape, dtype)
            for item in chain.members
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True)
            if slot not in self.full | split
        }
        self.register_of, self.registers = allocate(self.members, self.kinds)
        self._kernels = [(kernels.bound(member.item), member.ins, member.outs) for member in self.members]

    def _reduced(self) -> set[int]:
        """Slots that reductions make."""
        return {slot for item in self.chain.members for slot in item.outputs if item.op in self._reductions}

    def _axes(self, item: Instruction) -> tuple[int, ...]:
        """The axes that a reduction has to be put together along; none of another instruction."""
        if item.op not in self._reductions:
            return ()
        return self._cut_axes(tuple(sorted({axis % self.rank for axis in item.attrs["axes"]})))

    def run(self, slots: dict[int, A], places: Mapping[int, A]) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        if self.fused is None:
            self._run_blocks(slots, places)
        else:
            self._run_fused(self.fused, slots, places)

    def _run_fused(self, fused: Fused, slots: dict[int, A], places: Mapping[int, A]) -> None:
        arrays = {
            column: self._operand(slots[key[0]], key[1], key[2])
            for key, column in self.columns.items()
            if isinstance(key, tuple)
        }
        for column in arrays:
            if not fused.fits(self._view(arrays[column])):
                arrays[column] = self._copy(arrays[column])
        results: dict[int, A] = {}
        for item in self.chain.members:
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
                if slot in self.full:
                    results[slot] = self._whole(slot, (shape, dtype), slots, places)
                    arrays[self.columns[slot]] = results[slot]
        totals = fused.run({column: self._view(array) for column, array in arrays.items()})
        for item, found in totals:
            for slot, array, dtype in zip(item.outputs, found, item.dtypes, strict=True):
                results[slot] = self._of_numpy(array, dtype)
        for item in self.chain.members:
            self._keep(item, results, slots)

    def _run_blocks(self, slots: dict[int, A], places: Mapping[int, A]) -> None:
        columns: list[list[A]] = [[]] * len(self.columns)
        for key, column in self.columns.items():
            if isinstance(key, tuple):
                operand = self._wide(self._operand(slots[key[0]], key[1], key[2]))
                columns[column] = self._blocks.pieces(operand)
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
            if axes := self.parts.get(item.outputs, ()):
                made = self._finished(item, [results[slot] for slot in item.outputs], axes)
                results |= dict(zip(item.outputs, made, strict=True))
            self._keep(item, results, slots)

    def _extents(self, shape: Shape) -> Shape:
        """Of a block's memory, as one axis."""
        sizes = zip(shape, self.chain.block, strict=True)
        return (prod(1 if n == 1 else size for n, size in sizes),)

    def _keep(self, item: Instruction, results: dict[int, A], slots: dict[int, A]) -> None:
        """Put a member's results into ``slots``."""
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
    def _wide(self, array: A) -> A:
        """An operand as blocks are fastest with it."""

    @abstractmethod
    def _view(self, array: A) -> View:
        """Where an array lies, in the axes of the chain."""

    @abstractmethod
    def _copy(self, array: A) -> A:
        """An array in memory without gaps."""

    @abstractmethod
    def _of_numpy(self, array: Array, dtype: str) -> A:
        """A small array, in another dtype."""

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
