"""Combines partial results, on the host or on the engine's device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from oocdl.engines.engine import Device, combine
from oocdl.graph.ir.graph import Array
from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.runtime.on_device import Devices, on_device
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.cache.memory_tier import Reservation


def combined(
    held: Reservation, device: Device | None, call: CombineCall, chunks: Sequence[Chunk]
) -> tuple[list[Array], Devices]:
    """Combine partial sums, one after the other."""
    width = len(call.values)
    if device is None:
        return _combined_on_host(held, call, chunks), [None] * width
    there = [on_device(device, chunk, partial(copied, held, chunk)) for chunk in chunks]
    total = [held.empty(chunk.shape, chunk.dtype) for chunk in chunks[:width]]
    groups = [there[start : start + width] for start in range(0, len(there), width)]
    return total, [*device.combine(call.combine, groups, call.counts, total)]


def _combined_on_host(held: Reservation, call: CombineCall, chunks: Sequence[Chunk]) -> list[Array]:
    """The same with NumPy; one of the others is in memory at a time."""
    width = len(call.values)
    total, count = [copied(held, chunk) for chunk in chunks[:width]], call.counts[0]
    for other, elements in enumerate(call.counts[1:], 1):
        others = chunks[other * width : (other + 1) * width]
        arrays = [_in_place_or_copied(held, chunk) for chunk in others]
        combine(np, call.combine, total, count, arrays, elements)
        count += elements
        del arrays  # before the next are read
    return total


def add_partial_sums(
    held: Reservation,
    device: Device | None,
    call: UnitCall,
    results: list[Array],
    devices: Devices,
    chunks: Sequence[Chunk],
) -> None:
    """Add the partial sums so far to the unit's own partial results."""
    end = 0
    for index, (how, partial_sum) in enumerate(zip(call.combines, call.partial_sums, strict=True)):
        if partial_sum is None or index < end:
            continue
        assert how is not None
        # Mean and variance of one node stand side by side, and are combined together.
        end = index + (2 if how == "moments" else 1)
        before = [chunks[found[0]] for found in call.partial_sums[index:end] if found is not None]
        counts, own = (partial_sum[1], call.unit.counts[index]), results[index:end]
        if device is None:
            total = [copied(held, chunk) for chunk in before]
            combine(np, how, total, counts[0], own, counts[1])
        else:
            there = [on_device(device, chunk, partial(copied, held, chunk)) for chunk in before]
            new = [x.hold() for x in devices[index:end] if x is not None]
            groups = there, [array if x is None else x for x, array in zip(new, own, strict=True)]
            # Not in the arrays of its own results, which may still be on their way there.
            total = [held.empty(chunk.shape, chunk.dtype) for chunk in before]
            devices[index:end] = device.combine(how, groups, counts, total)
        results[index:end] = total


def copied(held: Reservation, chunk: Chunk) -> Array:
    """All of a chunk, in reserved memory."""
    out = held.empty(chunk.shape, chunk.dtype, chunk.order)
    chunk.read(chunk.region, out)
    return out


def _in_place_or_copied(held: Reservation, chunk: Chunk) -> Array:
    """All of a chunk, to be read only."""
    lent = held.lend(chunk)
    return copied(held, chunk) if lent is None else lent
