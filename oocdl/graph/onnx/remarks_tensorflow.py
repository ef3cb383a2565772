"""Finds what looks wrong in a file of tf2onnx, which Keras exports by.

It holds the graph of TensorFlow, constants computed: a BatchNormalization in evaluation mode is
multiplied into weights, or left as arithmetic, and biases of zeros and scales of ones vanish. The names
still tell of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from oocdl.graph.onnx.model_file import OnnxNode
from oocdl.graph.onnx.remarks import Remark, TracedFile, counted, some
from oocdl.graph.onnx.roles import TENSORFLOW

_FOLDED = re.compile(r".*(/batchnorm/(mul|sub)|merged_input)(:0|__\d+)?$|.*_(weights|bias)_fused_bn.*")
_OF_NORM = re.compile(r".*/(moments|batchnorm)/.*")
_LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")
_TRAINING = "tf2onnx.convert.from_function of tf.function(lambda x: model(x, training=True))"


def remarks_of(file: TracedFile) -> tuple[Remark, ...]:
    """Return what looks wrong in a file of tf2onnx; nothing in others."""
    if file.producer != TENSORFLOW or file.metadata is not None:
        return ()
    return (*_folded_norms(file), *_norms_of_batches(file), *_lost_biases(file))


def _folded_norms(file: TracedFile) -> Iterator[Remark]:
    found = [name for name in file.trained if _FOLDED.match(name)]
    if found:
        yield Remark(
            f"{counted(len(found), 'trained tensor has', 'trained tensors have')} a BatchNormalization "
            f"folded in ({some(found)}), as in a file for inference: the norm is gone from the file, and is "
            "not trained",
            f"export in training mode, which keeps norms: {_TRAINING}",
        )


def _norms_of_batches(file: TracedFile) -> Iterator[Remark]:
    """BatchNormalizations of a model that was exported in training mode, written out."""
    found = [node.name for node in file.nodes if re.fullmatch(r".*/batchnorm/Rsqrt", node.name)]
    within = {name.rpartition("/batchnorm/")[0] for name in found}
    means = {node.name.rpartition("/moments/")[0] for node in file.nodes if "/moments/" in node.name}
    norms = sorted(within & means)
    if norms:
        yield Remark(
            f"{counted(len(norms), 'BatchNormalization has', 'BatchNormalizations have')} no running "
            f"statistics in the file, first {some(norms[:1])}: training is exact, and predictions normalize "
            "by their batch, too",
            "predict with the batch size of training, or give the trained weights back to the Keras model",
        )


def _lost_biases(file: TracedFile) -> Iterator[Remark]:
    readers: dict[str, list[OnnxNode]] = {}
    for node in file.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    trained = set(file.trained)

    def is_biased(name: str) -> bool:
        """Whether a bias is added to a value, or none is expected: a norm, or the second half of a layer."""
        for node in readers.get(name, []):
            added = node.op == "Add" and trained.intersection(node.inputs)
            within = name.endswith("/depthwise:0") and node.op == "Conv"
            if added or within or _OF_NORM.match(f"{node.name}/") or _OF_NORM.match(node.outputs[0]):
                return True
            if node.op in _MOVES and is_biased(node.outputs[0]):
                return True
        return False

    found = [
        node.name
        for node in file.nodes
        if node.op in _LAYERS
        and len(node.inputs) == 2
        and node.inputs[1] in trained
        and not _FOLDED.match(node.inputs[1])
        and not is_biased(node.outputs[0])
    ]
    if found:
        yield Remark(
            f"{counted(len(found), 'layer has', 'layers have')} no bias ({some(found)}): TensorFlow's "
            "exports drop biases of zeros and scales of ones, as Keras starts them: these are not trained",
            "if the layers have biases in Keras, export after a step of training: then none is all zeros",
        )
