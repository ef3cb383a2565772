"""Arrays that a unit reads from elsewhere than from chunks, always by region.

Dataset regions, constants, step scalars, sums not yet begun and random numbers. Random
numbers are a function of (seed, pass, value, global index), so they do not depend on cuts,
threads or workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any

import numpy as np

from oocdl.augmentation import draws
from oocdl.augmentation.preparation import Preparation, Stream, evaluate
from oocdl.graph.ir.graph import Array, Role, Shape
from oocdl.graph.ir.index import Region, as_slices, moved, region_shape, within
from oocdl.graph.transforms.factorize import Factored, Factors
from oocdl.ops.gather import Rows
from oocdl.ops.loss_functions import Labels
from oocdl.ops.optimizers import PRIME
from oocdl.planning.machine import BATCH_CACHE_BYTES, READ_BLOCK_BYTES
from oocdl.planning.passes import VALIDATION, PassInfo, role_of
from oocdl.runtime.checked_values import check_finite, check_ids, check_labels, check_whole
from oocdl.storage.dataset.data_array import DataArray
from oocdl.storage.dataset.dataset import Dataset

_decoding = threading.Lock()
"""One at a time: chunks of a dataset may be large, and decoding takes several times their memory."""


READ_CHUNKS = 1024
"""Maximum number of chunks read at once: each takes a few KiB of the library's own, however small it is."""


@dataclass(frozen=True, eq=False)
class Feed:
    """A dataset array bound to a model input or target."""

    reader: DataArray
    scale: float | None = None
    labels: Labels | Rows | None = None
    """Whole numbers that may stand in it; None: any numbers that are finite."""
    label: str = "the array"
    """Name in messages."""
    stream: Stream | None = None
    """What is done to its samples beyond scaling; None: nothing."""

    def put(self, found: Array, used: Array, region: Region) -> None:
        """Put what was ``found`` in a region where it is ``used``, scaled; DatasetError if it cannot be."""
        if self.scale is None:
            with np.errstate(over="ignore", invalid="ignore"):  # what becomes another number is refused below
                used[...] = found
        else:
            factor = np.asarray(self.scale, used.dtype)
            with np.errstate(over="ignore"):
                np.multiply(found, factor, out=used, dtype=used.dtype, casting="unsafe")
        whole = found if self.scale is None else used
        if isinstance(self.labels, Rows):
            check_ids(self.label, self.labels, whole, region)
        elif used.dtype.kind == "f" and (found.dtype.kind == "f" or self.scale is not None):
            same = self.scale is None and found.dtype.itemsize <= used.dtype.itemsize
            check_finite(self.label, found if same else used, region)
        if isinstance(self.labels, Labels):
            check_labels(self.label, self.labels, whole, region)
        if self.scale is None:
            check_whole(self.label, found, used, region)

    def parts(self, row: int, box: Region) -> Iterator[Region]:
        """Parts of a region of a sample that are read at once."""
        offset, (together, *chunks) = self.reader.offset(row), self.reader.chunks
        from_chunks, itemsize = moved(box, [-start for start in offset]), self.reader.itemsize * together
        for part in read_blocks(from_chunks, tuple(chunks), itemsize, READ_CHUNKS):
            yield moved(part, offset)

    def fill(self, row: int, region: Region, info: PassInfo, out: Array) -> None:
        """Put a region of one sample into ``out``, as its stream makes it in a pass."""
        stream = self.stream
        assert stream is not None
        samples, axis = ((row, row + 1),), stream.channel_axis
        own, offset = self.reader.box(row), self.reader.offset(row)

        def read(box: Region, block: Array) -> None:
            inner, target = (box, block) if axis else (box[1:], block[0])
            for part in self.parts(row, inner):
                with _decoding:
                    found = self.reader.read((*samples, *part))
                used = target[None][(slice(None), *within(part, inner))]
                self.put(found, used, (*samples, *moved(part, [-start for start in offset])))
            stream.normalize(block, row, box)
            if stream.numbers is not None and own is not None:
                _clear_around(block, box, own if axis else ((0, 1), *own))

        box, channels = (region, self.reader.shape[1]) if axis else (((0, 1), *region), 1)
        around = () if own is None else own[len(own) - len(stream.spatial) :]
        operations = stream.operations(info.seed, info.number, row, channels, around)
        dtype = self.reader.dtype if out.dtype.kind != "f" and self.scale is None else out.dtype
        evaluate(operations, box, read, out if axis else out[None], stream.chain_bytes, dtype)


def sources_of(
    plan_id: str,
    factored: Factored,
    feeds: Mapping[str, str],
    labels: Mapping[str, Labels | Rows],
    dataset: Dataset,
    preparation: Preparation,
    kept: Kept,
) -> Sources:
    """Bind values of a graph to arrays: ``feeds`` says to which, ``labels`` what stands in some of them."""
    made = {}
    if role_of(plan_id) == VALIDATION:
        preparation = preparation.plain()
    for name, source in feeds.items():
        array, value = dataset.arrays[source], factored.graph.values[name]
        # Whole numbers are no image: transforms that move voxels take them along as they take labels.
        floats = np.dtype(value.dtype).kind == "f"
        image = value.role is Role.INPUT and len(value.shape) > 2 and floats
        stream = preparation.stream(source, array.shape[1:], len(value.shape) - 2 if image else None)
        made[name] = Feed(array, preparation.scale.get(array.name), labels.get(name), array.label, stream)
    return Sources(factored, made, kept)


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


class Kept:
    """Keeps what was last read of a dataset for one pass, up to ``most_bytes``.

    Each shard of a perceptron's layer reads the same whole batch. All plans of a run share one.
    """

    def __init__(self, most_bytes: int = BATCH_CACHE_BYTES) -> None:
        self.lock, self._most_bytes = threading.Lock(), most_bytes
        self._arrays: dict[tuple[str, Region], Array] = {}
        self._info: PassInfo | None = None

    def get(self, key: tuple[str, Region], info: PassInfo) -> Array | None:
        """Return what was read of a box of a value; None if absent."""
        return self._arrays.get(key) if info == self._info else None

    def add(self, key: tuple[str, Region], info: PassInfo, array: Array) -> None:
        """Keep a copy if it is small, at the cost of what has been there longest."""
        if info != self._info:
            self._arrays, self._info = {}, info
        if array.nbytes > min(BATCH_CACHE_BYTES // 2, self._most_bytes):
            return
        room_bytes = self._most_bytes - array.nbytes
        while self._arrays and sum(a.nbytes for a in self._arrays.values()) > room_bytes:
            del self._arrays[next(iter(self._arrays))]
        self._arrays[key] = array.copy()


class Sources:
    """Everything a plan reads that is not a chunk."""

    def __init__(self, factored: Factored, feeds: Mapping[str, Feed], kept: Kept | None = None) -> None:
        self.factored, self.feeds, self._kept = factored, feeds, kept or Kept()

    def read(self, name: str, region: Region, info: PassInfo, out: Array) -> None:
        """Put a region of value ``name``, in its stored shape, into ``out``."""
        value = self.factored.graph.values[name]
        if value.role is Role.SCALAR:
            out[...] = info.scalars[name.rstrip(PRIME)]
        elif value.role is Role.SUM:
            out[...] = 0
        elif value.role is Role.CONSTANT:
            stored = self.factored.graph.constants[name].reshape(self.factored.shapes[name])
            out[...] = stored[as_slices(region)]
        elif value.role is Role.RANDOM:
            shape = self.factored.shapes[name]
            # The integers behind them take several times the memory of the numbers.
            for block in read_blocks(region, (1,) * len(shape), 8):
                out[within(block, region)] = uniform(info.seed, info.number, name, shape, block, value.dtype)
        else:
            with self._kept.lock:
                kept = self._kept.get((name, region), info)
                if kept is not None:
                    out[...] = kept
                    return
                for box, place in own_regions(self.factored.factors[name], region):
                    where: tuple[Any, ...] = (..., *place)  # a view for rank 0, too
                    self._rows(name, box, info, out[where])
                self._kept.add((name, region), info, out)

    def _rows(self, name: str, box: Region, info: PassInfo, out: Array) -> None:
        """A box of a batch: the rows of a batch may lie anywhere, and those of one chunk are read at once."""
        feed, rank = self.feeds[name], len(self.factored.graph.values[name].shape)
        squeeze = len(feed.reader.shape) == rank - 1
        inner = box[2:] if squeeze else box[1:]
        samples = [int(sample) for sample in info.indices[box[0][0] : box[0][1]]]
        # A region of stored factors has the elements of its box in the same order.
        rows = out.reshape((len(samples), *region_shape(inner)))
        if feed.stream is not None:
            for number, sample in enumerate(samples):
                feed.fill(sample, inner, info, rows[number])
            samples = []
        together = feed.reader.chunks[0]
        ordered = sorted(range(len(samples)), key=samples.__getitem__)
        for _, group in groupby(ordered, lambda number: samples[number] // max(together, 1)):
            numbers = list(group)
            first = samples[numbers[0]]
            for block in feed.parts(first, inner):
                with _decoding:
                    found = feed.reader.read(((first, samples[numbers[-1]] + 1), *block))
                for number in numbers:
                    one = found[samples[number] - first :][:1]
                    used = rows[(slice(number, number + 1), *within(block, inner))]
                    feed.put(one, used, ((samples[number], samples[number] + 1), *block))
        if not np.shares_memory(rows, out):  # pieces that do not lie side by side
            out[...] = rows.reshape(out.shape)


def _clear_around(block: Array, region: Region, own: Region) -> None:
    """Make zeros of what is around a sample, in a region of a view: as nnU-Net pads what is normalised."""
    for axis, ((low, high), (start, stop)) in enumerate(zip(region, own, strict=True)):
        lead = (slice(None),) * axis
        block[(*lead, slice(0, max(min(start, high) - low, 0)))] = 0
        block[(*lead, slice(max(stop - low, 0), None))] = 0


def read_blocks(
    box: Region, chunks: Shape, itemsize: int, most_chunks: int = READ_BLOCK_BYTES
) -> Iterator[Region]:
    """Parts of ``box`` that end where chunks do, each of about ``READ_BLOCK_BYTES`` or one chunk.

    What a reader decodes at once is memory that nobody has reserved.
    """
    steps, left = list(chunks), min(READ_BLOCK_BYTES // max(itemsize * prod(chunks), 1), most_chunks)
    for axis in reversed(range(len(steps))):
        extent = box[axis][1] - box[axis][0]
        times = max(min(left, -(-extent // max(steps[axis], 1))), 1)
        steps[axis] *= times
        left //= times
    starts = [
        [low, *range((low // step + 1) * step, high, step)]
        for (low, high), step in zip(box, steps, strict=True)
    ]
    for corner in product(*starts):
        yield tuple(
            (low, min((low // step + 1) * step, high))
            for low, step, (_, high) in zip(corner, steps, box, strict=True)
        )


def uniform(seed: int, number: int, name: str, shape: Shape, region: Region, dtype: str) -> Array:
    """Uniform numbers in [0, 1) by global index, of a seed, a pass and a name."""
    return draws.uniform(f"{seed}/{number}/{name}", shape, region).astype(dtype)
