"""Whether two files are the same network, whatever their weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from oocdl.graph.onnx.model_file import Body, OnnxNode, shown
from oocdl.graph.onnx.reader import OnnxModel


def network_differences(old: OnnxModel, new: OnnxModel) -> str:
    """Return the first difference in words; empty if there is none.

    Parameters and running statistics may hold other numbers. Buffers and constants belong to the network.
    """
    return next(_differences(old, new), "")


def _differences(old: OnnxModel, new: OnnxModel) -> Iterator[str]:
    if old.metadata is None or new.metadata is None:
        yield "it is of a file that no module was written to"
        return
    if old.metadata.module != new.metadata.module:
        yield f"it is a {old.metadata.module}, now a {new.metadata.module}"
    for name in dict.fromkeys((*old.metadata.facts, *old.initializers)):
        if name not in new.initializers:
            yield f"{shown(name)} is missing"
            continue
        for before, after in zip(_facts(old, name), _facts(new, name), strict=True):
            if before != after:
                yield f"{shown(name)} is {before}, now {after}"
        fact, item = old.metadata.facts.get(name), old.initializers[name]
        is_fixed = fact is None or fact.kind == "buffer"
        if is_fixed and not np.array_equal(item.raw(), new.initializers[name].raw(), equal_nan=item.is_float):
            yield f"the buffer {shown(name)} holds other numbers"
    yield from (f"{shown(name)} is new" for name in new.initializers if name not in old.initializers)
    for one, other in zip_longest(old.nodes, new.nodes):
        if one is None or other is None or _node(one) != _node(other):
            gone, come = ("its end" if node is None else shown(node.name) for node in (one, other))
            yield f"the node {gone} is now {come}, or does something else"
    if (old.inputs, old.outputs) != (new.inputs, new.outputs):
        yield "its inputs or outputs have other names or sizes"


def _facts(model: OnnxModel, name: str) -> tuple[str, str, str]:
    """Say what an initializer is: its form, its part in the module, and its names there."""
    item, fact = model.initializers[name], model.metadata.facts.get(name) if model.metadata else None
    form = f"{list(item.shape)} of {item.stored}"
    if fact is None:
        return form, "a constant", ""
    frozen = " that is frozen" if fact.kind == "parameter" and not fact.requires_grad else ""
    padding = "" if fact.padding_idx is None else f", padding_idx {fact.padding_idx}"
    return form, f"a {fact.kind}{frozen}", f"named {', '.join(map(shown, fact.names))}{padding}"


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
    return node.op, node.inputs, node.outputs, _plain(node.attrs)
