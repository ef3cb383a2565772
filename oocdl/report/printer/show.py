"""Chooses what is printed of a pass, and of which layers."""

from __future__ import annotations

import difflib
from typing import Literal, get_args

from oocdl.errors import InputError
from oocdl.planning.pass_plan import LayerPlan, PassPlan
from oocdl.planning.task_graph import TaskGraph
from oocdl.report.printer.views import (
    graph_lines,
    layer_graph_lines,
    layer_lines,
    layer_task_lines,
    program_lines,
    task_lines,
)

What = Literal["graph", "layers", "program", "tasks"]
"""The texts that there are of a pass."""


def pass_text(plan: PassPlan, graph: TaskGraph, what: What, layer: str | int | None = None) -> str:
    """Print a pass: all its layers, or one that is given by its name or index.

    Raises InputError where there is no such text or layer.
    """
    if what not in get_args(What):
        raise InputError(f"show takes {', '.join(get_args(What))}; got '{what}'")
    if layer is None and what == "graph":
        blocks = [graph_lines(plan.factored)]
    elif layer is None and what == "tasks":
        blocks = [task_lines(plan, graph)]
    else:
        chosen = plan.layers if layer is None else (find_layer(plan, str(layer)),)
        blocks = [_layer_lines(plan, graph, what, planned) for planned in chosen]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _layer_lines(plan: PassPlan, graph: TaskGraph, what: What, planned: LayerPlan) -> list[str]:
    if what == "graph":
        return layer_graph_lines(plan.factored, planned)
    if what == "layers":
        return layer_lines(plan, planned)
    return program_lines(planned) if what == "program" else layer_task_lines(plan, graph, planned)


def find_layer(plan: PassPlan, wanted: str) -> LayerPlan:
    """Find a layer by its name or, where none has that name, by its index.

    Raises InputError, which lists close names, if there is none.
    """
    for planned in plan.layers:
        if planned.layer.name == wanted:
            return planned
    if wanted.isascii() and wanted.isdecimal() and int(wanted) < len(plan.layers):
        return plan.layers[int(wanted)]
    near = difflib.get_close_matches(wanted, [planned.layer.name for planned in plan.layers])
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else "--show layers lists them"
    raise InputError(f"there is no layer '{wanted}' among layers 0 to {len(plan.layers) - 1}; {hint}")
