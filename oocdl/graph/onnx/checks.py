"""Checks that a parsed model is one: names, and each node as ONNX defines its operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
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
    opset: int = max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=-1)
    if opset < 0:
        raise ModelError("the model does not say which opset it needs")
    if not MIN_OPSET <= opset <= MAX_OPSET:
        cure = "; onnx.version_converter.convert_version(model, 17) makes it newer" * (opset < MIN_OPSET)
        raise UnsupportedError(f"opset {opset} is not known; supported are {MIN_OPSET} to {MAX_OPSET}{cure}")
    graph = model.graph
    if graph.sparse_initializer:
        name = shown(graph.sparse_initializer[0].values.name)
        raise UnsupportedError(f"tensor {name} is sparse; sparse weights are not supported")
    names = Counter(tensor.name for tensor in graph.initializer)
    if "" in names:
        raise ModelError("an initializer has no name")
    if twice := [name for name, count in names.items() if count > 1]:
        raise ModelError(f"the graph is not valid: initializer {shown(twice[0])} is defined twice")
    if not graph.output:
        raise ModelError("the graph is not valid: it has no outputs")
    _check_nodes(graph, opset, own)
    _check_order(graph, {*names, *(value.name for value in graph.input)})
    return opset


def _check_order(graph: onnx.GraphProto, made: set[str]) -> None:
    """Raise ModelError if a name is read before it is made, made twice or nowhere; ``made``: those there."""
    later = {name for node in graph.node for name in node.output if name}
    for index, node in enumerate(graph.node):
        for name in node.input:
            if name and name not in made:
                cycle = "is used before it is made (a cycle, or unsorted nodes)"
                why = f"read by {shown(label(node, index))}, {cycle if name in later else 'is made nowhere'}"
                raise ModelError(f"the graph is not valid: {shown(name)}, {why}")
        for name in filter(None, node.output):
            if name in made:
                raise ModelError(f"the graph is not valid: {shown(name)} is made twice")
            made.add(name)
    for value in graph.output:
        if value.name not in made:
            raise ModelError(f"the graph is not valid: output {shown(value.name)} is made nowhere")


def _check_nodes(graph: onnx.GraphProto, opset: int, own: Collection[str]) -> None:
    for index, node in enumerate(graph.node):
        schema = schema_of(node.op_type, opset) if node.domain in ("", "ai.onnx") else None
        why = "" if schema is None or node.op_type in own else _misfit(node, schema)
        if why:
            raise ModelError(f"node {shown(label(node, index))} ({node.op_type}) {why}")
        for body in graphs(node):
            _check_nodes(body, opset, own)


@cache
def schema_of(op: str, opset: int) -> defs.OpSchema | None:
    """Return ONNX's definition of an operator; None for one that it has not, or has no more."""
    try:
        found = defs.get_schema(op, opset, "")
    except defs.SchemaError:
        return None
    return None if found.deprecated else found


def _misfit(node: onnx.NodeProto, schema: defs.OpSchema) -> str:
    """Return why a node is not as its operator is defined; attributes beyond that are passed over."""
    kinds = onnx.AttributeProto.AttributeType
    given = {item.name: kinds.Name(item.type) for item in node.attribute}
    if len(given) < len(node.attribute):
        return "has an attribute twice"
    for name, item in schema.attributes.items():
        kind = str(item.type).rpartition(".")[2]
        if name not in given and item.required:
            return f"has no attribute {name}, which it needs"
        if given.get(name, kind) != kind:
            return f"has an attribute {name} of type {given[name]}; it has to be {kind}"
    for what, names, least, most in (
        ("inputs", node.input, schema.min_input, schema.max_input),
        ("outputs", node.output, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            return f"has {len(names)} {what}; it takes {least}" + (f" to {most}" if most < 2**31 - 1 else "")
    for place, (name, slot) in enumerate(zip(node.input, schema.inputs, strict=False)):
        if not name and slot.option == defs.OpSchema.FormalParameterOption.Single:
            return f"has no input {place} ({slot.name}), which it needs"
    return ""
