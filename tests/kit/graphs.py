"""Graphs of whole training steps."""

from __future__ import annotations

from pathlib import Path

from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.losses import CrossEntropy
from oocdl.ops import RULES
from oocdl.ops.loss_functions import add_loss
from oocdl.ops.update_rules import add_updates
from oocdl.optim import SGD


def training(path: Path, shapes: dict[str, tuple[int, ...]], target: tuple[int, ...]) -> Graph:
    """The training step of an ONNX file under cross-entropy and SGD."""
    imported = inspect_onnx(path).bind(RULES, shapes)
    build = Builder(RULES, imported.graph)
    build.value("target", target, "int64", Role.TARGET)
    loss = add_loss(build, CrossEntropy(), imported.outputs[0][1], "target")
    weights = [value.name for value in imported.graph.of_role(Role.WEIGHT)]
    build.role = Role.GRADIENT
    add_updates(build, SGD(0.01), differentiate(build, loss, weights))
    build.outputs = [loss]
    return canonicalize(build.graph(), RULES)
