"""Prints the graph of a pass: values and nodes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from oocdl.graph.ir.graph import Node
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.pass_plan import LayerPlan
from oocdl.report.printer.notation import (
    MOST_NUMBERS,
    aligned,
    attribute_text,
    attributes_text,
    name_text,
    noted,
    order_text,
    title_text,
    type_text,
)


def graph_lines(factored: Factored) -> list[str]:
    """Print the values that are given, the nodes in order, outputs, and what replaces weights and state."""
    graph = factored.graph
    made = {name for node in graph.nodes for name in node.outputs}
    lines = [f"{len(graph.values)} values, {len(graph.nodes)} nodes", "", "given"]
    lines += _given_lines(factored, [name for name in graph.values if name not in made])
    for role, nodes in groupby(graph.nodes, lambda node: graph.values[node.outputs[0]].role):
        lines += ["", f"made: {role}", *aligned([_node_row(factored, node) for node in nodes])]
    lines += ["", "outputs", *(f"    {name_text(name)}" for name in graph.outputs)]
    updates = [(name_text(name), f"<- {name_text(new)}") for name, new in graph.updates.items()]
    return [*lines, "", "updates", *aligned(updates)]


def layer_graph_lines(factored: Factored, planned: LayerPlan) -> list[str]:
    """Print what a layer reads, and its nodes in order; nodes whose values leave it are marked."""
    layer = planned.layer
    leaving = dict.fromkeys(layer.stores, "stored") | dict.fromkeys(layer.partials, "partial result")
    rows = [
        _node_row(factored, cell.node, [leaving.get(view.value, "") for view in cell.outputs])
        for cell in layer.cells
    ]
    given = _given_lines(factored, layer.reads)
    return [title_text(planned), "", "given", *given, "", "made", *aligned(rows)]


def _given_lines(factored: Factored, names: Iterable[str]) -> list[str]:
    found = [factored.graph.values[name] for name in names]
    return aligned(
        [
            (
                name_text(value.name),
                type_text(value.dtype, value.shape),
                noted(value.role, [_storage_text(factored, value.name), _numbers(factored, value.name)]),
            )
            for value in found
        ]
    )


def _node_row(factored: Factored, node: Node, notes: Iterable[str] = ()) -> tuple[str, str, str]:
    values = [factored.graph.values[name] for name in node.outputs]
    call = f"= {node.op}({', '.join(map(name_text, node.inputs))}){attributes_text(node.attrs)}"
    storage = (_storage_text(factored, name) for name in node.outputs)
    return (
        ", ".join(name_text(value.name) for value in values),
        ", ".join(type_text(value.dtype, value.shape) for value in values),
        noted(call, [*notes, *storage]),
    )


def _numbers(factored: Factored, name: str) -> str:
    """Print the numbers of a small constant; nothing for other values."""
    array = factored.graph.constants.get(name)
    if array is None or array.size > MOST_NUMBERS:
        return ""
    return attribute_text(tuple(array.ravel()) if array.ndim else array[()])


def _storage_text(factored: Factored, name: str) -> str:
    """Print how a value is stored, where its shape does not say it."""
    stored, shape = factored.alias.get(name, name), factored.graph.values[name].shape
    notes = []
    if stored != name:
        notes.append(f"stored as {name_text(stored)}")
    elif factored.shapes[name] != shape:
        notes.append(f"stored as ({','.join(map(str, factored.shapes[name]))})")
    notes.append(order_text(factored.orders.get(name, ())))
    return ", ".join(note for note in notes if note)
