"""Tells which initializers of a file are weights, and which norms use their running statistics.

A file of ``oocdl.from_torch`` says it in its metadata. Others do not: exporters write the numbers of a
model's code (the 0.5 of a GELU, a causal mask) as initializers too. Those are never trained: float scalars
and settings, what the exporter marks as a buffer, and what has a generated name and cannot be a weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence, Set

import numpy as np

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.constant_folding import LIMIT_BYTES
from oocdl.graph.onnx.metadata import Metadata
from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.tensors import WeightSource

_GENERATED = re.compile(r"(val_\d+|scalar_tensor.*|_?to_copy.*|onnx::.*|/.*|\d+)$")
_UNTRAINED = {  # operator -> inputs that are settings, never weights
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Pow": (1,),
    "Clip": (1, 2),
    "Dropout": (1, 2),
    "Pad": (1, 2, 3),
    "Equal": (0, 1),
    "Greater": (0, 1),
    "Less": (0, 1),
    "LessOrEqual": (0, 1),
    "GreaterOrEqual": (0, 1),
    "Range": (0, 1, 2),
    "CastLike": (1,),
    "Shape": (0,),
    "Size": (0,),
    "ConstantOfShape": (0,),
}


ROLES = {"parameter": Role.WEIGHT, "statistic": Role.STATE, "buffer": Role.CONSTANT}
"""By what the metadata says."""


def role_of(
    item: WeightSource,
    uses: Sequence[tuple[OnnxNode, int]],
    kind: str | None,
    producer: str,
    metadata: Metadata | None,
) -> Role:
    """Tell whether an initializer is a weight, a running statistic, or a constant.

    ``uses``: the nodes that read it, and as which input. ``kind``: what the exporter
    says it is, if it says so; ``producer``: which exporter that was.
    """
    if not item.is_float:
        return Role.CONSTANT
    if metadata is not None:
        fact = metadata.facts.get(item.name)
        return ROLES[fact.kind] if fact is not None else Role.CONSTANT
    if uses and all(node.op == "BatchNormalization" and index in (3, 4) for node, index in uses):
        return Role.STATE
    setting = bool(uses) and all(index in _UNTRAINED.get(node.op, ()) for node, index in uses)
    if setting or kind not in (None, "PARAMETER"):
        return Role.CONSTANT
    generated = _GENERATED.match(item.name) is not None
    if kind is None and not item.shape and (generated or producer != "pytorch"):
        return Role.CONSTANT  # a number written in the model's code
    if kind is None and generated and item.nbytes <= LIMIT_BYTES:
        data = item.raw()
        norm = all(node.op in ("InstanceNormalization", "GroupNormalization") for node, _ in uses)
        if data.size == 1 or not np.isfinite(data).all() or (norm and np.isin(data, (0, 1)).all()):
            return Role.CONSTANT  # a number, a mask, the ones and zeros of a norm without weights
    return Role.WEIGHT


def merged(nodes: Sequence[OnnxNode], weights: Collection[str]) -> tuple[str, ...]:
    """Return notes on norms that share a weight: exporters merge tensors that are equal at the start."""
    uses = Counter(
        name
        for node in nodes
        if node.op.endswith("Normalization")
        for name in dict.fromkeys(node.inputs[1:3])
    )
    return tuple(
        f"{count} norms share the weight {shown(name)}: the exporter has merged equal tensors, "
        "which ties them; export in training mode without optimisation to keep them apart"
        for name, count in uses.items()
        if count > 1 and name in weights
    )


def evaluated(nodes: Sequence[OnnxNode], initializers: Set[str], metadata: Metadata | None) -> set[str]:
    """Return the BatchNorms that use their running statistics in training too, by their first output.

    The metadata says it. Without it, a norm with ``training_mode=0`` beside others with 1 is one: that is how
    the TorchScript exporter writes a norm in evaluation mode. A file in which no norm has 1 was exported for
    inference, or by an exporter that never writes it, and tells nothing.
    """
    norms = [node for node in nodes if node.op == "BatchNormalization"]
    if metadata is not None:
        facts = metadata.facts
        return {
            node.outputs[0]
            for node in norms
            if any(name in facts and facts[name].kind != "statistic" for name in node.inputs[3:5])
        }
    mixed = any(node.attrs.get("training_mode", 0) for node in norms)
    return {
        node.outputs[0]
        for node in norms
        if mixed and not node.attrs.get("training_mode", 0) and initializers >= set(node.inputs[3:5])
    }
