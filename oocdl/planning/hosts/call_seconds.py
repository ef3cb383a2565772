"""Predicts the seconds of each call of a pass on one thread, where nothing is moved or spilled."""

from __future__ import annotations

from functools import partial

from oocdl.ops import RULES
from oocdl.planning.calls import CombineCall, UnitCall, made_of
from oocdl.planning.cost_model import NOMINAL, by_key, program_seconds
from oocdl.planning.task_graph import TaskGraph


def call_seconds(graph: TaskGraph) -> list[float]:
    """Return nominal seconds of calls on one thread, in the order of ``graph.calls``; 0 for picks."""
    seconds_of, found = by_key(partial(program_seconds, rules=RULES, rates=NOMINAL)), []
    for call in graph.calls:
        if isinstance(call, UnitCall):
            found.append(seconds_of(call.unit.program))
        elif isinstance(call, CombineCall):
            nbytes = sum(one.nbytes for one in made_of(call)) * len(call.counts)
            found.append(nbytes / NOMINAL.copy_bytes_per_second)
        else:
            found.append(0.0)
    return found
