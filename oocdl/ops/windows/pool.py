"""Max pooling and its gradient. Outside the value lies minus infinity.

The gradient goes to the first maximum of each window, as in PyTorch. It is
gathered: an element looks at every window that touches it (``Inverse`` on the
gradient) and at all that those windows see (``Around`` on the value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, prod

from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.index import Around, AxisRule, Index, Inverse, Plain, Window
from oocdl.graph.ir.op_rule import OpRule, Spec
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.speed import Computing, Heavy, Scale
from oocdl.ops._broadcast import fail, no_second_derivative, plain, same_dtype, size
from oocdl.ops._speed import READING, probe
from oocdl.ops.windows.slides import slides, spatial_letters, window_shape


def _pooled(node: Node, x: Value) -> Shape:
    kernel = node.attrs["kernel_shape"]
    if len(x.shape) != len(kernel) + 2 or not is_float(x.dtype):
        fail(node, f"kernel {list(kernel)} does not fit a {x.dtype} value of shape {list(x.shape)}")
    windows = slides(node, kernel)
    if any(max(slide.pad, slide.pad_after) >= slide.reach for slide in windows):
        fail(node, "its pads are as large as its window: some windows would see nothing")
    return (*x.shape[:2], *window_shape(node, x.shape[2:], windows))


def _infer_grad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, dy = inputs
    if _pooled(node, x) != dy.shape:
        fail(node, f"gradient {list(dy.shape)} is not of the pooling of {list(x.shape)}")
    return [(x.shape, same_dtype(node, [x.dtype, dy.dtype]))]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    (x, *windows), y = inputs, outputs[0]
    letters, outer = spatial_letters(len(x) - 2), (plain("n", x[0]), plain("c", x[1]))
    fields = [slide.fields() for slide in slides(node, node.attrs["kernel_shape"])]
    seen: list[Callable[..., Index]] = [Around, Inverse] if windows else [Window]
    read = tuple((*outer, *(see(c, *f) for c, f in zip(letters, fields, strict=True))) for see in seen)
    extents = {"n": x[0], "c": x[1], **dict(zip(letters, y[2:], strict=True))}
    return AxisRule(read, ((*outer, *map(Plain, letters)),), extents)


def _flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    gradient = node.op == "MaxPoolGrad"
    windows = inputs[1] if gradient else outputs[0]
    return size(windows) * size(node.attrs["kernel_shape"]) + size(outputs[0]) * gradient


def _speed(op: str) -> Computing:

    def kind(step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int) -> tuple[str, int]:
        return op, max(prod(step.attrs["kernel_shape"]), 1)

    def probes(scale: Scale) -> Iterator[Heavy]:
        edge = max(int(64 * scale.share ** (1 / 3)) // 2 * 2, 4)
        shapes = [(1, 8, *(edge,) * 3), (1, 8, *(edge // 2,) * 3)]
        for kernel in (2, 3):
            slides = {"strides": (2,) * 3, "dilations": (1,) * 3, "pads": (kernel // 3,) * 6}
            operands = shapes if op == "MaxPoolGrad" else shapes[:1]
            yield op, kernel**3, probe(op, *operands, **slides, kernel_shape=(kernel,) * 3)

    return Computing(like=READING, kind=kind, probes=probes)


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="MaxPool", infer=lambda node, inputs: [(_pooled(node, inputs[0]), inputs[0].dtype)],
        gradient=lambda b, n, g: [b("MaxPoolGrad", n.inputs[0], g, **n.attrs)],
        axes=_axes, speed=_speed("MaxPool"), flops=_flops, fill=-inf,
        # the int64 indices that PyTorch makes beside the result
        scratch_elements=lambda node, inputs, outputs: 2 * size(outputs[0]),
    ),
    OpRule(
        op="MaxPoolGrad", infer=_infer_grad, gradient=no_second_derivative,
        axes=_axes, speed=_speed("MaxPoolGrad"), flops=_flops, fill=-inf,
        # the pooled value and its int64 indices, and the gradient before it is cropped
        scratch_elements=lambda node, inputs, outputs: 3 * size(inputs[1]) + size(inputs[0]),
    ),
)  # fmt: skip
