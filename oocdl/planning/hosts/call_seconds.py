"""Predicts the seconds of each call of a pass on one thread, where nothing is moved or spilled."""

from __future__ import annotations

from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program import Program
from oocdl.planning.calls import CombineCall, UnitCall, made_of
from oocdl.planning.cost_model import Rates, program_seconds
from oocdl.planning.task_graph import TaskGraph


def call_seconds(graph: TaskGraph, rates: Rates, rules: Rules) -> list[float]:
    """Return the predicted seconds of calls on one thread, in the order of ``graph.calls``; 0 for picks."""
    known: dict[Program, float] = {}
    found = []
    for call in graph.calls:
        if isinstance(call, UnitCall):
            program = call.unit.program
            if program not in known:
                known[program] = program_seconds(program, rules, rates)
            found.append(known[program])
        elif isinstance(call, CombineCall):
            nbytes = sum(one.nbytes for one in made_of(call)) * len(call.counts)
            found.append(nbytes / rates.copy_bytes_per_second)
        else:
            found.append(0.0)
    return found
