"""Softmax and LogSoftmax: rewritten as LogSumExp and elementwise nodes, so their axis may be cut.

Softmax(x) = exp(x - lse(x)),  LogSoftmax(x) = x - lse(x)
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.ir.graph import Node, Value
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec, no_scratch
from oocdl.ops._broadcast import fail, is_float


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    axis = node.attrs["axis"]
    if not 0 <= axis < len(inputs[0].shape):
        fail(node, f"axis {axis} is not an axis of a value of rank {len(inputs[0].shape)}")
    if not is_float(inputs[0].dtype):
        fail(node, f"its operand must be floating point, not {inputs[0].dtype}")
    return [(inputs[0].shape, inputs[0].dtype)]


def _log_softmax(build: Builder, node: Node) -> Sequence[str]:
    x = node.inputs[0]
    return [build("Sub", x, build("LogSumExp", x, axes=(node.attrs["axis"],)))]


def _softmax(build: Builder, node: Node) -> Sequence[str]:
    return [build("Exp", *_log_softmax(build, node))]


def _softmax_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """``y (g - sum(g y))``."""
    if grads[0] is None:
        return [None]
    product = build("Mul", grads[0], node.outputs[0])
    total = build("ReduceSum", product, axes=(node.attrs["axis"],))
    return [build("Sub", product, build("Mul", node.outputs[0], total))]


def _log_softmax_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """``g - exp(y) sum(g)``."""
    if grads[0] is None:
        return [None]
    total = build("ReduceSum", grads[0], axes=(node.attrs["axis"],))
    return [build("Sub", grads[0], build("Mul", build("Exp", node.outputs[0]), total))]


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Softmax", infer=_infer, gradient=_softmax_gradient, expand=_softmax, scratch_elements=no_scratch
    ),
    OpRule(
        op="LogSoftmax",
        infer=_infer,
        gradient=_log_softmax_gradient,
        expand=_log_softmax,
        scratch_elements=no_scratch,
    ),
)
