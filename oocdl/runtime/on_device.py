"""Run a unit on a device: inputs are there already, or come from chunks in RAM or from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oocdl.engines.engine import Device, Part
from oocdl.graph.ir.array_layout import DeviceArray
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import is_empty, region_shape, within
from oocdl.ops import RULES
from oocdl.planning.calls import Read, UnitCall, in_place
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.cache.memory_tier import Reservation

There = Mapping[int, Any]
"""Number of a chunk -> what keeps it on the device while this is referred to."""
Devices = list[DeviceArray | None]
"""For each result the array on a device that its array waits for; None if that has been filled."""
Begin = Callable[[Sequence[Array]], Devices]
"""Runs a unit's program, or begins to, with the results in these arrays."""


def held_on_device(chunks: Sequence[Chunk]) -> There:
    """Return what of these chunks is on the device."""
    found = ((number, chunk.on_device()) for number, chunk in enumerate(chunks))
    return {number: there for number, there in found if there is not None}


def on_device(device: Device, chunk: Chunk, array: Callable[[], Array]) -> Any:
    """Return what keeps a chunk on the device, where it is sent if need be; ``array`` returns all of it."""
    there = chunk.on_device()
    while there is None:  # another thread may want the room at once
        chunk.slot.device = device.keep(array())
        there = chunk.on_device()
    return there


def gather_on_device(
    held: Reservation,
    device: Device,
    call: UnitCall,
    chunks: Sequence[Chunk],
    there: There,
    source: Callable[[Read], Array],
) -> Begin:
    """Gather what a unit's inputs are made of; the function that is returned begins its program."""
    inputs = [_parts(held, device, read, chunks, there, source) for read in call.reads]
    return lambda results: [*device.run(call.unit.program, RULES, inputs, results)]


def _parts(
    held: Reservation,
    device: Device,
    read: Read,
    chunks: Sequence[Chunk],
    there: There,
    source: Callable[[Read], Array],
) -> list[Part]:
    """The parts of one input, each on the device or in RAM."""
    piece = in_place(read, chunks)
    if piece is not None:
        found = there.get(read.first)
        return [Part(on_device(device, piece, piece.array) if found is None else found)]
    if not read.parts:
        return [Part(source(read))]
    parts, block = [], None
    for number, region in read.chunks:
        if is_empty(region):
            continue
        place, chunk = within(region, read.region), chunks[number]
        if number in there:
            parts.append(Part(there[number], within(region, chunk.region), place))
            continue
        if block is None:
            block = held.empty(region_shape(read.region), read.dtype)
        chunk.read(region, block[place])
        parts.append(Part(block[place], (), place))
    return parts
