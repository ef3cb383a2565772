"""What a host has to do in a simulated pass, as a crew's member has it: tasks, and what they make or get."""

from __future__ import annotations

from dataclasses import dataclass

from oocdl.graph.ir.index import Region, region_size
from oocdl.planning.calls import CombineCall, PickCall, made_of
from oocdl.planning.hosts.exchange import Bundle, Exchange
from oocdl.planning.hosts.local_order import LocalOrder
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.simulation.tasks import Entry
from oocdl.planning.task_key import TaskKey, result_key


@dataclass(frozen=True, slots=True)
class Item:
    """A chunk that may travel."""

    region: Region
    nbytes: int


def items_of(exchange: Exchange) -> dict[TaskKey, Item]:
    """All that bundles may hold, and all that is stored, by key."""
    graph = exchange.graph
    regions = {key: region for pieces in graph.pieces.values() for region, key in pieces}
    found = {key: Item(regions[key], graph.input_bytes[key]) for key in graph.inputs}
    for call in graph.calls:
        if isinstance(call, PickCall):
            continue
        made = made_of(call)
        names = call.values if isinstance(call, CombineCall) else [name for name, _ in call.unit.makes]
        for name, one in zip(names, made, strict=True):
            found[result_key(call.key, name, len(names))] = Item(one.region, one.nbytes)
    for strip in exchange.placed.strips:
        whole = found[strip.source]
        share = region_size(strip.region) / region_size(whole.region)
        found[strip.key] = Item(strip.region, round(share * whole.nbytes))
    return found


def entries_of(order: LocalOrder) -> list[tuple[TaskKey, Entry]]:
    """The tasks of a host by key."""
    entries: list[tuple[TaskKey, Entry]] = [(key, None) for key in order.stored]
    for step in order.steps:
        if isinstance(step, TaskKey):
            entries.append((step, None))
        elif isinstance(step, Strip | Bundle):
            entries.append((step.key, step))
        else:
            entries.append((step[1].key, step[1]))
    return entries
