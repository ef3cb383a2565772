"""Runs a chain as one compiled loop, or block after block.

A chain of members that loops can compute runs as one loop over all of its domain (``Fused``). Any other
chain runs all members on one block, each with a kernel of the runtime, and then on the next block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic

import numpy as np

from oocdl.fusion.grouping import (
    A,
    Blockwise,
    Chain,
    Crop,
    Into,
    Kind,
    Member,
    from_channels_last,
    members_of,
)
from oocdl.fusion.loop_nest import Fused, Placed, View, fuse
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction


def crop(array: Any, box: Crop | None) -> Any:
    """View the box of an array; all of it where there is none."""
    return array if box is None else array[tuple(slice(start, stop) for start, stop in box)]


class Blocks(Generic[A]):
    """The blocks of a domain in row-major order, and the pieces of arrays in them."""

    def __init__(self, domain: Shape, block: Shape) -> None:
        self.rank, self.block = len(domain), block
        self.sizes: dict[int, tuple[int, ...]] = {}
        """Cut axis -> extents of its pieces."""
        for axis, (extent, size) in enumerate(zip(domain, block, strict=True)):
            if size < extent:
                rest = (extent % size,) if extent % size else ()
                self.sizes[axis] = (size,) * (extent // size) + rest
        self.shapes: list[Shape] = [block]
        for axis, sizes in self.sizes.items():
            self.shapes = [(*s[:axis], size, *s[axis + 1 :]) for s in self.shapes for size in sizes]

    def pieces(self, array: Any, over: tuple[int, ...] = ()) -> list[A]:
        """Return a view of ``array`` for each block; it has one element for each along axes in ``over``."""
        if array.ndim < self.rank:
            array = array.reshape((1,) * (self.rank - array.ndim) + tuple(array.shape))
        found = [array]
        for axis, sizes in self.sizes.items():
            if array.shape[axis] == 1:
                found = [piece for piece in found for _ in sizes]
            else:
                size = 1 if axis in over else self.block[axis]
                places = [slice(at, at + size) for at in range(0, array.shape[axis], size)]
                found = [piece[(*(slice(None),) * axis, place)] for piece in found for place in places]
        return found

    def of_buffer(self, buffer: Any, shape: Shape) -> list[A]:
        """Return a view of ``buffer`` for each block, as large as the block of a value of ``shape``."""
        views: dict[Shape, A] = {}
        found = []
        for block in self.shapes:
            own = tuple(1 if extent == 1 else size for extent, size in zip(shape, block, strict=True))
            if own not in views:
                views[own] = buffer[: prod(own)].reshape(own)
            found.append(views[own])
        return found

    def counts(self, axes: tuple[int, ...], over: tuple[int, ...]) -> Array:
        """Return how many elements a reduction over ``over`` has in each block, blocks along ``axes``."""
        extents = (n for axis, n in enumerate(self.block) if axis in over and axis not in axes)
        found = np.full((1,) * self.rank, float(prod(extents)))
        for axis in axes:
            shape = (*(1,) * axis, -1, *(1,) * (self.rank - axis - 1))
            found = found * np.array(self.sizes[axis], np.float64).reshape(shape)
        return found


@dataclass(frozen=True, eq=False)
class BlockPlan(Generic[A]):
    """The plan of a chain that runs block by block."""

    parts: Mapping[tuple[int, ...], tuple[int, ...]]
    """Outputs of a reduction -> axes along which partial results of its blocks lie, until they are
    combined at the end."""
    kinds: Mapping[int, Kind]
    """Column that only lives inside a block -> shape and dtype of the whole value."""
    register_of: Mapping[int, int]
    """Column -> number of the register that holds it."""
    registers: Sequence[Kind]
    kernels: Sequence[tuple[Into[A], tuple[int, ...], tuple[int, ...]]]
    """(kernel, columns that it reads, columns that it writes), in the order in which they run."""


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


class AnyChainStep(ABC, Generic[A]):
    """A chain with all that can be decided before it runs; engines say how their arrays are handled."""

    def __init__(
        self,
        chain: Chain,
        needed: frozenset[int],
        dtype_of: Mapping[int, str],
        kernels: Mapping[str, Blockwise[A]],
        library: Any,
    ) -> None:
        """``needed``: slots that are read after the chain. ``dtype_of``: slot -> dtype.

        ``library``: the module of the arrays, NumPy or torch.
        """
        self.chain, self.rank = chain, len(chain.domain)
        self.blocks, self._kernels = Blocks[A](chain.domain, chain.block), kernels
        self._library = library
        self.members, self.columns = members_of(chain, lambda op: kernels[op].in_place)
        """The members; operand from outside, or slot made by a member -> column."""
        made = {slot for item in chain.members for slot in item.outputs if slot in needed}
        reductions = [item for item in chain.members if kernels[item.op].finish is not None]
        elementwise = made - {slot for item in reductions for slot in item.outputs}
        fused = fuse(chain, self.members, self.columns, elementwise, dtype_of)
        self.plan: Fused | BlockPlan[A] = fused or self._block_plan(made)
        if isinstance(self.plan, Fused):
            self.summed = made - elementwise
            """Slots whose values are computed from sums: those of the loop, or those of all blocks."""
        else:
            self.summed = {slot for slots in self.plan.parts for slot in slots}
        self._outside = [(key, column) for key, column in self.columns.items() if isinstance(key, tuple)]
        """Operands from outside, each with its column."""
        self._known: dict[tuple[int, Shape, Shape], tuple[int, tuple[int, ...]]] = {}
        """Column, shape and strides of a slot's array -> where the operand begins in it, and its strides."""
        self.full = made - self.summed
        """Slots whose values are written element by element."""

    def _block_plan(self, made: Collection[int]) -> BlockPlan[A]:
        """Plan the blocks; ``made``: slots that are read after the chain."""
        members = self.chain.members
        parts = {item.outputs: axes for item in members if (axes := self._axes(item))}
        apart = {*made, *(slot for slots in parts for slot in slots)}
        kinds = {
            self.columns[slot]: (shape, dtype)
            for item in members
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True)
            if slot not in apart
        }
        register_of, registers = allocate(self.members, kinds)
        bound = [self._kernels[member.item.op].bind(member.item.attrs) for member in self.members]
        kernels = [(into, member.ins, member.outs) for into, member in zip(bound, self.members, strict=True)]
        return BlockPlan(parts, kinds, register_of, registers, kernels)

    def _axes(self, item: Instruction) -> tuple[int, ...]:
        """Return the axes along which partial results of a reduction are combined; none for other members."""
        if self._kernels[item.op].finish is None:
            return ()
        over = {axis % self.rank for axis in item.attrs["axes"]}
        return tuple(axis for axis in self.blocks.sizes if axis in over)

    def run(self, slots: dict[int, A], places: Mapping[int, A]) -> None:
        """Read operands from ``slots`` and put results there, in the arrays of ``places`` where given."""
        if isinstance(self.plan, Fused):
            self._run_fused(self.plan, slots, places)
        else:
            self._run_blocks(self.plan, slots, places)

    def _run_fused(self, fused: Fused, slots: dict[int, A], places: Mapping[int, A]) -> None:
        copies: list[A] = []
        placed = {
            column: self._place(fused, column, slots[slot], box, shape, copies)
            for (slot, box, shape), column in self._outside
        }
        results: dict[int, A] = {}
        for item in self.chain.members:
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
                if slot in self.full:
                    results[slot] = self._whole(slot, (shape, dtype), slots, places)
                    place = fused.place(self._view(results[slot]))
                    assert place is not None, "a loop cannot write a result as it lies"
                    placed[self.columns[slot]] = place
        for item, sums in fused.run(placed):
            for slot, total, dtype in zip(item.outputs, sums, item.dtypes, strict=True):
                results[slot] = self._of_numpy(total, dtype)
        for item in self.chain.members:
            self._keep(item, results, slots)

    def _place(
        self, fused: Fused, column: int, array: A, box: Crop | None, shape: Shape, copies: list[A]
    ) -> Placed:
        """Tell how a column's operand lies; ``array`` is its slot's, ``copies`` keeps what had to be copied.

        An operand is a view nearly always, and lies as it did the last time.
        """
        view = self._view(array)
        key = (column, view.shape, view.strides)
        if key in self._known:
            offset, steps = self._known[key]
            return Placed(view.address + offset, steps)
        operand = self._seen(crop(array, box), shape)
        place = fused.place(self._view(operand))
        if place is None:
            operand = self._copy(operand)
            place = fused.place(self._view(operand))
        assert place is not None, "a loop cannot run over a dense array"
        offset = place.address - view.address
        if view.holds(offset):
            self._known[key] = offset, place.steps
        else:
            copies.append(operand)
        return place

    def _run_blocks(self, plan: BlockPlan[A], slots: dict[int, A], places: Mapping[int, A]) -> None:
        columns: list[list[A]] = [[]] * len(self.columns)
        for key, column in self.columns.items():
            if isinstance(key, tuple):
                slot, box, shape = key
                operand = self._seen(crop(slots[slot], box), shape)
                columns[column] = self.blocks.pieces(operand)
        block = self.chain.block
        buffers = [
            self._empty((prod(1 if n == 1 else size for n, size in zip(shape, block, strict=True)),), dtype)
            for shape, dtype in plan.registers
        ]
        for column, register in plan.register_of.items():
            columns[column] = self.blocks.of_buffer(buffers[register], plan.kinds[column][0])
        results: dict[int, A] = {}
        for item in self.chain.members:
            axes = plan.parts.get(item.outputs, ())
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
                if axes:
                    parts = (len(self.blocks.sizes[a]) if a in axes else n for a, n in enumerate(shape))
                    results[slot] = self._empty(tuple(parts), dtype)
                elif slot in self.full:
                    results[slot] = self._whole(slot, (shape, dtype), slots, places)
                else:
                    continue
                columns[self.columns[slot]] = self.blocks.pieces(results[slot], axes)
        for row in zip(*columns, strict=True):
            for kernel, ins, outs in plan.kernels:
                kernel([row[i] for i in ins], [row[i] for i in outs])
        for item in self.chain.members:
            finish = self._kernels[item.op].finish
            if finish is not None and (axes := plan.parts.get(item.outputs, ())):
                over = tuple(axis % self.rank for axis in item.attrs["axes"])
                counts = self._of_numpy(self.blocks.counts(axes, over), "float64")
                made = finish([results[slot] for slot in item.outputs], counts, axes)
                results |= dict(zip(item.outputs, made, strict=True))
            self._keep(item, results, slots)

    def _keep(self, item: Instruction, results: dict[int, A], slots: dict[int, A]) -> None:
        for slot, shape in zip(item.outputs, item.shapes, strict=True):
            if slot in results:
                slots[slot] = self._result(results[slot], shape)

    def _seen(self, array: Any, shape: Shape) -> A:
        """View the array of a slot in a shape of the chain."""
        last = self.chain.channels_last and len(shape) == self.rank
        seen = array.reshape(from_channels_last(shape) if last else shape)
        moved: A = self._library.moveaxis(seen, 1, -1) if last else seen
        return moved

    def _result(self, array: Any, shape: Shape) -> A:
        if self.chain.channels_last:
            array = self._library.moveaxis(array, -1, 1)
        seen: A = array.reshape(shape)
        return seen

    @abstractmethod
    def _view(self, array: A) -> View:
        """Tell the address and strides of an array, in the axes of the chain."""

    @abstractmethod
    def _copy(self, array: A) -> A:
        """Copy an array into memory without gaps."""

    @abstractmethod
    def _of_numpy(self, array: Array, dtype: str) -> A:
        """Convert a small NumPy array to the runtime's type and to ``dtype``."""

    @abstractmethod
    def _empty(self, shape: Shape, dtype: str) -> A:
        """Make an array without initializing it."""

    @abstractmethod
    def _whole(self, slot: int, kind: Kind, slots: Mapping[int, A], places: Mapping[int, A]) -> A:
        """Return an array for a result: that of ``places``, or of an operand that ends here, or a new one."""
