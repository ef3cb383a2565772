"""Convolutions of one to three spatial axes, as ONNX has them; no bias.

    Conv:            y[n,o,l] = sum over c, z of x[n, c, s l + d z - p] w[o,c,z]
    ConvTranspose:   y[n,o,i] = sum over c, z, l with s l + d z - p = i of x[n,c,l] w[c,o,z]
    ConvWeightGrad:  dw[o,c,z] = sum over n, l of x[n, c, s l + d z - p] dy[n,o,l]

Of ``grouped`` ones operands have an axis of groups before their channels, data ``[n, g, c, space]`` and
weights ``[g, o, c, taps]``: one more letter that may be cut.

The three are each other's gradients (Dumoulin & Visin 2016, arXiv:1603.07285, chapter 4).
``pads`` are begins then ends, as in ONNX. ``ConvTranspose.spatial`` is the output's
spatial shape, which says what ``output_padding`` says. Scratch space is what
`docs/explanation/kernel-measurements.md`, section 7, measured.

A kind of speed is one of two or three spatial axes, "point" (kernel 1), "window" or "block" (a transposed
one whose windows touch and do not overlap), strided or not; its size is the elements of the window times the
smaller count of channels. Convolutions with groups are "grouped", or "depthwise" if each channel is seen
alone; channels are then those of a group. The gradient of a window's weights in a thin slab is a kind of its
own, for engines that say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

from oocdl.graph.ir.graph import Node, Shape, Value
from oocdl.graph.ir.index import AxisRule, Inverse, Plain, Whole, Window
from oocdl.graph.ir.op_rule import Builder, Cost, Gradient, OpRule, Product, Spec
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS, is_thin
from oocdl.graph.ir.speed import Computing, Heavy, Scale
from oocdl.ops._broadcast import fail, no_second_derivative, plain, same_float, size, summed_dtype
from oocdl.ops._speed import READING, probe
from oocdl.ops.windows.slides import slides, spatial_letters, window_shape


def _apart(node: Node, shape: Shape, place: int) -> tuple[Shape, Shape]:
    """Return the groups of data (``place`` 1) or weights (0), as the part of a shape, and the rest of it."""
    if not node.attrs.get("grouped"):
        return (), shape
    return shape[place : place + 1], (*shape[:place], *shape[place + 1 :])


def _sides(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of the first operand, of the other data, and of the weights."""
    makes_weights = node.op == "ConvWeightGrad"
    return inputs[0], *((inputs[1], outputs[0]) if makes_weights else (outputs[0], inputs[1]))


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    dtype, grouped = same_float(node, inputs), bool(node.attrs.get("grouped"))
    first, second = (value.shape for value in inputs)
    if len(first) != len(second) or not 3 + grouped <= len(first) <= 5 + grouped:
        fail(node, f"{list(first)} and {list(second)} are not of one to three spatial axes")
    makes_weights, transposes = node.op == "ConvWeightGrad", node.op == "ConvTranspose"
    if grouped and first[1] != second[1 if makes_weights else 0]:
        fail(node, f"{list(first)} and {list(second)} have different numbers of groups")
    groups, x = _apart(node, first, 1)
    if makes_weights:
        (_, dy), kernel = _apart(node, second, 1), tuple(node.attrs["kernel_shape"])
        if x[0] != dy[0] or window_shape(node, x[2:], slides(node, kernel)) != dy[2:]:
            fail(node, f"gradient {list(dy)} is not of {list(x)} under a kernel of {list(kernel)}")
        return [((*groups, dy[1], x[1], *kernel), summed_dtype(dtype))]
    _, w = _apart(node, second, 0)
    read, made = w[:2] if transposes else w[1::-1]
    if x[1] != read:
        fail(node, f"{x[1]} input channels, but its weight has {read}")
    spatial = tuple(node.attrs["spatial"]) if transposes else x[2:]
    windows = window_shape(node, spatial, slides(node, w[2:]))
    if transposes and any(count < extent for count, extent in zip(windows, x[2:], strict=True)):
        fail(node, f"output shape {list(spatial)} is too small for {list(x[2:])}")
    return [((x[0], *groups, made, *(spatial if transposes else windows)), dtype)]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    """Return the axis rule of all three: windows move over the first operand, or lie around its elements."""
    makes_weights, transposes = node.op == "ConvWeightGrad", node.op == "ConvTranspose"
    shapes = zip(_sides(node, inputs, outputs), (1, 1, 0), strict=True)
    (groups, x), (_, y), (_, w) = (_apart(node, shape, place) for shape, place in shapes)
    group, letters = tuple(map(plain, "g", groups)), spatial_letters(len(x) - 2)
    seen = Inverse if transposes else Window
    windows = zip(letters, slides(node, w[2:]), strict=True)
    taps = [f"k{letter}" for letter in letters] if makes_weights else []
    inner = map(plain, taps, w[2:]) if makes_weights else map(Whole, w[2:])
    read = (plain("n", x[0]), *group, plain("c", x[1]), *(seen(c, *one.fields()) for c, one in windows))
    other = (plain("n", y[0]), *group, plain("o", y[1]), *map(Plain, letters))
    weights = (*group, *map(plain, "co" if transposes else "oc", w), *inner)
    # Results of bfloat16 are rounded once, not as parts of a sum.
    rounded = "c" if "precision" in node.attrs and not makes_weights else ""
    extents = {**dict(zip("g", groups, strict=False)), "n": x[0], "c": x[1], "o": y[1]}
    extents |= zip((*letters, *taps), (*y[2:], *w[2:]), strict=False)
    operands, made = ((read, other), weights) if makes_weights else ((read, weights), other)
    return AxisRule(operands, (made,), extents, uncut=frozenset((*taps, *rounded)), combine="sum")


def _sliding(node: Node) -> dict[str, Any]:
    grouped = {"grouped": True} if node.attrs.get("grouped") else {}
    return {**{name: tuple(node.attrs[name]) for name in ("strides", "pads", "dilations")}, **grouped}


def _gradient_conv(build: Builder, node: Node, dy: str) -> Sequence[str | None]:
    (x, w), attrs = node.inputs, _sliding(node)
    spatial, kernel = _apart(node, build.shape(x), 1)[1][2:], _apart(node, build.shape(w), 0)[1][2:]
    return [
        build("ConvTranspose", dy, w, spatial=spatial, **attrs),
        build("ConvWeightGrad", x, dy, kernel_shape=kernel, **attrs),
    ]


def _gradient_transpose(build: Builder, node: Node, dy: str) -> Sequence[str | None]:
    (x, w), attrs = node.inputs, _sliding(node)
    shape = build.shape(x)
    # An output padding of a whole stride leaves windows at the end that x does not have.
    kernel = _apart(node, build.shape(w), 0)[1][2:]
    for axis, slide in enumerate(slides(node, kernel), start=len(shape) - len(kernel)):
        excess = slide.count(build.shape(dy)[axis]) - shape[axis]
        if excess:
            stop = build.shape(dy)[axis] - excess * slide.stride
            dy = build("Slice", dy, axis=axis, start=0, stop=stop, step=1)
    return [build("Conv", dy, w, **attrs), build("ConvWeightGrad", dy, x, kernel_shape=kernel, **attrs)]


def _flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count a multiply-add for each element of a weight's filter at each place of a window."""
    x, y, w = _sides(node, inputs, outputs)
    return 2 * size(x if node.op == "ConvTranspose" else y) * size(_apart(node, w, 0)[1][1:])


def _copies(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count a copy of each operand and of the result, for padding and oneDNN's blocked layouts.

    Channels are rounded up to blocks of 16 there. Weights are copied once more, to lie as the data does.
    """
    *data, weights = _data_and_weights(node, inputs, outputs)
    blocked = [(shape[0], -(-shape[1] // 16) * 16, *shape[2:]) for shape in data]
    filters = (*(-(-extent // 16) * 16 for extent in weights[:2]), *weights[2:])
    return size(weights) + size(filters) + sum(map(size, blocked))


def _data_and_weights(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of the data ``[n, c, space]`` and, last, of the weights; groups are channels."""
    *data, weights = _sides(node, inputs, outputs)
    if node.attrs.get("grouped"):
        data = [(shape[0], shape[1] * shape[2], *shape[3:]) for shape in data]
        weights = (weights[0] * weights[1], *weights[2:])
    return [*data, weights]


def _scratch_transpose(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the copies, the uncropped result, and onnxruntime's im2col of one sample.

    The im2col of 32 x 27 x 131072 elements takes 448 MB
    (`docs/explanation/kernel-measurements.md`, section 7). At stride one the engines run a plain Conv
    with the flipped weight instead, which has no such buffer.
    """
    x, y, w = _data_and_weights(node, inputs, outputs)
    windows = zip(slides(node, w[2:]), x[2:], strict=True)
    natural = size([(extent - 1) * slide.stride + slide.reach for slide, extent in windows])
    columns = 0 if set(node.attrs["strides"]) == {1} else y[1] * size(w[2:]) * size(x[2:])
    return _copies(node, inputs, outputs) + x[0] * y[1] * natural + size(w) + columns


def _scratch_weight_grad(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the copies, and those of thin slabs, whose operands oneDNN copies once more; with groups,
    onnxruntime's im2col of one of them.

    How much of ``x`` is padding is not known here.
    """
    x, dy, dw = _data_and_weights(node, inputs, outputs)
    windows = slides(node, dw[2:])
    inside = [max(n - 2 * (slide.reach - 1), 1) for n, slide in zip(x[2:], windows, strict=True)]
    thin = len(x) == 5 and x[0] * x[1] * size(inside[:2]) <= THIN_SLAB_ELEMENTS
    columns = x[0] * size(dy[2:]) * size(dw[2:]) if node.attrs.get("grouped") else 0
    return _copies(node, inputs, outputs) + (size(x) + size(dy) if thin else 0) + columns


# Speed ---------------------------------------------------------------------------------------

CHANNELS, FEW_CHANNELS = (1, 4, 16, 64, 256), (1, 16, 64, 256)
"""Channels that are measured, in float32 and in bfloat16."""
_BLOCKS = {"ConvTranspose": ((2, 2),)}
"""Operator -> (extent of the window, stride) that it is measured with besides those of every convolution."""
_GROUPED = ((1, 3, 1), (1, 3, 2), (4, 3, 1), (4, 3, 2))
_GROUPED_MORE = {2: ((1, 7, 1), (16, 3, 1)), 3: ((1, 5, 1), (16, 3, 1))}
"""(channels of a group, extent of the window, stride) that are measured; in float32 further ones, by axes."""


def _weights(step: Instruction, shapes: Sequence[Shape]) -> Shape:
    return step.kernel_shapes[0] if step.op == "ConvWeightGrad" else shapes[1]


def _kind(step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int) -> tuple[str, int]:
    weight, grouped = _weights(step, shapes), bool(step.attrs.get("grouped"))
    weight = weight[1:] if grouped else weight
    taps, channels = prod(weight[2:]), min(weight[:2])
    strided = any(stride != 1 for stride in step.attrs.get("strides") or ())
    what = "window" if taps > 1 else "point"
    if grouped:
        what = "grouped" if channels > 1 else "depthwise"
    elif step.op == "ConvTranspose" and strided and tuple(step.attrs["strides"]) == tuple(weight[2:]):
        what = "block"
    elif taps > 1 and not strided and step.op == "ConvWeightGrad":
        what = "thin window" if is_thin(step.operands[0].shape, thin_slab_elements) else what
    name = f"{step.op} {3 if len(weight) > 4 else 2}d {'strided ' * strided}{what}"
    return name, max(taps * channels, 1 - grouped)


def _probes(scale: Scale, op: str) -> Iterator[Heavy]:
    """Yield probes of every kind of one convolution, with several numbers of channels.

    Those with groups have the channels that networks have, as many a group as they have, and one (depthwise).
    """
    for axes in (2, 3):
        for channels in FEW_CHANNELS if scale.few else CHANNELS:
            # As networks have them: the more channels, the fewer places; volumes have more than images.
            most = scale.share * (1 << (21 if axes == 3 else 20)) / max(channels, 16)
            places = max(most / (4 if channels > 64 else 1), 64)
            edge = max(int(places ** (1 / axes)) // 2 * 2, 2)
            for kernel, stride in ((1, 1), (3, 1), (1, 2), (3, 2), *_BLOCKS.get(op, ())):
                depends_on_slab = (op, axes, kernel, stride) == ("ConvWeightGrad", 3, 3, 1)
                if depends_on_slab and scale.thin_slab_elements:
                    yield from _slab_gradients(channels, places, scale.thin_slab_elements)
                else:
                    yield _heavy(op, channels, (edge,) * axes, kernel, stride)
        for channels, kernel, stride in (*_GROUPED, *(() if scale.few else _GROUPED_MORE[axes])):
            edge = max(int((scale.share * (1 << 15)) ** (1 / axes)) // 2 * 2, kernel)
            groups = 32 // channels if scale.share == 1 else 2
            yield _heavy(op, channels, (edge,) * axes, kernel, stride, groups)


def _heavy(
    op: str, channels: int, space: Shape, kernel: int, stride: int, groups: int = 0, what: str = ""
) -> Heavy:
    """Return a probe of one convolution, of ``channels`` to at least 16 channels, and its kind and size.

    With ``groups``, if they are not 0, each of them is of ``channels`` to as many.
    """
    axes, others = len(space), channels if groups else max(channels, 16)
    taps, group, grouped = (kernel,) * axes, (groups,) * (groups > 0), {"grouped": True} if groups else {}
    pads = ((kernel - 1) // 2,) * (2 * axes)
    slides = {"strides": (stride,) * axes, "dilations": (1,) * axes, "pads": pads}
    attrs: dict[str, Any] = {**slides, **grouped}
    x, w = (1, *group, channels, *space), (*group, others, channels, *taps)
    y = (1, *group, others, *((extent + stride - 1) // stride for extent in space))
    operands = {"Conv": (x, w), "ConvTranspose": (y, w), "ConvWeightGrad": (x, y)}[op]
    if op != "Conv":
        attrs |= {"spatial": space} if op == "ConvTranspose" else {"kernel_shape": taps}
    kinds = ("depthwise", "grouped") if groups else ("point", "block" if kernel == stride else "window")
    what = what or kinds[(channels if groups else kernel) > 1]
    name = f"{op} {axes}d {'strided ' * (stride > 1)}{what}"
    return name, channels * prod(taps), probe(op, *operands, **attrs)


def _slab_gradients(channels: int, places: float, thin: int) -> Iterator[Heavy]:
    """Yield probes of the gradient of a window's weights in a thin slab, and in one that is not."""
    edge = int((thin / channels) ** 0.5) + 1
    for what, depth, height in (("thin window", 4, min(edge * edge // 8, 128)), ("window", edge, edge)):
        rows = depth * height
        space = (depth, height, max(int(places / rows), thin // (channels * rows) + 1, 4))
        yield _heavy("ConvWeightGrad", channels, space, 3, 1, what=what)


def _rule(op: str, scratch: Cost, data: tuple[int, ...], gradient: Gradient) -> OpRule:
    speed = Computing(
        like=READING, kind=_kind, probes=partial(_probes, op=op),
        arranged_elements=lambda step, shapes: prod(_weights(step, shapes)),
    )  # fmt: skip
    return OpRule(
        op=op, infer=_infer, gradient=gradient, axes=_axes, speed=speed, flops=_flops,
        scratch_elements=scratch, product=Product(data=data),
    )  # fmt: skip


RULES: tuple[OpRule, ...] = (
    _rule("Conv", _copies, (0,), _gradient_conv),
    _rule("ConvTranspose", _scratch_transpose, (0,), _gradient_transpose),
    _rule("ConvWeightGrad", _scratch_weight_grad, (0, 1), no_second_derivative),
)
