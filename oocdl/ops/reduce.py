"""Reductions: ReduceSum, ReduceMax, LogSumExp. Dims are kept; axes sorted, non-negative.

Cut reductions are combined exactly: sums by adding, LogSumExp because the partial
results are LogSumExps themselves, ``lse(lse(a), lse(b)) = lse(a, b)``.
"""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule
from oocdl.graph.ir.op_rule import Axes, Builder, Infer, OpRule, Spec, no_scratch
from oocdl.ops._broadcast import fail, is_float, plain, size
from oocdl.ops._speed import EXPONENTIAL, READING, reductions, streaming


def reduced_shape(node: Node, shape: Shape) -> Shape:
    """Return the operand's shape with extent one on the attribute ``axes``."""
    axes = tuple(node.attrs["axes"])
    if list(axes) != sorted(set(axes)) or any(not 0 <= axis < len(shape) for axis in axes):
        fail(node, f"axes {list(axes)} are not sorted axes of a value of rank {len(shape)}")
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def reduction_axes(combine: str) -> Axes:
    """Return the axis rule: letters ``a0, a1, ..``, of which the outputs lack the reduced ones."""

    def axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
        gone = node.attrs["axes"]
        operand = tuple(plain(f"a{axis}", extent) for axis, extent in enumerate(inputs[0]))
        kept = tuple(None if axis in gone else index for axis, index in enumerate(operand))
        return AxisRule(
            inputs=(operand,),
            outputs=(kept,) * len(outputs),
            extents={f"a{axis}": extent for axis, extent in enumerate(inputs[0])},
            combine=combine,
        )

    return axes


def _infer(floats: bool) -> Infer:
    def infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
        x = inputs[0]
        if x.dtype == "bool" or (floats and not is_float(x.dtype)):
            wanted = "floating point" if floats else "a number"
            fail(node, f"its operand must be {wanted}, not {x.dtype}")
        return [(reduced_shape(node, x.shape), x.dtype)]

    return infer


def _sum_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """Give every reduced element the same gradient."""
    if grads[0] is None:
        return [None]
    return [build("Expand", grads[0], shape=build.shape(node.inputs[0]))]


def _max_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """Share the gradient equally between the maxima, as ``torch.amax``."""
    if grads[0] is None:
        return [None]
    x, y = node.inputs[0], node.outputs[0]
    here = build("Cast", build("Equal", x, y), to=build.dtype(x))
    share = build("Div", grads[0], build("ReduceSum", here, axes=node.attrs["axes"]))
    return [build("Mul", here, share)]


def _lse_gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    """``g exp(x - y)``: the softmax."""
    if grads[0] is None:
        return [None]
    return [build("Mul", grads[0], build("Exp", build("Sub", node.inputs[0], node.outputs[0])))]


def _operand_size(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return size(inputs[0])


def _lse_flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count a maximum, a difference, an exponential and a sum for each element."""
    return 13 * size(inputs[0])


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="ReduceSum",
        infer=_infer(floats=False),
        gradient=_sum_gradient,
        axes=reduction_axes("sum"),
        speed=streaming(READING, 70, reductions("ReduceSum", [(2, 3, 4)])),
        flops=_operand_size,
        scratch_elements=no_scratch,
    ),
    OpRule(
        op="ReduceMax",
        infer=_infer(floats=False),
        gradient=_max_gradient,
        axes=reduction_axes("max"),
        speed=streaming(READING, 73, reductions("ReduceMax", [])),
        flops=_operand_size,
        scratch_elements=no_scratch,
        prefers_planes=True,
    ),
    OpRule(
        op="LogSumExp",
        infer=_infer(floats=True),
        gradient=_lse_gradient,
        axes=reduction_axes("logsumexp"),
        speed=streaming(EXPONENTIAL, 3.3, reductions("LogSumExp", [(1,)])),
        flops=_lse_flops,
        # x - max and its exponential are copies of the operand.
        scratch_elements=lambda node, inputs, outputs: 2 * _operand_size(node, inputs, outputs),
        prefers_planes=True,
    ),
)
