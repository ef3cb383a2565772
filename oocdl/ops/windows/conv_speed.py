"""Speeds of convolutions: their kinds, the measurements of each, and nominal rates.

A kind is one of two or three spatial axes, "point" (kernel 1) or "window", strided or not; its size is
the elements of the window times the smaller count of channels. The gradient of a window's weights in a
thin slab is a kind of its own, for engines that say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.slabs import is_thin
from oocdl.graph.ir.speed import Computing, Given, Heavy, Probe, RateTable, Scale
from oocdl.ops._speed import READING, giga

CHANNELS, FEW_CHANNELS = (1, 4, 16, 64, 256), (1, 16, 64, 256)
"""Channels that are measured, in float32 and in bfloat16."""

Table = Mapping[str, tuple[float, ...]]
"""Kind without the operator -> GFLOP/s by count of channels."""


def _kind(
    step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int, makes_weights: bool
) -> tuple[str, int]:
    """Return kind and size of a convolution (see ``Computing.kind``)."""
    weight = step.kernel_shapes[0] if makes_weights else shapes[1]
    taps = prod(weight[2:])
    what = "window" if taps > 1 else "point"
    strided = any(stride != 1 for stride in step.attrs.get("strides") or ())
    axes = 3 if len(weight) > 4 else 2
    seen = step.operands[0].shape
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


def _probe(op: str, channels: int, space: Sequence[int], kernel: int, stride: int) -> Probe:
    """Return a probe of one convolution, of ``channels`` to at least 16 channels."""
    axes, others = len(space), max(channels, 16)
    slides = {"strides": (stride,) * axes, "dilations": (1,) * axes, "pads": (kernel // 2,) * (2 * axes)}
    x: Given = ((1, channels, *space), "float32")
    y: Given = ((1, others, *((extent + stride - 1) // stride for extent in space)), "float32")
    w: Given = ((others, channels, *(kernel,) * axes), "float32")
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
        taps = 1 if what.endswith("point") else 27 if what.startswith("3d") else 9
        return [count * taps for count in channels]

    return {f"{op} {what}": giga(sizes(what), *rates) for what, rates in table.items()}


def _speed(op: str, table: Table, bfloat16: Table) -> Computing:
    return Computing(
        like=READING,
        kind=partial(_kind, makes_weights=op == "ConvWeightGrad"),
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
    },
)
