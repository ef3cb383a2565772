"""How much of a step is alive at once: what RAM and spill together have to hold."""

from __future__ import annotations

from collections.abc import Iterator

from oocdl.graph.axes import region_size
from oocdl.graph.cost import itemsize
from oocdl.graph.plan import StepPlan
from oocdl.graph.step import PickCall, StepGraph, UnitCall


def live_bytes(plan: StepPlan, graph: StepGraph, chunk_bytes: int) -> int:
    """The most bytes of chunks that are alive at any position of the plan's order.

    Weights and state that the step starts from live until it is over: only then they are
    replaced. ``chunk_bytes`` is added for each chunk, for what storing it costs beside its data.
    """
    values = plan.factored.graph.values
    start = set(graph.inputs)
    held = sum(
        region_size(region) * itemsize(values[name].dtype) + chunk_bytes
        for name, pieces in graph.pieces.items()
        for region, key in pieces
        if key in start
    )
    end = max((call.position for call in graph.calls if not isinstance(call, PickCall)), default=0)
    change = [0] * (end + 2)
    for born, dies, size in _lives(plan, graph, end):
        change[born] += size + chunk_bytes
        change[dies + 1] -= size + chunk_bytes
    most = now = 0
    for step in change:
        now += step
        most = max(most, now)
    return held + most


def _lives(plan: StepPlan, graph: StepGraph, end: int) -> Iterator[tuple[int, int, int]]:
    """(first position, last position, bytes) of everything that the calls make."""
    values = plan.factored.graph.values
    kept = set(graph.outputs)
    stays = {name for name, pieces in graph.pieces.items() if any(key in kept for _, key in pieces)}
    for call in graph.calls:
        if isinstance(call, PickCall):
            continue
        makes = call.unit.makes if isinstance(call, UnitCall) else [(n, call.region) for n in call.values]
        for (name, region), uses in zip(makes, call.uses, strict=True):
            last = end if name in stays else max(uses, default=call.position)
            yield call.position, last, region_size(region) * itemsize(values[name].dtype)
