"""Moments and Normalize: every norm (batch, instance, layer, group) is these two.

``Moments(x){axes} -> mean, var`` with ``var`` biased and kept dims; partial moments
combine exactly by Chan's formula. ``Normalize(x, mean, var){axes, eps}`` is
``(x - mean) / sqrt(var + eps)`` where mean and var *are* the moments of x, so
its gradient is the gradient of the whole norm and Moments adds nothing to it:

    dx = r (g - (sum g + xhat sum(g xhat)) / P),  r = (var + eps)^(-1/2),  P = elements reduced

(Ioffe & Szegedy 2015, arXiv:1502.03167). A norm over fixed statistics is Sub, Mul, not Normalize.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec
from oocdl.graph.ir.speed import Given, Probe
from oocdl.ops._broadcast import broadcast_axes, fail, is_float, same_dtype, size
from oocdl.ops._speed import ARITHMETIC, READING, reductions, streaming
from oocdl.ops.reduce import reduced_shape, reduction_axes


def _infer_moments(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    if not is_float(inputs[0].dtype):
        fail(node, f"its operand must be floating point, not {inputs[0].dtype}")
    shape = reduced_shape(node, inputs[0].shape)
    return [(shape, inputs[0].dtype), (shape, inputs[0].dtype)]


def _count(build: Builder, node: Node) -> int:
    shape = build.shape(node.inputs[0])
    return size([shape[axis] for axis in node.attrs["axes"]])


def _moments_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """``dmean / P + 2 (x - mean) dvar / P``; Normalize sends nothing here."""
    x, (mean, _) = node.inputs[0], node.outputs
    found: str | None = None
    if grads[0] is not None:
        share = build("Mul", grads[0], build.like(1 / _count(build, node), x))
        found = build("Expand", share, shape=build.shape(x))
    if grads[1] is not None:
        share = build("Mul", grads[1], build.like(2 / _count(build, node), x))
        spread = build("Mul", build("Sub", x, mean), share)
        found = spread if found is None else build("Add", found, spread)
    return [found]


def _infer_normalize(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, mean, var = inputs
    if mean.shape != reduced_shape(node, x.shape) or var.shape != mean.shape:
        fail(node, f"{list(mean.shape)} and {list(var.shape)} are not moments of {list(x.shape)}")
    return [(x.shape, same_dtype(node, [value.dtype for value in inputs]))]


def _normalize_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """The gradient of the whole norm, to x alone."""
    g = grads[0]
    if g is None:
        return [None, None, None]
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


def _moments_flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 4 * size(inputs[0])


def _normalize_flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * size(outputs[0])


def _moments_scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """The centred copy of the operand and its square, which onnxruntime makes."""
    return 2 * size(inputs[0])


def _normalize_scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return size(outputs[0])


def _normalize_probes(shape: Shape) -> Iterator[Probe]:
    channel: Given = ((1, shape[1], 1, 1, 1), "float32")
    yield Probe("Normalize", ((shape, "float32"), channel, channel), {"axes": (2, 3, 4), "eps": 1e-5})


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Moments",
        infer=_infer_moments,
        gradient=_moments_gradient,
        axes=reduction_axes("moments"),
        speed=streaming(READING, 8.1, reductions("Moments", [(2, 3, 4)])),
        flops=_moments_flops,
        scratch_elements=_moments_scratch,
    ),
    OpRule(
        op="Normalize",
        infer=_infer_normalize,
        gradient=_normalize_gradient,
        axes=broadcast_axes,
        speed=streaming(ARITHMETIC, 23, _normalize_probes),
        flops=_normalize_flops,
        scratch_elements=_normalize_scratch,
    ),
)
