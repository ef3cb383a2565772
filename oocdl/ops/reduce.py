"""Reductions, and what is made of them: norms, Softmax. Dims are kept; axes sorted, non-negative.

Cut reductions are combined exactly: sums by adding, LogSumExp because the partial results are LogSumExps
themselves, ``lse(lse(a), lse(b)) = lse(a, b)``, moments by Chan's formula. Softmax and LogSoftmax are
rewritten, so that their axis may be cut: ``exp(d - lse(d))`` and ``d - lse(d)`` of ``d = x - max(x)``, for
next to numbers that are large log n would be lost.

Every norm (batch, instance, layer, group) is ``Moments(x){axes} -> mean, var`` with a biased ``var``, and
``Normalize(x, mean, var){axes, eps}``, which is ``(x - mean) / sqrt(var + eps)`` where mean and var *are* the
moments of x. So its gradient is that of the whole norm, and Moments adds nothing to it:

    dx = r (g - (sum g + xhat sum(g xhat)) / P),  r = (var + eps)^(-1/2),  P = elements reduced

(Ioffe & Szegedy 2015, arXiv:1502.03167). A norm over fixed statistics is Sub, Mul, not Normalize.
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.index import AxisRule
from oocdl.graph.ir.op_rule import Axes, Builder, Infer, OpRule, Spec, no_cost
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import (
    axis_of,
    broadcast_axes,
    extents_of,
    fail,
    letters,
    operand_size,
    same_dtype,
    same_float,
    size,
)
from oocdl.ops._speed import ARITHMETIC, EXPONENTIAL, READING, probe, reductions, streaming
from oocdl.ops.expression import Lifted, apply, equal, exp, lift, sqrt


def _reduced(node: Node, shape: Shape) -> Shape:
    axes = tuple(node.attrs["axes"])
    if list(axes) != sorted(set(axes)) or any(not 0 <= axis < len(shape) for axis in axes):
        fail(node, f"axes {list(axes)} are not sorted axes of a value of rank {len(shape)}")
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def _axes(combine: str) -> Axes:
    """Return the axis rule: letters ``a0, a1, ..``, of which the outputs lack the reduced ones."""

    def axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
        operand = letters(inputs[0])
        kept = tuple(None if axis in node.attrs["axes"] else index for axis, index in enumerate(operand))
        return AxisRule((operand,), (kept,) * len(outputs), extents_of(inputs[0]), combine=combine)

    return axes


def _infer(results: int = 1, floats: bool = True) -> Infer:
    def infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
        x = inputs[0]
        if x.dtype == "bool" or (floats and not is_float(x.dtype)):
            fail(node, f"its operand must be {'floating point' if floats else 'a number'}, not {x.dtype}")
        return [(_reduced(node, x.shape), x.dtype)] * results

    return infer


def _max_gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """Share the gradient equally between the maxima, as ``torch.amax``; ``flat``: nothing depends on it."""
    if node.attrs.get("flat"):
        return [None]
    x = lift(build, node.inputs[0])
    here = equal(x, x.to(node.outputs[0])).cast(x.dtype)
    return [(here * (x.to(g) / apply("ReduceSum", here, axes=node.attrs["axes"]))).name]


# Norms ---------------------------------------------------------------------------------------


def _count(node: Node, x: Lifted) -> int:
    return size([x.shape[axis] for axis in node.attrs["axes"]])


def _moments_gradient(
    build: Builder, node: Node, of_mean: str | None, of_var: str | None
) -> Sequence[str | None]:
    """``dmean / P + 2 (x - mean) dvar / P``; Normalize sends nothing here."""
    x, grad = lift(build, node.inputs[0]), None
    if of_mean is not None:
        grad = apply("Expand", x.to(of_mean) * (1 / _count(node, x)), shape=x.shape)
    if of_var is not None:
        share = x.to(of_var) * (2 / _count(node, x))
        spread = (x - x.to(node.outputs[0])) * share
        grad = spread if grad is None else grad + spread
    return [None if grad is None else grad.name]


def _infer_normalize(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, mean, var = inputs
    if mean.shape != _reduced(node, x.shape) or var.shape != mean.shape:
        fail(node, f"{list(mean.shape)} and {list(var.shape)} are not moments of {list(x.shape)}")
    return [(x.shape, same_dtype(node, [value.dtype for value in inputs]))]


def _normalize_gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    (x, mean, var), axes = node.inputs, node.attrs["axes"]
    its, wanted = build.makers.get(mean), ("Moments", (x,), (mean, var), axes)
    if its is None or (its.op, its.inputs, its.outputs, its.attrs.get("axes")) != wanted:
        fail(node, "normalizes by others than the moments of its own operand, of which it has no gradient")
    # Recomputed, so that what was normalized need not be stored.
    value, grad, variance = (lift(build, name) for name in (x, g, var))
    xhat = apply("Normalize", value, value.to(mean), variance, **node.attrs)
    scale = apply("Reciprocal", sqrt(variance + node.attrs["eps"]))
    share = value.number(1 / _count(node, value))
    offset = apply("ReduceSum", grad, axes=axes) * share
    slope = apply("ReduceSum", grad * xhat, axes=axes) * share
    return [((grad - offset - xhat * slope) * scale).name, None, None]


def _probes_normalize(shape: Shape) -> Sequence[Probe]:
    row = (1, shape[1], 1, 1, 1)
    return [probe("Normalize", shape, row, row, axes=(2, 3, 4), eps=1e-5)]


# Softmax -------------------------------------------------------------------------------------


def _infer_softmax(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    axis_of(node, inputs[0].shape)
    return [(inputs[0].shape, same_float(node, inputs))]


def below_largest(x: Lifted, axis: int) -> Lifted:
    """Return ``x`` less its largest along an axis, for results that are the same whatever is subtracted."""
    return x - apply("ReduceMax", x, axes=(axis,), flat=True)


def _log_softmax(build: Builder, node: Node) -> Sequence[str]:
    below = below_largest(lift(build, node.inputs[0]), node.attrs["axis"])
    return [(below - apply("LogSumExp", below, axes=(node.attrs["axis"],))).name]


def _softmax_gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """``y (g - sum(g y))``; for LogSoftmax ``g - exp(y) sum(g)``."""
    y, grad, axes = lift(build, node.outputs[0]), lift(build, g), (node.attrs["axis"],)
    if node.op == "LogSoftmax":
        total = apply("ReduceSum", grad, axes=axes)
        return [(grad - exp(y) * total).name]
    product = grad * y
    return [(product - y * apply("ReduceSum", product, axes=axes)).name]


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="ReduceSum", infer=_infer(floats=False), axes=_axes("sum"),
        gradient=lambda b, n, g: [b("Expand", g, shape=b.shape(n.inputs[0]))],
        speed=streaming(READING, 70, reductions("ReduceSum", [(2, 3, 4)])),
        flops=operand_size(1), scratch_elements=no_cost,
    ),
    OpRule(
        op="ReduceMax", infer=_infer(floats=False), axes=_axes("max"), gradient=_max_gradient,
        speed=streaming(READING, 73, reductions("ReduceMax", [])),
        flops=operand_size(1), scratch_elements=no_cost, prefers_planes=True,
    ),
    OpRule(
        op="LogSumExp", infer=_infer(), axes=_axes("logsumexp"),
        # g times the softmax
        gradient=lambda b, n, g: [b("Mul", g, b("Exp", b("Sub", n.inputs[0], n.outputs[0])))],
        speed=streaming(EXPONENTIAL, 3.3, reductions("LogSumExp", [(1,)])),
        flops=operand_size(13),  # a maximum, a difference, an exponential and a sum for each
        scratch_elements=operand_size(2),  # x - max and its exponential
        prefers_planes=True,
    ),
    OpRule(
        op="Moments", infer=_infer(results=2), axes=_axes("moments"), gradient=_moments_gradient,
        speed=streaming(READING, 8.1, reductions("Moments", [(2, 3, 4)])), flops=operand_size(4),
        scratch_elements=operand_size(2),  # the centred copy and its square, which onnxruntime makes
    ),
    OpRule(
        op="Normalize", infer=_infer_normalize, axes=broadcast_axes, gradient=_normalize_gradient,
        speed=streaming(ARITHMETIC, 23, _probes_normalize),
        flops=operand_size(2), scratch_elements=operand_size(1),
    ),
    OpRule(
        op="Softmax", infer=_infer_softmax, gradient=_softmax_gradient, scratch_elements=no_cost,
        expand=lambda build, node: [build("Exp", *_log_softmax(build, node))],
    ),
    OpRule(
        op="LogSoftmax", infer=_infer_softmax, gradient=_softmax_gradient, scratch_elements=no_cost,
        expand=_log_softmax,
    ),
)  # fmt: skip
