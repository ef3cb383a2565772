"""Activation functions and their fused gradients, as rows of the elementwise table.

Gradients are operators of their own so that an engine can run one kernel over one read.
"""

from __future__ import annotations

from oocdl.graph.ir.graph import Node
from oocdl.graph.ir.op_rule import Builder, OpRule
from oocdl.ops._speed import EXPONENTIAL
from oocdl.ops.pointwise import Row, RowGradient, elementwise


def _from_input(op: str) -> RowGradient:
    """``op(dy, x)`` with the attributes of the activation."""

    def gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
        return (build(op, g, node.inputs[0], **node.attrs),)

    return gradient


def _from_output(op: str) -> RowGradient:
    """``op(dy, y)``."""

    def gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
        return (build(op, g, node.outputs[0]),)

    return gradient


def _elu_gradient(build: Builder, node: Node, g: str) -> tuple[str | None, ...]:
    """From the output where its sign is the input's, else ``g`` and ``g alpha exp(x)`` by themselves."""
    x, alpha = node.inputs[0], float(node.attrs["alpha"])
    if alpha >= 0:
        return (build("EluGrad", g, node.outputs[0], alpha=alpha),)
    falling = build("Mul", g, build("Mul", build("Exp", x), build.like(alpha, g)))
    return (build("Where", build("Greater", x, build.like(0.0, g)), g, falling),)


ACTIVATIONS: tuple[Row, ...] = (
    # max(x, 0); gradient 0 at 0, as PyTorch
    Row("Relu", 1, _from_input("ReluGrad"), scratch=0, gigabytes=26),
    Row("ReluGrad", 2, None, scratch=1.25, gigabytes=27),
    # x if x > 0 else alpha x
    Row("LeakyRelu", 1, _from_input("LeakyReluGrad"), scratch=0, gigabytes=25, onnx={"alpha": 0.01}),
    Row("LeakyReluGrad", 2, None, scratch=3.2, gigabytes=28, attrs={"alpha": 0.01}),
    # x if x > 0 else alpha (exp(x) - 1); from the output, 1 if y > 0 else y + alpha
    Row("Elu", 1, _elu_gradient, flops=11, scratch=0.25, like=EXPONENTIAL, onnx={"alpha": 1.0}),
    Row("EluGrad", 2, None, flops=3, scratch=2.25, attrs={"alpha": 1.0}),
    # none: x Phi(x) = x/2 (1 + erf(x / sqrt 2)); tanh: x/2 (1 + tanh(sqrt(2/pi)(x + 0.044715 x^3)))
    # (Hendrycks & Gimpel 2016, arXiv:1606.08415)
    Row(
        "Gelu",
        1,
        _from_input("GeluGrad"),
        flops=15,
        scratch=1,
        gigabytes=13,
        like=EXPONENTIAL,
        onnx={"approximate": "none"},
    ),
    Row("GeluGrad", 2, None, flops=25, scratch=3, gigabytes=16, like=EXPONENTIAL),
    # 1 / (1 + exp(-x)); y (1 - y)
    Row("Sigmoid", 1, _from_output("SigmoidGrad"), flops=10, scratch=0, gigabytes=19, like=EXPONENTIAL),
    Row("SigmoidGrad", 2, None, flops=3, scratch=1, gigabytes=26),
    # (1 - y^2)
    Row("Tanh", 1, _from_output("TanhGrad"), flops=10, scratch=0, gigabytes=3.7, like=EXPONENTIAL),
    Row("TanhGrad", 2, None, flops=3, scratch=1, gigabytes=27),
    # max(x, 0) + log(1 + exp(-|x|)); its derivative is the sigmoid, also at 0
    Row(
        "Softplus",
        1,
        lambda b, n, g: (b("Mul", g, b("Sigmoid", n.inputs[0])),),
        flops=20,
        scratch=1,
        gigabytes=6.3,
        like=EXPONENTIAL,
    ),
    # x / (1 - ratio) where u >= ratio, else 0, with u uniform in [0, 1); linear in x
    Row(
        "Dropout",
        2,
        lambda b, n, g: (b("Dropout", g, n.inputs[1], **n.attrs), None),
        flops=2,
        scratch=1.25,
        gigabytes=23,
        attrs={"ratio": 0.1},
    ),
)

RULES: tuple[OpRule, ...] = tuple(elementwise(row) for row in ACTIVATIONS)
