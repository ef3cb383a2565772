"""A pass over several workers as objects: its calls and strips, and who makes them."""

from __future__ import annotations

import numpy as np

from oocdl.planning.calls import Call
from oocdl.planning.hosts.placement import Placed, Strip, strip_key, with_strips
from oocdl.planning.task_key import TaskKey


def calls_of(placed: Placed) -> list[tuple[int, Call]]:
    """Calls with their numbers in the task graph, arguments replaced by strips where those are read."""
    flat, arguments, strips = placed.flat, placed.strip_arguments, placed.strip_of.tolist()
    bounds = np.searchsorted(arguments, flat.first).tolist()
    found = []
    for number, call in enumerate(placed.graph.calls):
        mine = slice(*bounds[number : number + 2])
        own = (arguments[mine] - flat.first[number]).tolist()
        found.append((number, with_strips(call, own, strips[mine])))
    return found


def strips_of(placed: Placed) -> tuple[Strip, ...]:
    """All strips."""
    flat, reads = placed.flat, placed.strip_reads
    columns = flat.source[reads].tolist(), flat.part[reads].tolist()
    found = ((flat.keys[source], flat.regions[part]) for source, part in zip(*columns, strict=True))
    return tuple(Strip(strip_key(n, source), source, region) for n, (source, region) in enumerate(found))


def worker_of(placed: Placed) -> dict[TaskKey, int]:
    """Key of a call or a strip -> number of the worker it is made on."""
    workers = placed.workers.tolist()
    found = {call.key: worker for call, worker in zip(placed.graph.calls, workers, strict=True)}
    return found | {strip.key: found[strip.source] for strip in strips_of(placed)}
