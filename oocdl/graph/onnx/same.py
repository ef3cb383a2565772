"""Whether two files are the same network, whatever their weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.graph.onnx.tensors import WeightSource


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
        yield f"it is a {old.metadata.module}, this is a {new.metadata.module}"
    for name in dict.fromkeys((*old.metadata.facts, *old.initializers)):
        item, other = old.initializers[name], new.initializers.get(name)
        if other is None:
            yield f"{shown(name)} is missing"
        elif (item.shape, item.stored) != (other.shape, other.stored):
            yield f"{shown(name)} is {_form(item)}, now {_form(other)}"
        elif old.metadata.facts.get(name) != new.metadata.facts.get(name):
            yield f"{shown(name)} was {_fact(old, name)}, is {_fact(new, name)}"
        elif _fixed(old, name) and not np.array_equal(item.raw(), other.raw(), equal_nan=item.is_float):
            yield f"the buffer {shown(name)} holds other numbers"
    yield from (f"{shown(name)} is new" for name in new.initializers if name not in old.initializers)
    for before, after in zip_longest(old.nodes, new.nodes):
        if before is None or after is None or not _alike(before, after):
            gone = shown(before.name) if before is not None else "its end"
            come = shown(after.name) if after is not None else "its end"
            yield f"the node {gone} is now {come}, or does something else"
    if (old.inputs, old.outputs) != (new.inputs, new.outputs):
        yield "its inputs or outputs have other names or sizes"


def _form(item: WeightSource) -> str:
    return f"{list(item.shape)} of {item.stored}"


def _fact(model: OnnxModel, name: str) -> str:
    fact = model.metadata.facts.get(name) if model.metadata is not None else None
    if fact is None:
        return "a constant"
    frozen = " that is frozen" if fact.kind == "parameter" and not fact.requires_grad else ""
    return f"a {fact.kind}{frozen}"


def _fixed(model: OnnxModel, name: str) -> bool:
    fact = model.metadata.facts.get(name) if model.metadata is not None else None
    return fact is None or fact.kind == "buffer"


def _alike(one: OnnxNode, other: OnnxNode) -> bool:
    same = (one.op, one.inputs, one.outputs) == (other.op, other.inputs, other.outputs)
    return same and _plain(one.attrs) == _plain(other.attrs)


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that can be compared."""
    return {
        name: (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in attrs.items()
    }
