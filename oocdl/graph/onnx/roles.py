"""Tells which initializers of a file are weights, and which norms use their running statistics.

A file of ``oocdl.from_torch`` says it in its metadata. Others do not: exporters write the numbers of a
model's code (the 0.5 of a GELU, a causal mask) as initializers too. Those are never trained: float scalars
and settings, what the exporter marks as a buffer, what has a generated name and cannot be a weight, and
tensors without a finite number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.bounds import MOST_CONSTANT_BYTES
from oocdl.graph.onnx.model_file import OnnxNode
from oocdl.graph.onnx.onnx_file import LAYERS, OnnxFile, Reader
from oocdl.graph.onnx.tensors import WeightSource

_GENERATED = re.compile(
    r"(val_\d+|_v_\d+|scalar_tensor.*|_?to_copy.*|onnx::.*|/.*|\d+|helper\.\w+\.\d+|auto\.cast\.\d+)$"
)
"""Names that exporters of PyTorch, Paddle (``helper.slice.12``), onnxsim and others give to what has none."""
TENSORFLOW = "tf2onnx"
"""The producer of files of TensorFlow and Keras."""
OF_PYTORCH = ("pytorch", "oocdl")
"""The producers of files of PyTorch, and of those that oocdl makes as PyTorch would."""
_NUMBER_OF_TENSORFLOW = re.compile(r"(.*/)?(x|y|Const(_\d+)?)(:0|__\d+)?$")
_GENERATED_BY_TENSORFLOW = re.compile(r".*__\d+$")
_RECURRENT = ("LSTM", "GRU", "RNN")
_SETTINGS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Shape", "Size", "ConstantOfShape", "IsNaN", "IsInf"), (0,)),
    **dict.fromkeys(("RandomUniformLike", "RandomNormalLike", "Bernoulli"), (0,)),
    **dict.fromkeys(("Equal", "Greater", "Less", "LessOrEqual", "GreaterOrEqual"), (0, 1)),
    **dict.fromkeys(("OneHot", "Range"), (0, 1, 2)),
    **dict.fromkeys(("Upsample", "Pow", "Mod", "CastLike"), (1,)),
    **dict.fromkeys(("Clip", "Dropout", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), (1, 2)),
    **dict.fromkeys(("Resize", "Pad", "STFT"), (1, 2, 3)),
}
"""Operator -> inputs that are settings, never weights."""
ROLES = {"parameter": Role.WEIGHT, "statistic": Role.STATE, "buffer": Role.CONSTANT}


def role_of(model: OnnxFile, item: WeightSource) -> Role:
    """Tell whether an initializer of a file is a weight, a running statistic, or a constant."""
    metadata, kind, producer = model.metadata, model.kinds.get(item.name), model.producer
    uses = model.readers.get(item.name, ())
    if not item.is_float:
        return Role.CONSTANT
    if metadata is not None:
        fact = metadata.facts.get(item.name)
        return ROLES[fact.kind] if fact is not None else Role.CONSTANT
    norms = all(node.op == "BatchNormalization" and place in (3, 4) for node, place, _ in uses)
    if uses and norms and item.name not in model.handed_out:
        return Role.STATE
    generated = _GENERATED.match(item.name) is not None
    named = kind is None and producer == "pytorch" and prod(item.shape) > 1 and not generated
    learned = kind == "PARAMETER" or named
    settings = all(
        index in _SETTINGS.get(node.op, ()) and not (learned and node.op in ("Pow", "Clip"))
        for node, index, _ in uses
    )
    if (uses and settings) or kind not in (None, "PARAMETER"):
        return Role.CONSTANT
    if any(node.op == "PRelu" and index == 1 for node, index, _ in uses):
        return Role.WEIGHT  # a single number, too
    if producer == TENSORFLOW and _is_number_of_tensorflow(item, uses):
        return Role.CONSTANT
    if kind is None and not item.shape and (generated or producer != "pytorch"):
        return Role.CONSTANT  # a number written in the model's code
    small = kind is None and item.nbytes <= MOST_CONSTANT_BYTES
    state = uses and all(node.op in _RECURRENT and index in (5, 6) for node, index, _ in uses)
    if small and state and (generated or producer != "pytorch") and not item.raw().any():
        return Role.CONSTANT  # where a sequence begins
    if small and _is_nowhere_finite(item):
        return Role.CONSTANT
    if small and generated:
        data = item.raw()
        norm = all(node.op in ("InstanceNormalization", "GroupNormalization") for node, *_ in uses)
        number = data.size == 1 and not _is_bias(model, uses)
        if number or not np.isfinite(data).all() or (norm and np.isin(data, (0, 1)).all()):
            return Role.CONSTANT  # a number, a mask, ones and zeros of a norm without weights
    return Role.WEIGHT


def _is_bias(model: OnnxFile, uses: Sequence[Reader]) -> bool:
    """Whether a tensor is the bias of layers: their own, or, PyTorch's aside, added to what they make."""
    own = [node.op in LAYERS and index == 2 for node, index, _ in uses]
    added = [node.op == "Add" and not model.of_layers.isdisjoint(node.inputs) for node, *_ in uses]
    return bool(uses) and (all(own) or (all(added) and model.producer != "pytorch"))


def _is_nowhere_finite(item: WeightSource) -> bool:
    """Whether a tensor has NaN and infinities alone, as exporters write the second choice of a Where."""
    first = ((0, 1),) * len(item.shape)  # of a weight nothing else is read
    return all(item.shape) and not any(np.isfinite(item.raw(part)).any() for part in (first, None))


def _is_number_of_tensorflow(item: WeightSource, uses: Sequence[Reader]) -> bool:
    """Whether tf2onnx made a float tensor of a number of the code, such as the epsilon of a norm."""
    # Operands in the code are called ``.../y``, variables ``.../ReadVariableOp``; what is computed, numbered.
    if _NUMBER_OF_TENSORFLOW.match(item.name):
        return True
    product = any(node.op in LAYERS and index for node, index, _ in uses)
    return not product and prod(item.shape) == 1 and _GENERATED_BY_TENSORFLOW.match(item.name) is not None


def has_one_bias(model: OnnxFile, item: WeightSource) -> bool:
    """Whether the second half of a recurrent bias is zeros that no parameter stands for."""
    # ONNX adds two biases; an LSTM of Keras has one, and tf2onnx writes zeros for the other.
    uses = model.readers.get(item.name, ())
    biases = all(node.op in _RECURRENT and index == 3 for node, index, _ in uses)
    if model.producer != TENSORFLOW or not uses or not biases:
        return False
    return not np.split(item.raw(), 2, axis=-1)[1].any()


def trains_by_origin(node: OnnxNode) -> bool:
    """Whether PyTorch's dynamo exporter made a BatchNormalization of one in training mode."""
    # It never writes ``training_mode``, but names the operator that it exported.
    return "batch_norm_legit_functional" in node.origin and "_no_training" not in node.origin


def batch_norm_modes(model: OnnxFile) -> Mapping[OnnxNode, bool]:
    """Return each BatchNormalization that keeps statistics, and whether the file has it in training mode."""
    modes = {}
    for node in model.nodes:
        if node.op == "BatchNormalization" and model.owner.keys() >= set(node.inputs[3:5]):
            attribute = node.attrs.get("training_mode", 0) if model.opset >= 14 else len(node.outputs) > 1
            modes[node] = "_no_training" not in node.origin and (trains_by_origin(node) or bool(attribute))
    return modes


def evaluated(model: OnnxFile) -> frozenset[str]:
    """Return the BatchNorms that use their running statistics in training too, by their first output."""
    # The metadata says it. Without it, a norm in evaluation mode beside others in training mode is one. A
    # file in which no norm is in training mode was exported for inference, or by an exporter that never says
    # it.
    if model.metadata is not None:
        kept = {name for name, fact in model.metadata.facts.items() if fact.kind != "statistic"}
        return frozenset(
            node.outputs[0]
            for node in model.nodes
            if node.op == "BatchNormalization"
            and not kept.isdisjoint(model.owner.get(name, "") for name in node.inputs[3:5])
        )
    modes = batch_norm_modes(model)
    mixed = any(modes.values())
    return frozenset(node.outputs[0] for node, training in modes.items() if mixed and not training)
