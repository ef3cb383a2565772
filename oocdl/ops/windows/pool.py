"""Max pooling and its gradient. Outside the value lies minus infinity.

The gradient goes to the first maximum of each window, as in PyTorch. It is
gathered: an element looks at every window that touches it (``Inverse`` on the
gradient) and at all that those windows see (``Around`` on the value).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import Around, AxisRule, Inverse, Plain, Window
from oocdl.graph.ir.op_rule import Builder, OpRule, Spec
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.speed import Computing, Given, Heavy, Probe, Scale
from oocdl.ops._broadcast import fail, is_float, no_second_derivative, plain, same_dtype, size
from oocdl.ops._speed import READING
from oocdl.ops.windows.slides import slides, spatial_letters, window_shape


def _pooled(node: Node, x: Value) -> Shape:
    """Return the shape of the pooled value."""
    kernel = node.attrs["kernel_shape"]
    if len(x.shape) != len(kernel) + 2 or not is_float(x.dtype):
        fail(node, f"kernel {list(kernel)} does not fit a {x.dtype} value of shape {list(x.shape)}")
    windows = slides(node, kernel)
    if any(max(slide.pad, slide.pad_after) >= slide.reach for slide in windows):
        fail(node, "its pads are as large as its window: some windows would see nothing")
    return (*x.shape[:2], *window_shape(node, x.shape[2:], windows))


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    return [(_pooled(node, inputs[0]), inputs[0].dtype)]


def _infer_grad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, dy = inputs
    if _pooled(node, x) != dy.shape:
        fail(node, f"gradient {list(dy.shape)} is not of the pooling of {list(x.shape)}")
    return [(x.shape, same_dtype(node, [x.dtype, dy.dtype]))]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    x, y = inputs[0], outputs[0]
    letters = spatial_letters(len(x) - 2)
    windows = slides(node, node.attrs["kernel_shape"])
    moving = (Window(c, *slide.fields()) for c, slide in zip(letters, windows, strict=True))
    return AxisRule(
        inputs=((plain("n", x[0]), plain("c", x[1]), *moving),),
        outputs=((plain("n", y[0]), plain("c", y[1]), *map(Plain, letters)),),
        extents={"n": x[0], "c": x[1], **dict(zip(letters, y[2:], strict=True))},
    )


def _axes_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    x = inputs[0]
    letters = spatial_letters(len(x) - 2)
    windows = slides(node, node.attrs["kernel_shape"])
    outer = (plain("n", x[0]), plain("c", x[1]))
    seen = (Around(c, *slide.fields()) for c, slide in zip(letters, windows, strict=True))
    touching = (Inverse(c, *slide.fields()) for c, slide in zip(letters, windows, strict=True))
    return AxisRule(
        inputs=((*outer, *seen), (*outer, *touching)),
        outputs=((*outer, *map(Plain, letters)),),
        extents={"n": x[0], "c": x[1], **dict(zip(letters, x[2:], strict=True))},
    )


def _gradient(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    if grads[0] is None:
        return [None]
    return [build("MaxPoolGrad", node.inputs[0], grads[0], **node.attrs)]


def _flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count a comparison for each element of each window."""
    return size(outputs[0]) * size(node.attrs["kernel_shape"])


def _flops_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return size(inputs[1]) * size(node.attrs["kernel_shape"]) + size(outputs[0])


def _scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the int64 indices that PyTorch makes beside the result."""
    return 2 * size(outputs[0])


def _scratch_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the pooled value and its int64 indices, and the gradient before it is cropped."""
    return 3 * size(inputs[1]) + size(inputs[0])


def _kind(step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int) -> tuple[str, int]:
    """Return the operator, and the number of elements of its window."""
    return step.op, max(prod(step.attrs["kernel_shape"]), 1)


def _probes(scale: Scale) -> Iterator[Heavy]:
    for x, _, attrs in _windows(scale):
        yield "MaxPool", prod(attrs["kernel_shape"]), Probe("MaxPool", (x,), attrs)


def _probes_grad(scale: Scale) -> Iterator[Heavy]:
    for x, y, attrs in _windows(scale):
        yield "MaxPoolGrad", prod(attrs["kernel_shape"]), Probe("MaxPoolGrad", (x, y), attrs)


def _windows(scale: Scale) -> Iterator[tuple[Given, Given, dict[str, tuple[int, ...]]]]:
    """Yield operand, result and attributes of poolings with windows of two and of three."""
    edge = max(int(64 * scale.share ** (1 / 3)) // 2 * 2, 4)
    for kernel in (2, 3):
        slides = {"strides": (2,) * 3, "dilations": (1,) * 3, "pads": (kernel // 3,) * 6}
        x: Given = ((1, 8, *(edge,) * 3), "float32")
        y: Given = ((1, 8, *(edge // 2,) * 3), "float32")
        yield x, y, {**slides, "kernel_shape": (kernel,) * 3}


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="MaxPool",
        infer=_infer,
        gradient=_gradient,
        axes=_axes,
        speed=Computing(like=READING, kind=_kind, probes=_probes),
        flops=_flops,
        scratch_elements=_scratch,
        fill=-inf,
    ),
    OpRule(
        op="MaxPoolGrad",
        infer=_infer_grad,
        gradient=no_second_derivative,
        axes=_axes_grad,
        speed=Computing(like=READING, kind=_kind, probes=_probes_grad),
        flops=_flops_grad,
        scratch_elements=_scratch_grad,
        fill=-inf,
    ),
)
