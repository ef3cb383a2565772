"""Checks that a parsed model is one: names, and each node as ONNX defines its operator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import onnx
from onnx import defs

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.bodies import graphs
from oocdl.graph.onnx.model_file import label, shown

MIN_OPSET, MAX_OPSET = 9, defs.onnx_opset_version()


def check(model: onnx.ModelProto, own: Collection[str] = ()) -> int:
    """Return the opset of the standard operators; raises ModelError or UnsupportedError for a bad model.

    ``own``: operators that are the user's, whatever ONNX says of them.
    """
    versions = [opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")]
    if not versions:
        raise ModelError("the model does not say which opset it needs")
    opset = max(versions)
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedError(f"opset {opset} is not known; supported are {MIN_OPSET} to {MAX_OPSET}")
    graph = model.graph
    if graph.sparse_initializer:
        name = shown(graph.sparse_initializer[0].values.name)
        raise UnsupportedError(f"tensor {name} is sparse; sparse weights are not supported")
    made = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if not tensor.name:
            raise ModelError("an initializer has no name")
    names = [tensor.name for tensor in graph.initializer]
    made |= set(names)
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ModelError(f"the graph is not valid: initializer {shown(twice)} is defined twice")
    later = {name for node in graph.node for name in node.output if name}
    if not graph.output:
        raise ModelError("the graph is not valid: it has no outputs")
    _check_nodes(graph, int(opset), own)
    for index, node in enumerate(graph.node):
        for name in node.input:
            if name and name not in made:
                why = (
                    "is used before it is made (a cycle, or unsorted nodes)"
                    if name in later
                    else "is made nowhere"
                )
                raise ModelError(
                    f"the graph is not valid: {shown(name)}, read by {shown(label(node, index))}, {why}"
                )
        for name in node.output:
            if name and name in made:
                raise ModelError(f"the graph is not valid: {shown(name)} is made twice")
            made.add(name)
    for value in graph.output:
        if value.name not in made:
            raise ModelError(f"the graph is not valid: output {shown(value.name)} is made nowhere")
    return int(opset)


def _check_nodes(graph: onnx.GraphProto, opset: int, own: Collection[str]) -> None:
    for index, node in enumerate(graph.node):
        schema = _schema(node.op_type, opset) if node.domain in ("", "ai.onnx") else None
        why = "" if schema is None or node.op_type in own else _misfit(node, schema)
        if why:
            raise ModelError(f"node {shown(label(node, index))} ({node.op_type}) {why}")
        for body in graphs(node):
            _check_nodes(body, opset, own)


@dataclass(frozen=True)
class _Schema:
    """The facts that ONNX states about an operator."""

    attributes: Mapping[str, tuple[str, bool]]
    """Name -> type, and whether it has to be there."""
    counts: tuple[tuple[str, int, int], ...]
    """Fewest and most inputs, then outputs."""
    needed: tuple[tuple[int, str], ...]
    """Inputs that must not be left out: place, name."""


@cache
def _schema(op: str, opset: int) -> _Schema | None:
    """Return ONNX's definition of an operator; None for one that it has not, or has no more."""
    try:
        found = defs.get_schema(op, opset, "")
    except defs.SchemaError:
        return None
    if found.deprecated:
        return None
    single = defs.OpSchema.FormalParameterOption.Single
    return _Schema(
        {name: (str(item.type).rpartition(".")[2], item.required) for name, item in found.attributes.items()},
        (("inputs", found.min_input, found.max_input), ("outputs", found.min_output, found.max_output)),
        tuple((place, slot.name) for place, slot in enumerate(found.inputs) if slot.option == single),
    )


def _misfit(node: onnx.NodeProto, schema: _Schema) -> str:
    """Return why a node is not as its operator is defined; attributes beyond that are passed over."""
    given = {item.name: onnx.AttributeProto.AttributeType.Name(item.type) for item in node.attribute}
    if len(given) < len(node.attribute):
        return "has an attribute twice"
    for name, (kind, required) in schema.attributes.items():
        if name not in given and required:
            return f"has no attribute {name}, which it needs"
        if given.get(name, kind) != kind:
            return f"has an attribute {name} of type {given[name]}; it has to be {kind}"
    for (what, least, most), names in zip(schema.counts, (node.input, node.output), strict=True):
        if not least <= len(names) <= most:
            return f"has {len(names)} {what}; it takes {least}" + (f" to {most}" if most < 2**31 - 1 else "")
    for place, name in schema.needed:
        if not node.input[place]:
            return f"has no input {place} ({name}), which it needs"
    return ""
