"""All lowerings, by the ONNX operator: one that is not here is read as its rule says, or not at all."""

from __future__ import annotations

from collections.abc import Mapping

from oocdl.graph.onnx.context import Lower
from oocdl.graph.onnx.lower.activations import ACTIVATIONS
from oocdl.graph.onnx.lower.arithmetic import ARITHMETIC
from oocdl.graph.onnx.lower.contraction import CONTRACTIONS
from oocdl.graph.onnx.lower.control import CONTROL
from oocdl.graph.onnx.lower.indexing import INDEXING
from oocdl.graph.onnx.lower.logic import LOGIC
from oocdl.graph.onnx.lower.lower_attention import ATTENTION
from oocdl.graph.onnx.lower.lower_layers import LAYERS
from oocdl.graph.onnx.lower.lower_losses import LOSSES
from oocdl.graph.onnx.lower.lower_padding import PADDING
from oocdl.graph.onnx.lower.lower_pooling import POOLING
from oocdl.graph.onnx.lower.lower_recurrent import RECURRENT
from oocdl.graph.onnx.lower.lower_reductions import REDUCTIONS
from oocdl.graph.onnx.lower.random import RANDOM
from oocdl.graph.onnx.lower.rearrange import REARRANGE
from oocdl.graph.onnx.lower.resizing import RESIZING
from oocdl.graph.onnx.lower.sequences import SEQUENCES
from oocdl.graph.onnx.lower.structure import STRUCTURE

_TABLES: tuple[Mapping[str, Lower], ...] = (
    ARITHMETIC,
    LOGIC,
    ACTIVATIONS,
    REDUCTIONS,
    RANDOM,
    ATTENTION,
    STRUCTURE,
    PADDING,
    REARRANGE,
    INDEXING,
    CONTRACTIONS,
    CONTROL,
    SEQUENCES,
    LAYERS,
    LOSSES,
    POOLING,
    RESIZING,
    RECURRENT,
)
LOWERINGS: Mapping[str, Lower] = {op: lower for table in _TABLES for op, lower in table.items()}
