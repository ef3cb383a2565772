"""Convolutions of one to three spatial axes, as ONNX has them; no bias, no groups.

    Conv:            y[n,o,l] = sum over c, z of x[n, c, s l + d z - p] w[o,c,z]
    ConvTranspose:   y[n,o,i] = sum over c, z, l with s l + d z - p = i of x[n,c,l] w[c,o,z]
    ConvWeightGrad:  dw[o,c,z] = sum over n, l of x[n, c, s l + d z - p] dy[n,o,l]

The three are each other's gradients (Dumoulin & Visin 2016, arXiv:1603.07285, chapter 4).
``pads`` are begins then ends, as in ONNX. ``ConvTranspose.spatial`` is the output's
spatial shape, which says what ``output_padding`` says. Scratch space is what
`docs/kernel-measurements.md`, section 6, measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule, Index, Inverse, Plain, Whole, Window
from oocdl.graph.ir.op_rule import Builder, OpRule, Product, Spec
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.ops._broadcast import fail, is_float, no_second_derivative, plain, same_dtype, size, summed_dtype
from oocdl.ops.windows.conv_speed import CONV, CONV_TRANSPOSE, CONV_WEIGHT_GRAD

SPATIAL = "dhw"
"""Letters of the spatial axes, aligned from the right."""


@dataclass(frozen=True)
class Slide:
    """The geometry of a window that slides along one axis."""

    kernel: int
    stride: int
    dilation: int
    pad: int
    """Padding before the axis."""
    pad_after: int

    @property
    def reach(self) -> int:
        """The extent of the dilated window."""
        return self.dilation * (self.kernel - 1) + 1

    def count(self, extent: int) -> int:
        """Return the number of windows along an axis of ``extent``."""
        return (extent + self.pad + self.pad_after - self.reach) // self.stride + 1

    def span(self, windows: int) -> int:
        """Return the extent that so many windows cover."""
        return (windows - 1) * self.stride + self.reach

    def fields(self) -> tuple[int, int, int, int]:
        """Return the arguments of an index expression, after its letter."""
        return self.kernel, self.stride, self.dilation, self.pad


def slides(node: Node, kernel: Sequence[int]) -> list[Slide]:
    """Return the window of each spatial axis; raises ModelError for attributes of wrong length or sign."""
    rank = len(kernel)
    strides, dilations, pads = (node.attrs[name] for name in ("strides", "dilations", "pads"))
    if (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank):
        fail(node, f"strides, dilations and pads do not fit a kernel of {rank} axes")
    if min((*strides, *dilations, *kernel)) < 1 or min(pads) < 0:
        fail(node, "strides, dilations and kernel must be positive, pads not negative")
    return [Slide(kernel[i], strides[i], dilations[i], pads[i], pads[rank + i]) for i in range(rank)]


def spatial_letters(rank: int) -> str:
    """Return the letters of ``rank`` spatial axes."""
    return SPATIAL[3 - rank :]


def window_shape(node: Node, spatial: Sequence[int], windows: Sequence[Slide]) -> Shape:
    """Return how many windows there are along each axis of ``spatial``."""
    found = tuple(slide.count(extent) for slide, extent in zip(windows, spatial, strict=True))
    if min(found, default=1) < 1:
        fail(node, f"its window does not fit into spatial shape {list(spatial)}")
    return found


def _operands(node: Node, inputs: Sequence[Value]) -> tuple[Shape, Shape, str]:
    """Return shapes and dtype of the two operands, checked."""
    dtype = same_dtype(node, [value.dtype for value in inputs])
    first, second = (value.shape for value in inputs)
    if not is_float(dtype):
        fail(node, f"its operands must be floating point, not {dtype}")
    if len(first) != len(second) or not 3 <= len(first) <= 5:
        fail(node, f"{list(first)} and {list(second)} are not of one to three spatial axes")
    return first, second, dtype


def _infer_conv(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, w, dtype = _operands(node, inputs)
    if x[1] != w[1]:
        fail(node, f"{x[1]} input channels, but its weight has {w[1]} (it takes no groups)")
    return [((x[0], w[0], *window_shape(node, x[2:], slides(node, w[2:]))), dtype)]


def _infer_transpose(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, w, dtype = _operands(node, inputs)
    if x[1] != w[0]:
        fail(node, f"{x[1]} input channels, but its weight has {w[0]}")
    spatial = tuple(node.attrs["spatial"])
    windows = window_shape(node, spatial, slides(node, w[2:]))
    if any(count < extent for count, extent in zip(windows, x[2:], strict=True)):
        fail(node, f"output shape {list(spatial)} is too small for {list(x[2:])}")
    return [((x[0], w[1], *spatial), dtype)]


def _infer_weight_grad(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, dy, dtype = _operands(node, inputs)
    kernel = tuple(node.attrs["kernel_shape"])
    if x[0] != dy[0] or window_shape(node, x[2:], slides(node, kernel)) != dy[2:]:
        fail(node, f"gradient {list(dy)} is not of {list(x)} under a kernel of {list(kernel)}")
    return [((dy[1], x[1], *kernel), summed_dtype(dtype))]


def _rounded_letters(node: Node) -> frozenset[str]:
    """Return letters that may not be cut: results of bfloat16 are rounded once, not as parts of a sum."""
    return frozenset("c") if "precision" in node.attrs else frozenset()


def _axes_conv(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    (x, w), y = inputs, outputs[0]
    letters = spatial_letters(len(x) - 2)
    windows = slides(node, w[2:])
    moving = (Window(c, *slide.fields()) for c, slide in zip(letters, windows, strict=True))
    return AxisRule(
        inputs=(
            (plain("n", x[0]), plain("c", x[1]), *moving),
            (plain("o", w[0]), plain("c", w[1]), *map(Whole, w[2:])),
        ),
        outputs=((plain("n", y[0]), plain("o", y[1]), *map(Plain, letters)),),
        extents={"n": x[0], "c": x[1], "o": w[0], **dict(zip(letters, y[2:], strict=True))},
        uncut=_rounded_letters(node),
        combine="sum",
    )


def _axes_transpose(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    (x, w), y = inputs, outputs[0]
    letters = spatial_letters(len(x) - 2)
    windows = slides(node, w[2:])
    moving = (Inverse(c, *slide.fields()) for c, slide in zip(letters, windows, strict=True))
    return AxisRule(
        inputs=(
            (plain("n", x[0]), plain("c", x[1]), *moving),
            (plain("c", w[0]), plain("o", w[1]), *map(Whole, w[2:])),
        ),
        outputs=((plain("n", y[0]), plain("o", y[1]), *map(Plain, letters)),),
        extents={"n": x[0], "c": x[1], "o": w[1], **dict(zip(letters, y[2:], strict=True))},
        uncut=_rounded_letters(node),
        combine="sum",
    )


def _axes_weight_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    (x, dy), dw = inputs, outputs[0]
    letters = spatial_letters(len(x) - 2)
    windows = slides(node, dw[2:])
    moving = (Window(c, *slide.fields()) for c, slide in zip(letters, windows, strict=True))
    taps = [f"k{letter}" for letter in letters]
    inner: tuple[Index | None, ...] = tuple(map(Plain, letters))
    return AxisRule(
        inputs=(
            (plain("n", x[0]), plain("c", x[1]), *moving),
            (plain("n", dy[0]), plain("o", dy[1]), *inner),
        ),
        outputs=((plain("o", dw[0]), plain("c", dw[1]), *map(plain, taps, dw[2:])),),
        extents={
            **{"n": x[0], "c": x[1], "o": dy[1]},
            **dict(zip(letters, dy[2:], strict=True)),
            **dict(zip(taps, dw[2:], strict=True)),
        },
        uncut=frozenset(taps),
        combine="sum",
    )


def _sliding(node: Node) -> dict[str, tuple[int, ...]]:
    """Return the attributes that all three operators share."""
    return {name: tuple(node.attrs[name]) for name in ("strides", "pads", "dilations")}


def _gradient_conv(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    dy, (x, w), attrs = grads[0], node.inputs, _sliding(node)
    if dy is None:
        return [None, None]
    spatial, kernel = build.shape(x)[2:], build.shape(w)[2:]
    return [
        build("ConvTranspose", dy, w, spatial=spatial, **attrs),
        build("ConvWeightGrad", x, dy, kernel_shape=kernel, **attrs),
    ]


def _gradient_transpose(build: Builder, node: Node, grads: Sequence[str | None]) -> Sequence[str | None]:
    dy, (x, w), attrs = grads[0], node.inputs, _sliding(node)
    if dy is None:
        return [None, None]
    shape = build.shape(x)
    # An output padding of a whole stride leaves windows at the end that x does not have.
    windows = slides(node, build.shape(w)[2:])
    for axis, slide in enumerate(windows, start=2):
        excess = slide.count(build.shape(dy)[axis]) - shape[axis]
        if excess:
            stop = build.shape(dy)[axis] - excess * slide.stride
            dy = build("Slice", dy, axis=axis, start=0, stop=stop, step=1)
    kernel = build.shape(w)[2:]
    return [
        build("Conv", dy, w, **attrs),
        build("ConvWeightGrad", dy, x, kernel_shape=kernel, **attrs),
    ]


def _flops_conv(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * size(outputs[0]) * size(inputs[1][1:])


def _flops_transpose(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * size(inputs[0]) * size(inputs[1][1:])


def _flops_weight_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * size(inputs[1]) * size(outputs[0][1:])


def _copies(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count a copy of each operand and of the result, for padding and oneDNN's blocked layouts.

    Channels are rounded up to blocks of 16 there. Weights are copied once more, to lie as the data does.
    """
    weights = outputs[0] if node.op == "ConvWeightGrad" else inputs[1]
    return size(weights) + sum(
        (shape[0] if place else -(-shape[0] // 16) * 16) * (-(-shape[1] // 16) * 16) * size(shape[2:])
        for place, shape in _blocked(node, inputs, outputs)
    )


def _blocked(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> list[tuple[bool, Shape]]:
    """Return every operand, and whether its first axis is the batch, which is not blocked."""
    weight = 2 if node.op == "ConvWeightGrad" else 1
    return [(place != weight, shape) for place, shape in enumerate((*inputs, *outputs))]


def _scratch_transpose(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the copies, the uncropped result, and onnxruntime's im2col of one sample.

    The im2col of 32 x 27 x 131072 elements takes 448 MB (`docs/kernel-measurements.md`, section 6). At stride
    one the engines run a plain Conv with the flipped weight instead, which has no such buffer.
    """
    x, w = inputs
    windows = slides(node, w[2:])
    natural = size([slide.span(extent) for slide, extent in zip(windows, x[2:], strict=True)])
    columns = 0 if set(node.attrs["strides"]) == {1} else size(w[1:]) * size(x[2:])
    return _copies(node, inputs, outputs) + x[0] * w[1] * natural + size(w) + columns


def _scratch_weight_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the copies, and those of thin slabs, whose operands oneDNN copies once more.

    How much of ``x`` is padding is not known here.
    """
    x, dy = inputs
    windows = slides(node, outputs[0][2:])
    inside = [max(n - 2 * (slide.reach - 1), 1) for n, slide in zip(x[2:], windows, strict=True)]
    thin = len(x) == 5 and x[0] * x[1] * size(inside[:2]) <= THIN_SLAB_ELEMENTS
    return _copies(node, inputs, outputs) + (size(x) + size(dy) if thin else 0)


RULES: tuple[OpRule, ...] = (
    OpRule(
        op="Conv",
        infer=_infer_conv,
        gradient=_gradient_conv,
        axes=_axes_conv,
        speed=CONV,
        flops=_flops_conv,
        scratch_elements=_copies,
        product=Product(data=(0,)),
    ),
    OpRule(
        op="ConvTranspose",
        infer=_infer_transpose,
        gradient=_gradient_transpose,
        axes=_axes_transpose,
        speed=CONV_TRANSPOSE,
        flops=_flops_transpose,
        scratch_elements=_scratch_transpose,
        product=Product(data=(0,)),
    ),
    OpRule(
        op="ConvWeightGrad",
        infer=_infer_weight_grad,
        gradient=no_second_derivative,
        axes=_axes_weight_grad,
        speed=CONV_WEIGHT_GRAD,
        flops=_flops_weight_grad,
        scratch_elements=_scratch_weight_grad,
        product=Product(data=(0, 1)),
    ),
)
