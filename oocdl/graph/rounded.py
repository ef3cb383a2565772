"""16-bit storage: values that go from layer to layer are rounded to bfloat16 on their way.

A stored value ``v`` becomes ``v/bfloat16``, a Cast of it, and what read ``v`` reads a Cast back.
Both casts are cheap nodes as any other: the first is an epilogue of the layer that makes ``v``,
the second a prologue of those that read it, and only the 16 bits between them are stored. Every
reader gets the rounded value, so results do not depend on what is spilled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from oocdl.graph.ir import Graph, Node, Role, Value
from oocdl.graph.traffic import Layer

STORED = "bfloat16"
LEAST_BYTES = 1 << 16
"""Smaller values (statistics, biases' gradients) stay as they are."""


def roundable(graph: Graph, layers: Iterable[Layer]) -> frozenset[str]:
    """Stored values that may be rounded: large activations, and gradients of such."""
    results = {*graph.outputs, *graph.updates.values()}
    found = set()
    for layer in layers:
        for name in layer.stores:
            value = graph.values[name]
            inner = value.role in (Role.ACTIVATION, Role.GRADIENT) and name not in results
            if inner and value.dtype == "float32" and value.nbytes >= LEAST_BYTES:
                found.add(name)
    return frozenset(found)


def rounded(graph: Graph, names: Collection[str]) -> Graph:
    """``graph``, where each of ``names`` is rounded to bfloat16 for all that read it."""
    values = dict(graph.values)
    read = {name: f"{name}/rounded" for name in names}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(replace(node, inputs=tuple(read.get(name, name) for name in node.inputs)))
        for name in node.outputs:
            if name in read:
                stored, back = f"{name}/{STORED}", read[name]
                values[stored] = Value(stored, values[name].shape, STORED, values[name].role)
                values[back] = replace(values[name], name=back)
                nodes.append(Node(stored, "Cast", (name,), (stored,), {"to": STORED}))
                nodes.append(Node(back, "Cast", (stored,), (back,), {"to": values[name].dtype}))
    return replace(graph, values=values, nodes=tuple(nodes))
