"""Walks the nodes of a model with those of its branches and loops, and writes out its functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx
from onnx import inliner

from oocdl.graph.onnx.model_file import Body, OnnxNode


def bodies(node: OnnxNode) -> list[Body]:
    """Return the graphs that are attributes of a node."""
    return [held for held in node.attrs.values() if isinstance(held, Body)]


def every_node(nodes: Iterable[OnnxNode]) -> Iterator[OnnxNode]:
    """Yield nodes and, after each, those of its bodies."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from every_node(body.nodes)


def results_of_bodies(nodes: Iterable[OnnxNode]) -> frozenset[str]:
    """Return the names that any body hands to its node."""
    return frozenset(name for node in every_node(nodes) for body in bodies(node) for name in body.outputs)


def without_functions(model: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
    """Write out the model's own functions where they are called, but for those in ``kept``, by operator."""
    if not model.functions:
        return model
    spared = [(item.domain, item.name) for item in model.functions if f"{item.domain}::{item.name}" in kept]
    return inliner.inline_selected_functions(model, spared, exclude=True)
