"""Speeds of convolutions: their kinds, the measurements of each, and nominal rates.

A kind is one of two or three spatial axes, "point" (kernel 1) or "window", strided or not; its size is
the elements of the window times the smaller count of channels. Convolutions with groups are "grouped", or
"depthwise" if each channel is seen alone; channels are then those of a group. The gradient of a window's
weights in a thin slab is a kind of its own, for engines that say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.slabs import is_thin
from oocdl.graph.ir.speed import Computing, Given, Heavy, Probe, RateTable, Scale
from oocdl.ops._speed import READING, giga

CHANNELS, FEW_CHANNELS = (1, 4, 16, 64, 256), (1, 16, 64, 256)
"""Channels that are measured, in float32 and in bfloat16."""

_GROUPED = ((1, 3, 1), (1, 3, 2), (4, 3, 1), (4, 3, 2))
_GROUPED_MORE = {2: ((1, 7, 1), (16, 3, 1)), 3: ((1, 5, 1), (16, 3, 1))}
"""(channels of a group, extent of the window, stride) that are measured; in float32 further ones, by axes."""

Table = Mapping[str, tuple[float, ...]]
"""Kind without the operator -> GFLOP/s by count of channels."""


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


def _rate_tables(op: str, table: Table, channels: Sequence[int]) -> dict[str, RateTable]:
    """Return the tables of rates by kind, with the operator put before each kind."""

    def sizes(what: str) -> list[int]:
        if what.endswith(("grouped", "depthwise")):
            axes = int(what[0])
            more = () if channels is FEW_CHANNELS else _GROUPED_MORE[axes]
            strided, alone = "strided" in what, what.endswith("depthwise")
            return [
                count * taps**axes
                for count, taps, stride in (*_GROUPED, *more)
                if (stride > 1, count == 1) == (strided, alone)
            ]
        taps = 1 if what.endswith("point") else 27 if what.startswith("3d") else 9
        return [count * taps for count in channels]

    return {f"{op} {what}": giga(sizes(what), *rates) for what, rates in table.items()}


def _speed(op: str, table: Table, bfloat16: Table) -> Computing:
    makes_weights = op == "ConvWeightGrad"
    return Computing(
        like=READING,
        kind=partial(_kind, makes_weights=makes_weights),
        arranged_elements=lambda step, shapes: prod(_weights(step, shapes, makes_weights)),
        probes=partial(_probes, op=op),
        rate_tables=_rate_tables(op, table, CHANNELS),
        bfloat16_rate_tables=_rate_tables(op, bfloat16, FEW_CHANNELS),
    )


CONV = _speed(
    "Conv",
    {
        "2d point": (8.6, 24, 64, 96, 110),
        "2d strided point": (6.6, 11, 49, 83, 110),
        "2d strided window": (42, 78, 170, 250, 210),
        "2d window": (73, 130, 210, 260, 260),
        "3d point": (5.6, 14, 41, 67, 99),
        "3d strided point": (2.8, 2.1, 41, 120, 140),
        "3d strided window": (37, 55, 71, 160, 140),
        "3d window": (34, 120, 200, 270, 270),
        "2d depthwise": (48, 86),
        "2d grouped": (38, 130),
        "2d strided depthwise": (22,),
        "2d strided grouped": (36,),
        "3d depthwise": (85, 92),
        "3d grouped": (39, 140),
        "3d strided depthwise": (29,),
        "3d strided grouped": (35,),
    },
    {
        "2d point": (4, 50, 140, 310),
        "2d strided point": (3.9, 20, 80, 170),
        "2d strided window": (25, 130, 310, 350),
        "2d window": (47, 240, 430, 490),
        "3d point": (16, 220, 360, 500),
        "3d strided point": (5.7, 100, 220, 200),
        "3d strided window": (58, 300, 460, 280),
        "3d window": (120, 460, 560, 560),
        "2d depthwise": (73,),
        "2d grouped": (74,),
        "2d strided depthwise": (32,),
        "2d strided grouped": (58,),
        "3d depthwise": (110,),
        "3d grouped": (85,),
        "3d strided depthwise": (38,),
        "3d strided grouped": (60,),
    },
)
CONV_TRANSPOSE = _speed(
    "ConvTranspose",
    {
        "2d point": (16, 43, 60, 93, 110),
        "2d strided point": (7.9, 18, 24, 74, 82),
        "2d strided window": (12, 39, 140, 240, 230),
        "2d window": (15, 56, 210, 270, 270),
        "3d point": (13, 24, 46, 78, 100),
        "3d strided point": (2.8, 3.4, 3.7, 14, 30),
        "3d strided window": (7.6, 20, 37, 130, 210),
        "3d window": (16, 58, 230, 320, 400),
        "2d depthwise": (35, 76),
        "2d grouped": (36, 94),
        "2d strided depthwise": (15,),
        "2d strided grouped": (28,),
        "3d depthwise": (57, 88),
        "3d grouped": (38, 170),
        "3d strided depthwise": (1.9,),
        "3d strided grouped": (23,),
    },
    {
        "2d point": (4.2, 49, 130, 240),
        "2d strided point": (2.7, 14, 33, 87),
        "2d strided window": (13, 89, 210, 340),
        "2d window": (18, 250, 430, 490),
        "3d point": (4.1, 210, 370, 500),
        "3d strided point": (1.2, 16, 79, 120),
        "3d strided window": (11, 170, 500, 470),
        "3d window": (33, 510, 670, 770),
        "2d depthwise": (65,),
        "2d grouped": (78,),
        "2d strided depthwise": (1.1,),
        "2d strided grouped": (50,),
        "3d depthwise": (98,),
        "3d grouped": (79,),
        "3d strided depthwise": (0.53,),
        "3d strided grouped": (36,),
    },
)
CONV_WEIGHT_GRAD = _speed(
    "ConvWeightGrad",
    {
        "2d point": (55, 8.9, 81, 99, 110),
        "2d strided point": (19, 7, 56, 92, 100),
        "2d strided window": (29, 86, 170, 170, 130),
        "2d window": (60, 160, 240, 260, 230),
        "3d point": (19, 7.1, 55, 87, 100),
        "3d strided point": (2.7, 2.5, 39, 61, 110),
        "3d strided window": (30, 16, 130, 160, 93),
        "3d thin window": (37, 28, 140, 220, 240),
        "3d window": (23, 170, 240, 250, 260),
        "2d depthwise": (54, 9.9),
        "2d grouped": (35, 130),
        "2d strided depthwise": (24,),
        "2d strided grouped": (21,),
        "3d depthwise": (58, 11),
        "3d grouped": (50, 150),
        "3d strided depthwise": (12,),
        "3d strided grouped": (32,),
    },
    {
        "2d point": (3.9, 49, 150, 260),
        "2d strided point": (2.7, 18, 65, 120),
        "2d strided window": (19, 99, 240, 250),
        "2d window": (22, 200, 350, 430),
        "3d point": (12, 120, 350, 490),
        "3d strided point": (3.7, 32, 73, 95),
        "3d strided window": (49, 180, 270, 130),
        "3d thin window": (230, 450, 520, 440),
        "3d window": (180, 390, 450, 400),
        "2d depthwise": (74,),
        "2d grouped": (17,),
        "2d strided depthwise": (26,),
        "2d strided grouped": (11,),
        "3d depthwise": (72,),
        "3d grouped": (29,),
        "3d strided depthwise": (14,),
        "3d strided grouped": (16,),
    },
)
