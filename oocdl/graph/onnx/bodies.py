"""Walks the nodes of a model and of its bodies, writes out its functions, and moves its final activation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace

import onnx
from onnx import inliner
from onnx.checker import ValidationError

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import normalize_axis
from oocdl.graph.onnx.bounds import MOST_CALLS, MOST_INLINED_BYTES, MOST_NODES
from oocdl.graph.onnx.model_file import Body, OnnxNode, label, shown


def bodies(node: OnnxNode) -> list[Body]:
    """Return the graphs that are attributes of a node."""
    return [held for held in node.attrs.values() if isinstance(held, Body)]


def every_node(nodes: Iterable[OnnxNode]) -> Iterator[OnnxNode]:
    """Yield nodes and, after each, those of its bodies."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from every_node(body.nodes)


def owners(nodes: Iterable[OnnxNode], names: Iterable[str]) -> dict[str, str]:
    """Return each of ``names`` by itself, and by all that Identity nodes call it."""
    # Of a norm that is called twice, PyTorch's dynamo exporter gives the second its statistics so.
    owner = {name: name for name in names}
    for node in every_node(nodes):
        if node.op == "Identity" and node.inputs[0] in owner:
            owner[node.outputs[0]] = owner[node.inputs[0]]
    return owner


def results_of_bodies(nodes: Iterable[OnnxNode]) -> frozenset[str]:
    """Return the names that any body hands to its node."""
    return frozenset(name for node in every_node(nodes) for body in bodies(node) for name in body.outputs)


def without_functions(model: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
    """Write out the model's own functions where they are called, but for those in ``kept``, by operator.

    Raises ModelError if they make too much of the model, or cannot be written out.
    """
    if not model.functions:
        return model
    count, nbytes, _ = _Calls(model.functions).of(model.graph.node, 0)
    if count > MOST_NODES or nbytes > MOST_INLINED_BYTES:
        raise ModelError(
            f"the model's functions, written out where they are called, make {count} nodes of "
            f"{nbytes >> 20} MiB of it; at most {MOST_NODES} and {MOST_INLINED_BYTES >> 20} MiB are read"
        )
    spared = [(item.domain, item.name) for item in model.functions if f"{item.domain}::{item.name}" in kept]
    try:
        return inliner.inline_selected_functions(model, spared, exclude=True)
    except (RuntimeError, ValidationError) as error:  # of its C++, which checks opsets and references
        raise ModelError(f"the model's functions cannot be written out: {error}") from None


class _Calls:
    """Counts nodes with those of the functions that they call."""

    def __init__(self, functions: Iterable[onnx.FunctionProto]) -> None:
        self.functions = {(item.domain, item.name, item.overload): item for item in functions}
        self.known: dict[tuple[str, str, str], tuple[int, int, int]] = {}

    def of(self, nodes: Sequence[onnx.NodeProto], depth: int) -> tuple[int, int, int]:
        """Return nodes, those of functions as bytes, and how deep calls are; ``depth``: that of ``nodes``."""
        count, nbytes, deepest = 0, 0, 0
        for index, node in enumerate(nodes):
            called = (node.domain, node.op_type, node.overload) in self.functions
            found = self._called(node, index, depth + 1) if called else (1, node.ByteSize() * bool(depth), 0)
            for more in (found, *(self.of(graph.node, depth) for graph in graphs(node))):
                count, nbytes, deepest = count + more[0], nbytes + more[1], max(deepest, more[2])
        return count, nbytes, deepest

    def _called(self, node: onnx.NodeProto, index: int, depth: int) -> tuple[int, int, int]:
        key = (node.domain, node.op_type, node.overload)
        function = self.functions[key]
        if len(node.input) > len(function.input) or len(node.output) > len(function.output):
            given = f"{len(node.input)} inputs and {len(node.output)} outputs"
            raise ModelError(f"node {shown(label(node, index))} calls {shown(key[1])} with {given}: too many")
        if key not in self.known and depth <= MOST_CALLS:
            count, nbytes, deepest = self.of(function.node, depth)
            self.known[key] = count, nbytes, deepest + 1
        if depth > MOST_CALLS or depth + self.known[key][2] - 1 > MOST_CALLS:
            why = f"calls itself, or more than {MOST_CALLS} stand in one another"
            raise ModelError(f"function {shown(key[1])} {why}")
        return self.known[key]


def graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that are attributes of a node of a file."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


FINAL = ("Softmax", "LogSoftmax", "Sigmoid")
MOVES = ("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
"""Operators whose results are the numbers of their first input at other places."""


def softmax_axes(node: OnnxNode, opset: int, rank: int) -> range:
    """Return the axes that a Softmax or LogSoftmax takes as one: before opset 13 all from its own on."""
    old = opset < 13 and not node.attrs.get("moved")
    axis = normalize_axis(node.attrs.get("axis", 1 if old else -1), rank)
    return range(axis, rank if old else axis + 1)


def activations_last(nodes: Sequence[OnnxNode], outputs: Set[str], opset: int) -> tuple[OnnxNode, ...]:
    """Let an output that is a Transpose of an activation be the activation of a Transpose: it has logits."""
    # Files of channels-last networks end so. ``outputs``: those of the graph.
    makers = {name: node for node in nodes for name in node.outputs}
    readers = Counter(name for node in nodes for name in node.inputs)
    new: dict[OnnxNode, tuple[OnnxNode, ...]] = {}
    for last in nodes:
        first = makers.get(last.inputs[0]) if last.op == "Transpose" and outputs & set(last.outputs) else None
        if first is None or first.op not in FINAL or "perm" not in last.attrs:
            continue
        if first.outputs[0] in outputs or readers[first.outputs[0]] > 1:
            continue
        attrs = dict(first.attrs)
        if first.op != "Sigmoid":
            perm = [int(axis) for axis in last.attrs["perm"]]
            if not perm or sorted(perm) != list(range(len(perm))):
                continue  # it is refused where it is lowered
            axis, *others = softmax_axes(first, opset, len(perm))
            if others:
                continue
            attrs |= {"axis": perm.index(axis), "moved": True}
        moved = replace(last, inputs=first.inputs, outputs=first.outputs)
        new[first] = ()
        new[last] = moved, replace(first, inputs=first.outputs, outputs=last.outputs, attrs=attrs)
    return tuple(kept for node in nodes for kept in new.get(node, (node,)))
