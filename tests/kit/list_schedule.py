"""How far a pass can be faster on more slots: its list schedule, as if memory and moving cost nothing.

Slots are the threads of all processes together. A ready call starts as soon as a slot is free, in the
plan's order. What comes out is a bound for any placement: a plan that is not cut enough shows here.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.planning.cost_model import call_seconds
from oocdl.planning.task_graph import TaskGraph


def ideal_seconds(graph: TaskGraph, slots: int) -> float:
    """Predicted seconds of a pass on ``slots`` threads, were nothing moved and were there memory for all."""
    seconds = call_seconds(graph.calls)
    number = {call.key: place for place, call in enumerate(graph.calls)}
    missing, readers = [0] * len(seconds), [list[int]() for _ in seconds]
    for place, call in enumerate(graph.calls):
        sources = call.arguments if isinstance(call, UnitCall | CombineCall) else (call.source,)
        for source in {number[key] for key in sources if key in number}:
            readers[source].append(place)
            missing[place] += 1
    ready = [place for place, count in enumerate(missing) if not count]
    heapify(ready)
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < slots:
            place = heappop(ready)
            heappush(running, (now + seconds[place], place))
        now, done = heappop(running)
        for reader in readers[done]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    return now
