"""Whether two files are the same network, whatever their weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from oocdl.graph.onnx.model_file import Body, OnnxNode, shown
from oocdl.graph.onnx.reader import OnnxModel

Part = tuple[str, Any, str]
"""(name of a part of a file, the facts that are compared, these in words)"""


def network_differences(old: OnnxModel, new: OnnxModel) -> str:
    """Return the first difference in words; empty if there is none.

    Parameters and running statistics may hold other numbers. Buffers and constants belong to the network.
    """
    if old.metadata is None or new.metadata is None:
        return "it is of a file that no module was written to"
    for one, other in zip_longest(_parts(old), _parts(new), fillvalue=("the end", None, "there")):
        if one[0] != other[0]:
            return f"{one[0]} was where {other[0]} is"
        if one[1] != other[1]:
            now = f", now {other[2].removeprefix('is ')}" if one[2].startswith("is ") else ""
            return f"{one[0]} {one[2]}{now}"
    return ""


def _parts(model: OnnxModel) -> Iterator[Part]:
    assert model.metadata is not None
    facts = model.metadata.facts
    yield "it", model.metadata.module, f"is a {model.metadata.module}"
    for name in dict.fromkeys((*facts, *model.initializers)):
        item, fact = model.initializers[name], facts.get(name)
        yield shown(name), (item.shape, item.stored), f"is {list(item.shape)} of {item.stored}"
        frozen = " that is frozen" if fact and fact.kind == "parameter" and not fact.requires_grad else ""
        yield shown(name), fact, f"is a {fact.kind if fact else 'constant'}{frozen}"
        if fact is None or fact.kind == "buffer":
            yield f"the buffer {shown(name)}", _plain(item.raw()), "holds other numbers"
    for node in model.nodes:
        yield f"the node {shown(node.name)}", _node(node), "does something else"
    yield "its inputs and outputs", (model.inputs, model.outputs), "have other names or sizes"


def _plain(held: Any) -> Any:
    """Return what can be compared."""
    if isinstance(held, np.ndarray):
        return held.dtype, held.shape, held.tobytes()
    if isinstance(held, Mapping):
        return {name: _plain(value) for name, value in held.items()}
    if isinstance(held, Body):
        return held.inputs, held.outputs, [_node(node) for node in held.nodes], _plain(held.constants)
    return held


def _node(node: OnnxNode) -> tuple[Any, ...]:
    return node.op, (node.inputs, node.outputs, _plain(node.attrs)), node.name
