"""Reductions, and what is made of them: norms, Softmax. Dims are kept; axes sorted, non-negative.

Cut reductions are combined exactly: sums by adding, LogSumExp because the partial results are LogSumExps
themselves, ``lse(lse(a), lse(b)) = lse(a, b)``, moments by Chan's formula. Softmax and LogSoftmax are
rewritten, so that their axis may be cut: ``exp(x - lse(x))`` and ``x - lse(x)``.

Every norm (batch, instance, layer, group) is ``Moments(x){axes} -> mean, var`` with a biased ``var``, and
``Normalize(x, mean, var){axes, eps}``, which is ``(x - mean) / sqrt(var + eps)`` where mean and var *are* the
moments of x. So its gradient is that of the whole norm, and Moments adds nothing to it:

    dx = r (g - (sum g + xhat sum(g xhat)) / P),  r = (var + eps)^(-1/2),  P = elements reduced

(Ioffe & Szegedy 2015, arXiv:1502.03167). A norm over fixed statistics is Sub, Mul, not Normalize.
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule
from oocdl.graph.ir.op_rule import Axes, Builder, Infer, OpRule, Spec, no_cost
from oocdl.ops._broadcast import (
    broadcast_axes,
    extents_of,
    fail,
    is_float,
    letters,
    operand_size,
    same_dtype,
    size,
)
from oocdl.ops._speed import ARITHMETIC, EXPONENTIAL, READING, probe, reductions, streaming


def _reduced(node: Node, shape: Shape) -> Shape:
    """Return the operand's shape with extent one on the attribute ``axes``."""
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
    """Share the gradient equally between the maxima, as ``torch.amax``."""
    x, y = node.inputs[0], node.outputs[0]
    here = build("Cast", build("Equal", x, y), to=build.dtype(x))
    return [build("Mul", here, build("Div", g, build("ReduceSum", here, axes=node.attrs["axes"])))]


# Norms ---------------------------------------------------------------------------------------


def _count(build: Builder, node: Node) -> int:
    return size([build.shape(node.inputs[0])[axis] for axis in node.attrs["axes"]])


def _moments_gradient(
    build: Builder, node: Node, of_mean: str | None, of_var: str | None
) -> Sequence[str | None]:
    """``dmean / P + 2 (x - mean) dvar / P``; Normalize sends nothing here."""
    x, (mean, _) = node.inputs[0], node.outputs
    found: str | None = None
    if of_mean is not None:
        share = build("Mul", of_mean, build.like(1 / _count(build, node), x))
        found = build("Expand", share, shape=build.shape(x))
    if of_var is not None:
        share = build("Mul", of_var, build.like(2 / _count(build, node), x))
        spread = build("Mul", build("Sub", x, mean), share)
        found = spread if found is None else build("Add", found, spread)
    return [found]


def _infer_normalize(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, mean, var = inputs
    if mean.shape != _reduced(node, x.shape) or var.shape != mean.shape:
        fail(node, f"{list(mean.shape)} and {list(var.shape)} are not moments of {list(x.shape)}")
    return [(x.shape, same_dtype(node, [value.dtype for value in inputs]))]


def _normalize_gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """The gradient of the whole norm, to x alone."""
    x, mean, var = node.inputs
    axes = node.attrs["axes"]
    maker = next((other for other in reversed(build.nodes) if other.outputs == (mean, var)), None)
    if maker is None or maker.op != "Moments" or maker.inputs != (x,) or maker.attrs["axes"] != axes:
        fail(node, "normalizes by others than the moments of its own operand, of which it has no gradient")
    # Recomputed, so that what was normalized need not be stored.
    xhat = build("Normalize", x, mean, var, **node.attrs)
    scale = build("Reciprocal", build("Sqrt", build("Add", var, build.like(node.attrs["eps"], x))))
    share = build.like(1 / _count(build, node), x)
    offset = build("Mul", build("ReduceSum", g, axes=axes), share)
    slope = build("Mul", build("ReduceSum", build("Mul", g, xhat), axes=axes), share)
    centred = build("Sub", build("Sub", g, offset), build("Mul", xhat, slope))
    return [build("Mul", centred, scale), None, None]


# Softmax -------------------------------------------------------------------------------------


def _infer_softmax(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    axis = node.attrs["axis"]
    if not 0 <= axis < len(inputs[0].shape):
        fail(node, f"axis {axis} is not an axis of a value of rank {len(inputs[0].shape)}")
    if not is_float(inputs[0].dtype):
        fail(node, f"its operand must be floating point, not {inputs[0].dtype}")
    return [(inputs[0].shape, inputs[0].dtype)]


def _log_softmax(build: Builder, node: Node) -> Sequence[str]:
    x = node.inputs[0]
    return [build("Sub", x, build("LogSumExp", x, axes=(node.attrs["axis"],)))]


def _softmax_gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """``y (g - sum(g y))``."""
    product = build("Mul", g, node.outputs[0])
    total = build("ReduceSum", product, axes=(node.attrs["axis"],))
    return [build("Sub", product, build("Mul", node.outputs[0], total))]


def _log_softmax_gradient(build: Builder, node: Node, g: str) -> Sequence[str | None]:
    """``g - exp(y) sum(g)``."""
    total = build("ReduceSum", g, axes=(node.attrs["axis"],))
    return [build("Sub", g, build("Mul", build("Exp", node.outputs[0]), total))]


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="ReduceSum",
        infer=_infer(floats=False),
        gradient=lambda b, n, g: [b("Expand", g, shape=b.shape(n.inputs[0]))],
        axes=_axes("sum"),
        speed=streaming(READING, 70, reductions("ReduceSum", [(2, 3, 4)])),
        flops=operand_size(1),
        scratch_elements=no_cost,
    ),
    OpRule(
        op="ReduceMax",
        infer=_infer(floats=False),
        gradient=_max_gradient,
        axes=_axes("max"),
        speed=streaming(READING, 73, reductions("ReduceMax", [])),
        flops=operand_size(1),
        scratch_elements=no_cost,
        prefers_planes=True,
    ),
    OpRule(
        op="LogSumExp",
        infer=_infer(),
        # g times the softmax
        gradient=lambda b, n, g: [b("Mul", g, b("Exp", b("Sub", n.inputs[0], n.outputs[0])))],
        axes=_axes("logsumexp"),
        speed=streaming(EXPONENTIAL, 3.3, reductions("LogSumExp", [(1,)])),
        flops=operand_size(13),  # a maximum, a difference, an exponential and a sum for each
        scratch_elements=operand_size(2),  # x - max and its exponential
        prefers_planes=True,
    ),
    OpRule(
        op="Moments",
        infer=_infer(results=2),
        gradient=_moments_gradient,
        axes=_axes("moments"),
        speed=streaming(READING, 8.1, reductions("Moments", [(2, 3, 4)])),
        flops=operand_size(4),
        scratch_elements=operand_size(2),  # the centred copy and its square, which onnxruntime makes
    ),
    OpRule(
        op="Normalize",
        infer=_infer_normalize,
        gradient=_normalize_gradient,
        axes=broadcast_axes,
        speed=streaming(
            ARITHMETIC,
            23,
            lambda shape: [
                probe("Normalize", shape, *((1, shape[1], 1, 1, 1),) * 2, axes=(2, 3, 4), eps=1e-5)
            ],
        ),
        flops=operand_size(2),
        scratch_elements=operand_size(1),
    ),
    OpRule(
        op="Softmax",
        infer=_infer_softmax,
        gradient=_softmax_gradient,
        expand=lambda build, node: [build("Exp", *_log_softmax(build, node))],
        scratch_elements=no_cost,
    ),
    OpRule(
        op="LogSoftmax",
        infer=_infer_softmax,
        gradient=_log_softmax_gradient,
        expand=_log_softmax,
        scratch_elements=no_cost,
    ),
)
