"""Speeds of convolutions: their kinds, and the measurements of each.

A kind is one of two or three spatial axes, "point" (kernel 1) or "window", strided or not; its size is
the elements of the window times the smaller count of channels. Convolutions with groups are "grouped", or
"depthwise" if each channel is seen alone; channels are then those of a group. The gradient of a window's
weights in a thin slab is a kind of its own, for engines that say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.slabs import is_thin
from oocdl.graph.ir.speed import Computing, Given, Heavy, Probe, Scale
from oocdl.ops._speed import READING

CHANNELS, FEW_CHANNELS = (1, 4, 16, 64, 256), (1, 16, 64, 256)
"""Channels that are measured, in float32 and in bfloat16."""

_GROUPED = ((1, 3, 1), (1, 3, 2), (4, 3, 1), (4, 3, 2))
_GROUPED_MORE = {2: ((1, 7, 1), (16, 3, 1)), 3: ((1, 5, 1), (16, 3, 1))}
"""(channels of a group, extent of the window, stride) that are measured; in float32 further ones, by axes."""


def _weights(step: Instruction, shapes: Sequence[Shape], makes_weights: bool) -> Shape:
    """Return the shape of the weights that a convolution reads, or makes."""
    return step.kernel_shapes[0] if makes_weights else shapes[1]


def _kind(
    step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int, makes_weights: bool
) -> tuple[str, int]:
    """Return kind and size of a convolution (see ``Computing.kind``)."""
    weight = _weights(step, shapes, makes_weights)
    grouped = bool(step.attrs.get("grouped"))
    weight = weight[1:] if grouped else weight
    taps, seen = prod(weight[2:]), step.operands[0].shape
    what = "window" if taps > 1 else "point"
    strided = any(stride != 1 for stride in step.attrs.get("strides") or ())
    axes = 3 if len(weight) > 4 else 2
    if grouped:
        what = "grouped" if min(weight[:2]) > 1 else "depthwise"
        return f"{step.op} {axes}d {'strided ' * strided}{what}", taps * min(weight[:2])
    if taps > 1 and not strided and makes_weights and is_thin(seen, thin_slab_elements):
        what = "thin window"
    return f"{step.op} {axes}d {'strided ' * strided}{what}", max(taps * min(weight[:2]), 1)


def _probes(scale: Scale, op: str) -> Iterator[Heavy]:
    """Yield probes of every kind of one convolution, with several numbers of channels."""
    for axes in (2, 3):
        for channels in FEW_CHANNELS if scale.few else CHANNELS:
            # As networks have them: the more channels, the fewer places; volumes have more than images.
            most = scale.share * (1 << (21 if axes == 3 else 20)) / max(channels, 16)
            places = max(most / (4 if channels > 64 else 1), 64)
            edge = max(int(places ** (1 / axes)) // 2 * 2, 2)
            for kernel, stride in ((1, 1), (3, 1), (1, 2), (3, 2)):
                what = f"{axes}d {'strided ' * (stride > 1)}{'window' if kernel > 1 else 'point'}"
                size = channels * kernel**axes
                depends_on_slab = op == "ConvWeightGrad" and what == "3d window"
                if depends_on_slab and scale.thin_slab_elements:
                    yield from _slab_gradients(channels, places, scale.thin_slab_elements)
                else:
                    spaces = (edge,) * axes
                    yield f"{op} {what}", size, _probe(op, channels, spaces, kernel, stride)
        yield from _grouped_probes(scale, op, axes)


def _grouped_probes(scale: Scale, op: str, axes: int) -> Iterator[Heavy]:
    """Yield probes of convolutions with groups: of the channels that networks have, as many a group as they
    have, and one (depthwise)."""
    for channels, kernel, stride in (*_GROUPED, *(() if scale.few else _GROUPED_MORE[axes])):
        edge = max(int((scale.share * (1 << 15)) ** (1 / axes)) // 2 * 2, kernel)
        what = f"{axes}d {'strided ' * (stride > 1)}{'grouped' if channels > 1 else 'depthwise'}"
        groups = 32 // channels if scale.share == 1 else 2
        probe = _probe(op, channels, (edge,) * axes, kernel, stride, groups)
        yield f"{op} {what}", channels * kernel**axes, probe


def _probe(op: str, channels: int, space: Sequence[int], kernel: int, stride: int, groups: int = 0) -> Probe:
    """Return a probe of one convolution, of ``channels`` to at least 16 channels.

    With ``groups``, if they are not 0, each of them is of ``channels`` to as many.
    """
    axes, others = len(space), max(channels, 16)
    slides: dict[str, Any] = {
        "strides": (stride,) * axes,
        "dilations": (1,) * axes,
        "pads": (kernel // 2,) * (2 * axes),
    }
    group: Shape = ()
    if groups:
        group, others, slides["grouped"] = (groups,), channels, True
    x: Given = ((1, *group, channels, *space), "float32")
    y: Given = ((1, *group, others, *((extent + stride - 1) // stride for extent in space)), "float32")
    w: Given = ((*group, others, channels, *(kernel,) * axes), "float32")
    if op == "ConvWeightGrad":
        return Probe(op, (x, y), {**slides, "kernel_shape": (kernel,) * axes})
    if op == "ConvTranspose":
        return Probe(op, (y, w), {**slides, "spatial": tuple(space)})
    return Probe(op, (x, w), slides)


def _slab_gradients(channels: int, places: float, thin: int) -> Iterator[Heavy]:
    """Yield probes of the gradient of a window's weights in a thin slab, and in one that is not."""
    edge = int((thin / channels) ** 0.5) + 1
    for what, depth, height in (("thin window", 4, min(edge * edge // 8, 128)), ("window", edge, edge)):
        rows = depth * height
        space = (depth, height, max(int(places / rows), thin // (channels * rows) + 1, 4))
        yield f"ConvWeightGrad 3d {what}", channels * 27, _probe("ConvWeightGrad", channels, space, 3, 1)


def speed_of(op: str) -> Computing:
    """Return the speed of one convolution."""
    makes_weights = op == "ConvWeightGrad"
    return Computing(
        like=READING,
        kind=partial(_kind, makes_weights=makes_weights),
        arranged_elements=lambda step, shapes: prod(_weights(step, shapes, makes_weights)),
        probes=partial(_probes, op=op),
    )
