"""Tells which initializers of a file are weights, which ONNX does not say.

Exporters write the numbers of a model's code (the 0.5 of a GELU, a causal mask)
as initializers too. Those are never trained: float scalars and settings, what the
exporter marks as a buffer, and what has a generated name and cannot be a weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.constant_folding import LIMIT_BYTES
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


def role_of(
    item: WeightSource, uses: Sequence[tuple[OnnxNode, int]], kind: str | None, producer: str
) -> Role:
    """Tell whether an initializer is trained, a running statistic, or a constant.

    ``uses``: the nodes that read it, and as which input. ``kind``: what the exporter
    says it is, if it says so; ``producer``: which exporter that was.
    """
    if not item.is_float:
        return Role.CONSTANT
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
