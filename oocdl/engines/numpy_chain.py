"""Chains on NumPy: all instructions on one block, then on the next.

What is read outside of the chain is written where it belongs; what is not takes a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from oocdl.engines.chain_columns import ROW, Crop, Kind, allocate, members_of
from oocdl.engines.chains import Chain, unmoved
from oocdl.engines.numpy_into import IN_PLACE, REDUCTIONS, bound, finish
from oocdl.graph.ir import Array, Shape
from oocdl.graph.program import Instruction


def crop(array: Array, box: Crop | None) -> Array:
    """The box of ``array``; all of it where there is none."""
    return array if box is None else array[tuple(slice(start, stop) for start, stop in box)]


class _Blocks:
    """The blocks of a domain in row-major order, and the pieces of arrays in them."""

    def __init__(self, domain: Shape, block: Shape) -> None:
        self.domain, self.block = domain, block
        self.counts = tuple(-(-n // size) for n, size in zip(domain, block, strict=True))
        self.cut = tuple(axis for axis, count in enumerate(self.counts) if count > 1)
        places = list(product(*(range(count) for count in self.counts)))
        self._slices = [
            [
                slice(at * size, min(at * size + size, n))
                for at, size, n in zip(place, block, domain, strict=True)
            ]
            for place in places
        ]
        self._places = places

    def pieces(self, array: Array, over: Sequence[int] = ()) -> list[Array]:
        """Views of ``array``, a block each; along axes in ``over`` it has one element a block."""
        array = array.reshape((1,) * (len(self.domain) - array.ndim) + array.shape)
        mine = [axis for axis in self.cut if array.shape[axis] > 1 or axis in over]
        if not mine:
            return [array] * len(self._places)
        found = []
        for place, slices in zip(self._places, self._slices, strict=True):
            index = [slice(None)] * array.ndim
            for axis in mine:
                index[axis] = slice(place[axis], place[axis] + 1) if axis in over else slices[axis]
            found.append(array[tuple(index)])
        return found

    def of_buffer(self, buffer: Array, shape: Shape) -> list[Array]:
        """The same memory in every block, as large as a value of ``shape`` is there."""
        views: dict[Shape, Array] = {}
        found = []
        for slices in self._slices:
            own = tuple(1 if n == 1 else s.stop - s.start for n, s in zip(shape, slices, strict=True))
            if own not in views:
                views[own] = buffer[: prod(own)].reshape(own)
            found.append(views[own])
        return found

    def elements(self, over: Sequence[int]) -> Array:
        """Elements that a reduction over ``over`` has in each block."""
        found = np.ones((1,) * len(self.domain))
        for axis in over:
            size, n = self.block[axis], self.domain[axis]
            pieces = np.minimum(size, n - size * np.arange(self.counts[axis], dtype=np.float64))
            found = found * pieces.reshape((1,) * axis + (-1,) + (1,) * (len(self.domain) - axis - 1))
        return found


class ChainStep:
    """One chain, with all that can be decided before it runs."""

    def __init__(self, chain: Chain, needed: frozenset[int]) -> None:
        """``needed``: slots that are read after the chain."""
        self.chain = chain
        self.rank = len(chain.domain)
        self.blocks = _Blocks(chain.domain, chain.block)
        steps, self.columns = members_of(chain, IN_PLACE, REDUCTIONS)
        """Operands from outside, and slots made here -> columns."""
        self.parts = {item.outputs: axes for item in chain.members if (axes := self._cut_axes(item))}
        """Outputs of reductions whose blocks are put together at the end; the axes these are over."""
        split = {slot for slots in self.parts for slot in slots}
        self.full = {slot for item in chain.members for slot in item.outputs if slot in needed} - split
        """Slots made whole."""
        self.kinds = {
            self.columns[slot]: (shape, dtype)
            for item in chain.members
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True)
            if slot not in self.full | split
        }
        self.register_of, self.registers = allocate(steps, self.kinds)
        self.kernels = [(bound(step.item), step.ins, step.outs) for step in steps]

    def _cut_axes(self, item: Instruction) -> tuple[int, ...]:
        """The axes that a reduction is over, if blocks are cut along one of them."""
        if item.op not in REDUCTIONS:
            return ()
        over = tuple(sorted({axis % self.rank for axis in item.attrs["axes"]}))
        return over if any(axis in over for axis in self.blocks.cut) else ()

    def run(self, slots: dict[int, Array], places: Mapping[int, Array]) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        columns: list[list[Array]] = [[]] * len(self.columns)
        for key, column in self.columns.items():
            if isinstance(key, tuple):
                slot, box, shape = key
                columns[column] = self.blocks.pieces(self._row(self._seen(crop(slots[slot], box), shape)))
        buffers = [self._buffer(kind) for kind in self.registers]
        for column, register in self.register_of.items():
            columns[column] = self.blocks.of_buffer(buffers[register], self.kinds[column][0])
        results: dict[int, Array] = {}
        for item in self.chain.members:
            over = self.parts.get(item.outputs, ())
            for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
                if over:
                    results[slot] = self._partial(shape, dtype, over)
                elif slot in self.full:
                    results[slot] = self._whole(slot, (shape, dtype), places)
                else:
                    continue
                columns[self.columns[slot]] = self.blocks.pieces(results[slot], over)
        for row in zip(*columns, strict=True):
            for kernel, ins, outs in self.kernels:
                kernel([row[i] for i in ins], [row[i] for i in outs])
        for item in self.chain.members:
            self._keep(item, results, slots)

    def _buffer(self, kind: Kind) -> Array:
        shape, dtype = kind
        extents = (1 if n == 1 else size for n, size in zip(shape, self.chain.block, strict=True))
        return np.empty(prod(extents), dtype=dtype)

    def _partial(self, shape: Shape, dtype: str, over: tuple[int, ...]) -> Array:
        """Memory of a reduction's results, a block each."""
        return np.empty([self.blocks.counts[a] if a in over else n for a, n in enumerate(shape)], dtype)

    def _whole(self, slot: int, kind: Kind, places: Mapping[int, Array]) -> Array:
        """Memory of a result: where it is wanted, or new."""
        if slot not in places:
            return np.empty(*kind)
        place = self._seen(places[slot], kind[0])
        assert np.shares_memory(place, places[slot]), "a result would go to a copy of its place"
        return place

    def _row(self, array: Array) -> Array:
        """What there is one of for each channel, said for a whole row.

        NumPy's innermost loop would run over the channels alone.
        """
        *_, places, channels = self.chain.domain
        alone = array.ndim == self.rank and array.shape[-2:] == (1, channels)
        if not self.chain.last or not alone or array.size * places > ROW:
            return array
        return np.repeat(array, places, axis=-2)

    def _seen(self, array: Array, shape: Shape) -> Array:
        """What lies in a slot, in a shape of the chain."""
        if not self.chain.last or len(shape) != self.rank:
            return array.reshape(shape)
        return np.moveaxis(array.reshape(unmoved(shape)), 1, -1)

    def _keep(self, item: Instruction, results: dict[int, Array], slots: dict[int, Array]) -> None:
        """Put a member's results into ``slots``, blocks of reductions put together."""
        made = [results[slot] for slot in item.outputs if slot in results]
        if over := self.parts.get(item.outputs, ()):
            made = finish(item.op, made, self.blocks.elements(over), over)
            results |= dict(zip(item.outputs, made, strict=True))
        for slot, shape in zip(item.outputs, item.shapes, strict=True):
            if slot in results:
                result = np.moveaxis(results[slot], -1, 1) if self.chain.last else results[slot]
                slots[slot] = result.reshape(shape)
