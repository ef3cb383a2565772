"""Chains on PyTorch: all instructions on one block, then on the next.

What is read outside of the chain is written where it belongs; what is not takes a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from oocdl.engines.chain_columns import ROW, Crop, Kind, allocate, members_of
from oocdl.engines.chains import Chain, unmoved
from oocdl.engines.torch_into import IN_PLACE, REDUCTIONS, bound, finish
from oocdl.graph.ir import Shape
from oocdl.graph.program import Instruction


def crop(tensor: Tensor, box: Crop | None) -> Tensor:
    """The box of ``tensor``; all of it where there is none."""
    if box is None:
        return tensor
    for axis, (start, stop) in enumerate(box):
        if (start, stop) != (0, tensor.shape[axis]):
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


class _Blocks:
    """The blocks of a domain in row-major order, and the pieces of tensors in them."""

    def __init__(self, domain: Shape, block: Shape) -> None:
        self.rank = len(domain)
        self.sizes: dict[int, tuple[int, ...]] = {}
        """Cut axis -> extents of its pieces."""
        for axis, (extent, size) in enumerate(zip(domain, block, strict=True)):
            if size < extent:
                rest = (extent % size,) if extent % size else ()
                self.sizes[axis] = (size,) * (extent // size) + rest
        self.block = block
        self.shapes: list[Shape] = [block]
        for axis, sizes in self.sizes.items():
            self.shapes = [(*s[:axis], size, *s[axis + 1 :]) for s in self.shapes for size in sizes]

    def pieces(self, tensor: Tensor, over: tuple[int, ...] = ()) -> list[Tensor]:
        """Views of ``tensor``, a block each; along axes in ``over`` it has one element a block."""
        if tensor.dim() < self.rank:
            tensor = tensor.reshape((1,) * (self.rank - tensor.dim()) + tensor.shape)
        found = [tensor]
        for axis, sizes in self.sizes.items():
            if tensor.shape[axis] == 1:
                found = [piece for piece in found for _ in sizes]
            else:
                size = 1 if axis in over else self.block[axis]
                found = [part for piece in found for part in torch.split(piece, size, axis)]
        return found

    def of_buffer(self, buffer: Tensor, shape: Shape) -> list[Tensor]:
        """The same memory in every block, as large as a value of ``shape`` is there."""
        views: dict[Shape, Tensor] = {}
        found = []
        for block in self.shapes:
            own = tuple(1 if extent == 1 else size for extent, size in zip(shape, block, strict=True))
            if own not in views:
                views[own] = buffer[: prod(own)].view(own)
            found.append(views[own])
        return found

    def counts(self, axes: tuple[int, ...], over: tuple[int, ...]) -> Tensor:
        """Elements that a reduction over ``over`` has in each block, blocks along ``axes``."""
        extents = (n for axis, n in enumerate(self.block) if axis in over and axis not in axes)
        found = torch.full((1,) * self.rank, float(prod(extents)), dtype=torch.float64)
        for axis in axes:
            shape = (*(1,) * axis, -1, *(1,) * (self.rank - axis - 1))
            found = found * torch.tensor(self.sizes[axis], dtype=torch.float64).reshape(shape)
        return found


class ChainStep:
    """One chain, with all that can be decided before it runs."""

    def __init__(self, chain: Chain, needed: frozenset[int], dying: frozenset[int]) -> None:
        """``needed``: slots that are read after the chain. ``dying``: slots it may overwrite."""
        self.chain = chain
        self.blocks = _Blocks(chain.domain, chain.block)
        self.steps, self.columns = members_of(chain, IN_PLACE, REDUCTIONS)
        """Members; operands from outside, and slots made here -> columns."""
        self.parts = {item.outputs: axes for item in chain.members if (axes := self._cut_axes(item))}
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
        self.register_of, self.registers = allocate(self.steps, self.kinds)
        self.reuse = self._reuse(dying)
        self.kernels = [(bound(step.item), step.ins, step.outs) for step in self.steps]

    def _cut_axes(self, item: Instruction) -> tuple[int, ...]:
        """The axes that a reduction is over and blocks are cut along."""
        if item.op not in REDUCTIONS:
            return ()
        over = {axis % self.blocks.rank for axis in item.attrs["axes"]}
        return tuple(axis for axis in self.blocks.sizes if axis in over)

    def _reuse(self, dying: frozenset[int]) -> dict[int, int]:
        """Slot made whole -> dying slot whose memory it may take.

        That one is read block by block like the result, and never after it is overwritten.
        """
        found: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            for slot, shape in zip(step.item.outputs, step.item.kernel_shapes, strict=True):
                for old in sorted(dying - set(found.values())):
                    column = self.columns.get((old, None, shape))
                    others = [key for key in self.columns if isinstance(key, tuple) and key[0] == old]
                    if slot not in self.full or shape != self.chain.domain or len(others) != 1:
                        continue
                    if column is None or any(column in later.ins for later in self.steps[index + 1 :]):
                        continue
                    if step.may_take(column):
                        found[slot] = old
                        break
        return found

    def run(self, slots: dict[int, Tensor], places: Mapping[int, Tensor]) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        columns: list[list[Tensor]] = [[]] * len(self.columns)
        for key, column in self.columns.items():
            if isinstance(key, tuple):
                slot, box, shape = key
                columns[column] = self.blocks.pieces(self._rows(self._seen(crop(slots[slot], box), shape)))
        buffers = [self._buffer(kind) for kind in self.registers]
        for column, register in self.register_of.items():
            columns[column] = self.blocks.of_buffer(buffers[register], self.kinds[column][0])
        results: dict[int, Tensor] = {}
        for item in self.chain.members:
            axes = self.parts.get(item.outputs, ())
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
                if axes:
                    results[slot] = self._partial(shape, dtype, axes)
                elif slot in self.full:
                    results[slot] = self._whole(slot, (shape, dtype), slots, places)
                else:
                    continue
                columns[self.columns[slot]] = self.blocks.pieces(results[slot], axes)
        for row in zip(*columns, strict=True):
            for kernel, ins, outs in self.kernels:
                kernel([row[i] for i in ins], [row[i] for i in outs])
        for item in self.chain.members:
            self._keep(item, results, slots)

    def _buffer(self, kind: Kind) -> Tensor:
        shape, dtype = kind
        extents = (1 if n == 1 else size for n, size in zip(shape, self.chain.block, strict=True))
        return torch.empty(prod(extents), dtype=getattr(torch, dtype))

    def _partial(self, shape: Shape, dtype: str, axes: tuple[int, ...]) -> Tensor:
        """Memory of a reduction's results, a block each."""
        blocks = tuple(len(self.blocks.sizes[a]) if a in axes else n for a, n in enumerate(shape))
        return torch.empty(blocks, dtype=getattr(torch, dtype))

    def _whole(
        self, slot: int, kind: Kind, slots: Mapping[int, Tensor], places: Mapping[int, Tensor]
    ) -> Tensor:
        """Memory of a result: where it is wanted, that of an operand which ends here, or new."""
        if slot in places:
            place = self._seen(places[slot], kind[0])
            assert place.data_ptr() == places[slot].data_ptr(), "a result would go to a copy of its place"
            return place
        dtype = getattr(torch, kind[1])
        if slot in self.reuse:
            old = self._seen(slots[self.reuse[slot]], kind[0])
            if old.is_contiguous() and old.dtype == dtype:
                return old
        return torch.empty(kind[0], dtype=dtype)

    def _rows(self, tensor: Tensor) -> Tensor:
        """What there is one of for each channel, said for a whole row.

        Loops over few channels do not fill the registers (8 of them: 60 us a block, not 21).
        """
        *_, places, channels = self.chain.domain
        alone = tensor.dim() == self.blocks.rank and tensor.shape[-2:] == (1, channels)
        if not self.chain.last or not alone or tensor.numel() * places > ROW:
            return tensor
        return tensor.expand(*tensor.shape[:-2], places, channels).contiguous()

    def _seen(self, tensor: Tensor, shape: Shape) -> Tensor:
        """What lies in a slot, in a shape of the chain."""
        if not self.chain.last or len(shape) != self.blocks.rank:
            return tensor.reshape(shape)
        return tensor.reshape(unmoved(shape)).movedim(1, -1)

    def _keep(self, item: Instruction, results: dict[int, Tensor], slots: dict[int, Tensor]) -> None:
        """Put a member's results into ``slots``, blocks of reductions put together."""
        made = [results[slot] for slot in item.outputs if slot in results]
        axes = self.parts.get(item.outputs, ())
        if axes:
            over = tuple(axis % self.blocks.rank for axis in item.attrs["axes"])
            made = finish(item.op, made, self.blocks.counts(axes, over), axes)
            results |= dict(zip(item.outputs, made, strict=True))
        for slot, shape in zip(item.outputs, item.shapes, strict=True):
            if slot in results:
                result = results[slot].movedim(-1, 1) if self.chain.last else results[slot]
                slots[slot] = result.view(shape)
