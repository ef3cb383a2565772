"""Chains on NumPy: all instructions run on one block, then on the next.

A value that is read outside of the chain is written whole; any other takes one block.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oocdl.engines.ort.ort_kernels import BLOCKWISE
from oocdl.fusion.executor import AnyChainStep
from oocdl.fusion.grouping import Chain, Kind
from oocdl.fusion.loop_nest import View
from oocdl.graph.ir.graph import Array, Shape


class ChainStep(AnyChainStep[Array]):
    """A chain on arrays."""

    def __init__(self, chain: Chain, needed: frozenset[int], dtype_of: Mapping[int, str]) -> None:
        """``needed``: slots that are read after the chain. ``dtype_of``: of each slot."""
        super().__init__(chain, needed, dtype_of, BLOCKWISE, np)

    def _empty(self, shape: Shape, dtype: str) -> Array:
        return np.empty(shape, dtype)

    def _whole(self, slot: int, kind: Kind, slots: Mapping[int, Array], places: Mapping[int, Array]) -> Array:
        if slot not in places:
            return self._empty(*kind)
        place = self._seen(places[slot], kind[0])
        assert np.shares_memory(place, places[slot]), "a result would go to a copy of its place"
        return place

    def _view(self, array: Array) -> View:
        return View(array.ctypes.data, array.shape, array.strides)

    def _copy(self, array: Array) -> Array:
        return array.copy()

    def _of_numpy(self, array: Array, dtype: str) -> Array:
        return array.astype(dtype)
