"""Weights and state between the run store and chunks: streamed, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, TypeVar

import numpy as np

from oocdl.errors import NonFiniteError
from oocdl.graph.ir.array_layout import footprint, itemsize
from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.index import (
    BLOCK_BYTES,
    Region,
    as_slices,
    contiguous_blocks,
    region_shape,
    region_size,
    whole,
)
from oocdl.graph.transforms.factorize import Factored, Factors
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.task_key import TaskKey, stored_key
from oocdl.runtime.inputs import own_regions
from oocdl.storage.cache.chunk import Chunk, home
from oocdl.storage.cache.memory_tier import Tier
from oocdl.storage.files import part_of
from oocdl.storage.run.commit import Commit
from oocdl.storage.run.manifest import Kind, TensorSpec
from oocdl.storage.run.run_store import RunStore

T = TypeVar("T")
Read = Callable[[str, Region, Array], object]
"""(name, region of its own axes, array to fill): takes at most ``READ_COPIES`` blocks beside the array."""
Pieces = Mapping[str, Sequence[Region]]
"""Weight or state -> the regions that it is stored in."""
READ_COPIES = 3
"""Copies of a block of a model's file while it is read: as stored, which of it is finite, and converted."""


def initial(compiled: CompiledPass) -> Read:
    """The contents of the model file, read block by block; optimizer state starts as its number or weight."""
    weights = compiled.imported.weights

    def read(name: str, region: Region, out: Array) -> None:
        start = name if name in weights else compiled.starts.get(name, 0.0)
        if not isinstance(start, str):
            out[...] = start
            return
        for block in contiguous_blocks(region, out.itemsize):
            part_of(out, block, region)[...] = weights[start].read(block)

    return read


def _read_piece(factors: Factors, read: Read, name: str, region: Region, array: Array) -> None:
    """Fill ``array`` with a piece, box by box, where each belongs."""
    for box, place in own_regions(factors, region):
        view: tuple[Any, ...] = (..., *place)  # also of a scalar
        part = array[view]
        target = part.reshape(region_shape(box))
        read(name, box, target)
        if not np.may_share_memory(target, array):  # its axes lie apart: it was a copy
            part[...] = target.reshape(part.shape)


def _beside_bytes(factors: Factors, region: Region, nbytes: int) -> int:
    """Return the bytes that filling a piece of ``nbytes`` takes: blocks read, a box whose axes lie apart."""
    boxes = own_regions(factors, region)
    largest = max(region_size(box) for box, _ in boxes) / max(region_size(region), 1)
    return READ_COPIES * min(nbytes, BLOCK_BYTES) + (ceil(largest * nbytes) if len(boxes) > 1 else 0)


def load(
    pieces: Pieces, factored: Factored, read: Read, tier: Tier, wanted: Collection[TaskKey] | None = None
) -> dict[TaskKey, Chunk]:
    """Chunks of weights and state that a step starts from, never more in RAM than the tier has.

    Each is read to where it stays: there is never a second copy of a piece. ``wanted`` are the keys of
    those to read; None: all.
    """
    held: dict[TaskKey, Chunk] = {}
    for name, regions in pieces.items():
        dtype, factors = factored.graph.values[name].dtype, factored.factors[name]
        for number, region in enumerate(regions):
            key = stored_key(name, number)
            if wanted is not None and key not in wanted:
                continue
            nbytes = region_size(region) * itemsize(dtype)
            beside = _beside_bytes(factors, region, nbytes)
            with tier.reserve(footprint(nbytes), [], beside) as reserved:
                array = reserved.empty(region_shape(region), dtype)
                _read_piece(factors, read, name, region, array)
                held[key] = reserved.put(array, region, ())
    return held


def read_piece(pieces: Pieces, factored: Factored, read: Read, key: TaskKey) -> Chunk | None:
    """One piece of weights or state in plain memory; None if the run does not store it (it is a sum)."""
    if key.value not in pieces:
        return None
    region = pieces[key.value][key.number]
    array: Array = np.empty(region_shape(region), factored.graph.values[key.value].dtype)
    _read_piece(factored.factors[key.value], read, key.value, region, array)
    return home().adopt(array, region, ())


@contextmanager
def new_version(store: RunStore, compiled: CompiledPass, meta: Mapping[str, object]) -> Iterator[Commit]:
    """Write a version of a run; nothing of it is there if that fails."""
    writing = store.begin(store.version_of(meta), specs(compiled))
    try:
        yield writing
    except BaseException:
        writing.abort()
        raise
    writing.finish(meta)


def write_initial(store: RunStore, compiled: CompiledPass, meta: Mapping[str, object]) -> None:
    """Write the contents of the model file as the first version of a run, a piece at a time."""
    factored, read = compiled.plan.factored, initial(compiled)
    with new_version(store, compiled, meta) as writing:
        for spec in specs(compiled):
            regions, factors = compiled.pieces[spec.name], factored.factors[spec.name]
            boxes = [box for region in regions for box, _ in own_regions(factors, region)]
            for box in boxes if by_piece(spec, regions) else [whole(spec.shape)]:
                array: Array = np.empty(region_shape(box), spec.dtype)
                read(spec.name, box, array)
                writing.write(spec.name, box, array)


def after_pass(
    factored: Factored,
    replaced: Mapping[TaskKey, TaskKey],
    made: Mapping[TaskKey, T],
    held: Mapping[TaskKey, T],
) -> dict[TaskKey, T]:
    """Return what the next pass starts from: the updates that this pass made, the rest as it was.

    Sums of gradients that this pass did not make anew are used up.
    """
    sums = {value.name for value in factored.graph.of_role(Role.SUM)}
    new = {key: chunk for key, chunk in held.items() if key.value not in sums}
    return new | {stored: made[key] for stored, key in replaced.items()}


def specs(compiled: CompiledPass) -> list[TensorSpec]:
    """Return how the run stores weights and state: one Zarr chunk a piece where pieces are regular."""
    factored = compiled.plan.factored
    found = []
    for name, regions in compiled.pieces.items():
        value = factored.graph.values[name]
        # Running statistics are in the model file, so they are exported and shown with the weights.
        kind: Kind = "weights" if name in compiled.imported.weights else "state"
        found.append(TensorSpec(name, kind, value.shape, value.dtype, chunks_of(compiled, name, regions)))
    return found


def chunks_of(compiled: CompiledPass, name: str, regions: Sequence[Region]) -> tuple[int, ...]:
    """The shape of the first piece if all pieces lie on its grid, else the whole array."""
    factored = compiled.plan.factored
    shape = factored.graph.values[name].shape
    boxes = [own_regions(factored.factors[name], region) for region in regions]
    if all(len(box) == 1 for box in boxes):
        first = region_shape(min(box[0][0] for box in boxes))
        regular = all(
            start % size == 0 and (stop - start == size or stop == extent)
            for box in boxes
            for (start, stop), size, extent in zip(box[0][0], first, shape, strict=True)
        )
        if regular:
            return tuple(max(size, 1) for size in first)
    return tuple(max(extent, 1) for extent in shape)


def by_piece(spec: TensorSpec, regions: Sequence[Region]) -> bool:
    """Whether pieces are whole chunks of the stored array."""
    return len(regions) == 1 or spec.chunks != tuple(max(extent, 1) for extent in spec.shape)


def boxes_of(
    compiled: CompiledPass, values: Mapping[str, str], stored: str, region: Region, array: Array
) -> Iterator[tuple[str, Region, Array]]:
    """Yield the boxes that a piece of a ``stored`` value has of some ``values``, which have titles.

    Each is a title, the region of the value's own axes, and what stands there.
    """
    factored = compiled.plan.factored
    for title, name in values.items():
        if factored.stored(name) == stored:
            for box, place in own_regions(factored.factors[name], region):
                yield title, box, array[place].reshape(region_shape(box))


def box_of(factored: Factored, name: str, region: Region, array: Array) -> tuple[Region, Array]:
    """Return where a piece of one box stands in the stored array, and what stands there, which is checked."""
    ((box, place),) = own_regions(factored.factors[name], region)
    part = array[place].reshape(region_shape(box))
    if name in factored.graph.updates:
        check_finite(name, part)
    return box, part


def write_whole(
    writing: Commit, factored: Factored, spec: TensorSpec, pieces: Iterable[tuple[Region, Array]], full: Array
) -> None:
    """Put all pieces of an array together in ``full``, check it, and write it."""
    for region, array in pieces:
        for box, place in own_regions(factored.factors[spec.name], region):
            full[as_slices(box)] = array[place].reshape(region_shape(box))
    if spec.name in factored.graph.updates:
        check_finite(spec.name, full)
    writing.write(spec.name, whole(spec.shape), full)


def check_finite(name: str, array: Array) -> None:
    """A NaN in a weight is never committed: whoever resumes would train on it."""
    if array.dtype.kind != "f":
        return
    with np.errstate(invalid="ignore", over="ignore"):
        # The sum in float64 needs no temporary array, and is finite if all of float32 is.
        total = np.add.reduce(array, axis=None, dtype=np.float64)
    if not np.isfinite(total):
        raise NonFiniteError(
            f"array '{name}' has become NaN or infinite; the run stays at its last commit; lower the "
            "learning rate, or clip gradients with clip_norm"
        )


def commit(
    store: RunStore,
    compiled: CompiledPass,
    held: Mapping[TaskKey, Chunk],
    tier: Tier,
    meta: Mapping[str, object],
) -> None:
    """Write all weights and state as one new version of the run."""
    factored = compiled.plan.factored
    with new_version(store, compiled, meta) as writing:
        for spec in specs(compiled):
            regions = compiled.pieces[spec.name]
            chunks = [held[stored_key(spec.name, number)] for number in range(len(regions))]
            if by_piece(spec, regions):
                for chunk, region in zip(chunks, regions, strict=True):
                    with tier.reserve(0, [chunk]):
                        writing.write(spec.name, *box_of(factored, spec.name, region, chunk.array()))
                continue
            size = int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
            with tier.reserve(footprint(size), chunks) as reserved:
                pieces = ((region, chunk.array()) for region, chunk in zip(regions, chunks, strict=True))
                write_whole(writing, factored, spec, pieces, reserved.empty(spec.shape, spec.dtype))
