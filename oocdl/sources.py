"""Arrays that a unit reads from elsewhere than from chunks, always by region.

Dataset regions, constants, step scalars, sums not yet begun and random numbers. Random
numbers are a function of (seed, pass, value, global index), so they do not depend on cuts,
threads or workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Protocol

import numpy as np

from oocdl.graph.axes import Region, region_shape
from oocdl.graph.factorize import Factored, Factors
from oocdl.graph.ir import Array, Role, Shape


class Reader(Protocol):
    """An array of a dataset, the sample axis first."""

    @property
    def shape(self) -> Shape: ...

    def read(self, region: Region) -> Array: ...


@dataclass(frozen=True)
class StepInfo:
    """What differs from pass to pass. Small: it travels with every task."""

    number: int
    """Of the pass through the network, from 0 over the whole run; a step is one or several."""
    seed: int
    indices: tuple[int, ...] = ()
    """Dataset rows of the batch, in order."""
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Feed:
    """A dataset array bound to a model input or target."""

    reader: Reader
    scale: float | None = None
    shift: float = 0.0


def own_regions(factors: Factors, region: Region) -> list[tuple[Region, tuple[slice, ...]]]:
    """Boxes of a value's own axes that make up a region of its stored factors.

    Each comes with its place inside an array of the region's stored shape. One box
    if of every axis only the outermost cut factor is partial.
    """
    axes: list[list[tuple[tuple[int, int], tuple[slice, ...]]]] = []
    position = 0
    for parts in factors:
        held = region[position : position + len(parts)]
        position += len(parts)
        axes.append(_runs(parts, held))
    return [
        (tuple(box for box, _ in combo), tuple(cut for _, cuts in combo for cut in cuts))
        for combo in product(*axes)
    ]


def _runs(parts: tuple[int, ...], held: Region) -> list[tuple[tuple[int, int], tuple[slice, ...]]]:
    """Contiguous runs of one axis."""
    if not parts:
        return [((0, 1), ())]
    inner = len(parts)
    while inner > 1 and held[inner - 1] == (0, parts[inner - 1]):
        inner -= 1
    block = prod(parts[inner:])
    start, stop = held[inner - 1]
    found = []
    for outer in product(*(range(low, high) for low, high in held[: inner - 1])):
        base = 0
        for index, extent in zip(outer, parts[: inner - 1], strict=True):
            base = base * extent + index
        base *= parts[inner - 1]
        cuts = tuple(slice(i - low, i - low + 1) for i, (low, _) in zip(outer, held, strict=False))
        whole = tuple(slice(0, extent) for extent in parts[inner:])
        found.append(
            (((base + start) * block, (base + stop) * block), (*cuts, slice(0, stop - start), *whole))
        )
    return found


class Sources:
    """Everything a plan reads that is not a chunk."""

    def __init__(self, factored: Factored, feeds: Mapping[str, Feed]) -> None:
        self.factored, self.feeds = factored, feeds

    def read(self, name: str, region: Region, info: StepInfo) -> Array:
        """The array of a region of value ``name``, in its stored shape and its dtype."""
        value = self.factored.graph.values[name]
        if value.role is Role.SCALAR:
            return np.full(region_shape(region), info.scalars[name], value.dtype)
        if value.role is Role.SUM:
            return np.zeros(region_shape(region), value.dtype)
        if value.role is Role.CONSTANT:
            stored = self.factored.graph.constants[name].reshape(self.factored.shapes[name])
            return np.array(stored[tuple(slice(a, b) for a, b in region)], order="C")
        if value.role is Role.RANDOM:
            return uniform(info.seed, info.number, name, self.factored.shapes[name], region, value.dtype)
        out = np.empty(region_shape(region), value.dtype)
        for box, place in own_regions(self.factored.factors[name], region):
            out[place] = self._rows(name, box, info, value.dtype).reshape(out[place].shape)
        return out

    def _rows(self, name: str, box: Region, info: StepInfo, dtype: str) -> Array:
        """A box of a batch, sample by sample: the rows of a batch may lie anywhere."""
        feed, rank = self.feeds[name], len(self.factored.graph.values[name].shape)
        squeeze = len(feed.reader.shape) == rank - 1
        inner = box[2:] if squeeze else box[1:]
        rows = [feed.reader.read(((i, i + 1), *inner)) for i in info.indices[box[0][0] : box[0][1]]]
        array = rows[0] if len(rows) == 1 else np.concatenate(rows)
        array = array.astype(dtype, copy=False)
        if feed.scale is not None or feed.shift:
            array = array * np.asarray(feed.scale or 1.0, dtype) + np.asarray(feed.shift, dtype)
        return array


def uniform(seed: int, number: int, name: str, shape: Shape, region: Region, dtype: str) -> Array:
    """Uniform numbers in [0, 1) by global index: splitmix64 (Steele, Lea, Flood 2014) of a keyed counter."""
    digest = hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    index = np.full((), int.from_bytes(digest, "little"), np.uint64)
    stride = 1
    with np.errstate(over="ignore"):
        for axis in reversed(range(len(shape))):
            start, stop = region[axis]
            steps = np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)
            steps = steps * np.uint64(0x9E3779B97F4A7C15)
            index = index + steps.reshape((-1,) + (1,) * (len(shape) - 1 - axis))
            stride *= shape[axis]
        z: Any = np.array(np.broadcast_to(index, region_shape(region)))
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    found: Array = ((z >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(dtype)
    return found
