"""Checks that a parsed model is one: names, and each node as ONNX defines its operator."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import checker, defs

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
    """Check nodes without bodies, and those in bodies; an operator that ONNX has not is refused later."""
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {"": opset, "ai.onnx": opset}
    for index, node in enumerate(graph.node):
        inner = list(graphs(node))
        for body in inner:
            _check_nodes(body, opset, own)
        if node.domain in ("", "ai.onnx") and not inner and node.op_type not in own:
            try:
                if not defs.get_schema(node.op_type, opset, "").deprecated:
                    checker.check_node(node, context)
            except defs.SchemaError:
                continue
            except checker.ValidationError as error:
                why = " ".join(str(error).split())
                name = shown(label(node, index))
                raise ModelError(f"node {name} ({node.op_type}) is not as ONNX defines it: {why}") from None
