"""Run a unit on a device: inputs are there already, or come from chunks in RAM or from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oocdl.engines.engine import Device, Part
from oocdl.graph.ir.array_layout import DeviceArray
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import is_empty, region_shape, within
from oocdl.ops import RULES
from oocdl.planning.calls import Read, UnitCall, in_place
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.cache.memory_tier import Reservation


@dataclass(frozen=True, eq=False)
class Origins:
    """Tells where a unit's inputs come from, and holds the memory for those that are put together."""

    held: Reservation
    chunks: Sequence[Chunk]
    source: Callable[[Read], Array]
    """Reads an input that comes from no chunk."""


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


def gather_on_device(origins: Origins, device: Device, call: UnitCall, there: There) -> Begin:
    """Gather the inputs of a unit; the function that is returned begins its program."""
    inputs = [_parts(origins, device, read, there) for read in call.reads]
    return lambda results: [*device.run(call.unit.program, RULES, inputs, results)]


def _parts(origins: Origins, device: Device, read: Read, there: There) -> list[Part]:
    """The parts of one input, each on the device or in RAM."""
    piece = in_place(read, origins.chunks)
    if piece is not None:
        found = there.get(read.first)
        return [Part(on_device(device, piece, piece.array) if found is None else found)]
    if not read.parts:
        return [Part(origins.source(read))]
    parts, block = [], None
    for number, region in read.chunks:
        if is_empty(region):
            continue
        place, chunk = within(region, read.region), origins.chunks[number]
        if number in there:
            parts.append(Part(there[number], within(region, chunk.region), place))
            continue
        if block is None:
            block = origins.held.empty(region_shape(read.region), read.dtype)
        chunk.read(region, block[place])
        parts.append(Part(block[place], (), place))
    return parts
