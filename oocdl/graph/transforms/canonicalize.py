"""Rewrites before anything is cut: composite operators, peepholes, equal nodes, dead nodes.

After ``canonicalize`` every node's operator has an axis rule, no two nodes compute the same,
and each is needed by an output or an update. Names of outputs stay where they can: a
value that an output turned out to equal takes its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Graph, Node, Role, Shape, needed, renamed
from oocdl.graph.ir.index import Plain
from oocdl.graph.ir.op_rule import Builder, Rules


def canonicalize(graph: Graph, rules: Rules) -> Graph:
    """Return the simplified graph; ``outputs`` and ``updates`` keep their order and keys."""
    return _without_dead(_merged(_expanded(graph, rules), rules))


def _expanded(graph: Graph, rules: Rules) -> Graph:
    """Replace every node whose rule has ``expand``, until none has."""
    while any(rules[node.op].expand for node in graph.nodes):
        build = Builder(rules, graph)
        build.nodes = []
        names: dict[str, str] = {}
        for node in graph.nodes:
            rewrite = rules[node.op].expand
            if rewrite is None:
                build.nodes.append(node)
                continue
            build.role, build.scope = graph.values[node.outputs[0]].role, f"{node.name}/"
            start = len(build.nodes)
            results = rewrite(build, node)
            fresh = {name for new in build.nodes[start:] for name in new.outputs}
            kept: dict[str, str] = {}
            for old, result in zip(node.outputs, results, strict=True):
                if result in fresh and result not in kept:
                    # What makes the result takes the old name: nothing that reads it changes.
                    kept[result] = old
                    del build.values[result]
                else:
                    names[old] = kept.get(result, result)
            build.nodes[start:] = [renamed(new, kept) for new in build.nodes[start:]]
        graph = _substitute(build.graph(), names)
    return graph


def _resolve(name: str, names: Mapping[str, str]) -> str:
    while name in names:
        name = names[name]
    return name


def _reading(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node that reads ``names[x]`` wherever ``node`` reads ``x``."""
    if names.keys().isdisjoint(node.inputs):
        return node
    return replace(node, inputs=tuple(_resolve(name, names) for name in node.inputs))


def _substitute(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Return the graph with ``names[x]`` read wherever ``x`` was."""
    return replace(
        graph,
        nodes=tuple(_reading(node, names) for node in graph.nodes),
        outputs=tuple(_resolve(name, names) for name in graph.outputs),
        updates={key: _resolve(name, names) for key, name in graph.updates.items()},
    )


class _Merger:
    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.graph = graph
        self.rules = rules
        self.alias: dict[str, str] = {}
        self.producer: dict[str, Node] = {}
        self.seen: dict[tuple[object, ...], Node] = {}
        self.nodes: list[Node] = []
        constants: dict[tuple[object, ...], str] = {}
        for name, array in graph.constants.items():
            key = (array.dtype.name, array.shape, array.tobytes())
            first = constants.setdefault(key, name)
            if first != name:
                self.alias[name] = first

    def shape(self, name: str) -> Shape:
        return self.graph.values[name].shape

    def add(self, node: Node) -> None:
        """Keep, simplify or drop a node."""
        node = _reading(node, self.alias)
        if node.op == "Reshape":
            before = self.producer.get(node.inputs[0])
            if before is not None and before.op == "Reshape":
                node = replace(node, inputs=before.inputs)
        elif node.op == "Concat":  # of Concats: each part is copied once, not once for each of them
            parts = (self.parts_of(name, node.attrs["axis"]) for name in node.inputs)
            node = replace(node, inputs=tuple(chain.from_iterable(parts)))
        elif node.op != "Identity":
            node = self.without_expands(node)
        same = self.same_as(node)
        if same is not None:
            self.alias[node.outputs[0]] = same
            return
        key = (node.op, node.inputs, repr(sorted(node.attrs.items())) if node.attrs else "")
        first = self.seen.setdefault(key, node)
        if first is not node:
            self.alias.update(zip(node.outputs, first.outputs, strict=True))
            return
        self.nodes.append(node)
        self.producer.update(dict.fromkeys(node.outputs, node))

    def same_as(self, node: Node) -> str | None:
        """Return the operand that the node's output equals; None if the node computes something."""
        if node.op == "Identity":
            return node.inputs[0]
        shape = self.shape(node.outputs[0])
        if node.op in ("Reshape", "Expand") and self.shape(node.inputs[0]) == shape:
            return node.inputs[0]
        if node.op == "Mul":
            for name, other in (node.inputs, node.inputs[::-1]):
                if self.is_one(other) and self.shape(name) == shape:
                    return name
        return None

    def parts_of(self, name: str, axis: int) -> tuple[str, ...]:
        """Return the operands of the Concat along ``axis`` that makes ``name``; else ``name`` alone."""
        before = self.producer.get(name)
        if before is not None and before.op == "Concat" and before.attrs["axis"] == axis:
            return before.inputs
        return (name,)

    def is_one(self, name: str) -> bool:
        """Whether a value is the constant number 1, as the gradient of the loss is."""
        array = self.graph.constants.get(name)
        return array is not None and array.size == 1 and bool(array.item() == 1)

    def without_expands(self, node: Node) -> Node:
        """Read the source of an Expand where broadcasting does the same."""
        if not any(self.is_expand(name) for name in node.inputs) or not self.is_elementwise(node):
            return node
        for place, name in enumerate(node.inputs):
            if self.is_expand(name):
                inputs = list(node.inputs)
                inputs[place] = self.producer[name].inputs[0]
                if self.fits(node, inputs):
                    node = replace(node, inputs=tuple(inputs))
        return node

    def is_expand(self, name: str) -> bool:
        return name in self.producer and self.producer[name].op == "Expand"

    def fits(self, node: Node, inputs: Sequence[str]) -> bool:
        """Whether the outputs are the same with other inputs."""
        draft = replace(node, inputs=tuple(inputs))
        try:
            specs = self.rules[node.op].infer(draft, [self.graph.values[name] for name in inputs])
        except ModelError:
            return False
        made = [self.graph.values[name] for name in node.outputs]
        wanted = [(value.shape, value.dtype) for value in made]
        return [(tuple(shape), dtype) for shape, dtype in specs] == wanted

    def is_elementwise(self, node: Node) -> bool:
        """Whether each operand axis is the output's letter there, or is broadcast."""
        rule = self.rules[node.op].axes
        if rule is None or len(node.outputs) != 1:
            return False
        shapes = [self.shape(name) for name in node.inputs]
        axes = rule(node, shapes, [self.shape(node.outputs[0])])
        out = axes.outputs[0]
        return all(
            len(operand) <= len(out)
            and all(
                index is None or (isinstance(index, Plain) and index == letter)
                for index, letter in zip(operand, out[len(out) - len(operand) :], strict=True)
            )
            for operand in axes.inputs
        )


def _merged(graph: Graph, rules: Rules) -> Graph:
    """Apply peepholes, and eliminate common subexpressions."""
    merger = _Merger(graph, rules)
    for node in graph.nodes:
        merger.add(node)
    merged = _substitute(replace(graph, nodes=tuple(merger.nodes)), merger.alias)
    # An output that turned out to be another value gives that value its name.
    computed = {name for node in merged.nodes for name in node.outputs}
    names: dict[str, str] = {}
    for wanted, real in zip(graph.outputs, merged.outputs, strict=True):
        if wanted != real and real in computed and real not in names and real not in graph.outputs:
            names[real] = wanted
    if not names:
        return merged
    values = dict(merged.values)
    for real, wanted in names.items():
        values[wanted] = replace(values.pop(real), name=wanted)
    return replace(
        merged,
        values=values,
        nodes=tuple(renamed(node, names) for node in merged.nodes),
        outputs=tuple(names.get(name, name) for name in merged.outputs),
        updates={key: names.get(name, name) for key, name in merged.updates.items()},
    )


def _without_dead(graph: Graph) -> Graph:
    """Keep what outputs and updates need, and every declared value but constants and noise."""
    disposable = (Role.CONSTANT, Role.RANDOM, Role.ACTIVATION, Role.GRADIENT)
    return needed(graph, (name for name, value in graph.values.items() if value.role not in disposable))
