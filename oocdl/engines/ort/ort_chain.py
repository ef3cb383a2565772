"""Chains on NumPy: all instructions run on one block, then on the next.

A value that is read outside of the chain is written whole; any other takes one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from oocdl.engines.ort.lowerings import BLOCKWISE
from oocdl.fusion.executor import MOST_COPIED_ELEMENTS, AnyChainStep
from oocdl.fusion.grouping import Chain, Crop, Kind, from_channels_last
from oocdl.fusion.loop_nest import View
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction


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
        """For each block a view of the same memory, as large as a value of ``shape`` is there."""
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


class ChainStep(AnyChainStep[Array]):
    """A chain on arrays."""

    def __init__(self, chain: Chain, needed: frozenset[int], dtype_of: Mapping[int, str]) -> None:
        """``needed``: slots that are read after the chain. ``dtype_of``: of each slot."""
        self.blocks = _Blocks(chain.domain, chain.block)
        super().__init__(chain, needed, dtype_of, self.blocks, BLOCKWISE)

    def _cut_axes(self, over: tuple[int, ...]) -> tuple[int, ...]:
        return over if any(axis in over for axis in self.blocks.cut) else ()

    def _empty(self, shape: Shape, dtype: str) -> Array:
        return np.empty(shape, dtype)

    def _part_shape(self, shape: Shape, axes: tuple[int, ...]) -> Shape:
        return tuple(self.blocks.counts[a] if a in axes else n for a, n in enumerate(shape))

    def _whole(self, slot: int, kind: Kind, slots: Mapping[int, Array], places: Mapping[int, Array]) -> Array:
        if slot not in places:
            return self._empty(*kind)
        place = self._seen(places[slot], kind[0])
        assert np.shares_memory(place, places[slot]), "a result would go to a copy of its place"
        return place

    def _operand(self, array: Array, box: Crop | None, shape: Shape) -> Array:
        return self._seen(crop(array, box), shape)

    def _view(self, array: Array) -> View:
        return View(array.ctypes.data, array.shape, array.strides)

    def _copy(self, array: Array) -> Array:
        return array.copy()

    def _of_numpy(self, array: Array, dtype: str) -> Array:
        return array.astype(dtype)

    def _wide(self, seen: Array) -> Array:
        """Repeat a value of one element for each channel over a whole row.

        NumPy's innermost loop would run over the channels alone.
        """
        if not self.chain.channels_last:
            return seen
        *_, places, channels = self.chain.domain
        alone = seen.ndim == self.rank and seen.shape[-2:] == (1, channels)
        if not alone or seen.size * places > MOST_COPIED_ELEMENTS:
            return seen
        return np.repeat(seen, places, axis=-2)

    def _seen(self, array: Array, shape: Shape) -> Array:
        """A slot's array in a shape of the chain."""
        if not self.chain.channels_last or len(shape) != self.rank:
            return array.reshape(shape)
        return np.moveaxis(array.reshape(from_channels_last(shape)), 1, -1)

    def _counts(self, item: Instruction, axes: tuple[int, ...]) -> Array:
        return self.blocks.elements(axes)

    def _result(self, array: Array, shape: Shape) -> Array:
        return (np.moveaxis(array, -1, 1) if self.chain.channels_last else array).reshape(shape)
