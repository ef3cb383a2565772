"""The parts that operands and results play in convolutions and their gradients, for the engines' records.

Engines see instructions and no rules. A test holds ``data`` to the rules' ``Product.data``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import Pads, crop_of, spatial_pads
from oocdl.graph.ir.program import Instruction, Operand, Program, padded_shape

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution, a transposed one, or the gradient of its weights."""

    data: tuple[int, ...]
    """The operands that are data ``[batch, channels, *space]``: kernels want all of them with their channels
    last if one of them has them so. Of one, the result is data, too; of two, it is weights."""
    transposed: bool

    @property
    def makes_weights(self) -> bool:
        """Whether the result is the gradient of weights."""
        return len(self.data) == 2

    def weights(self, item: Instruction) -> Shape:
        """The shape of the weights, or of their gradient."""
        return item.kernel_shapes[0] if self.makes_weights else padded_shape(item.operands[1])

    def other_data(self, item: Instruction) -> Shape:
        """The shape of the data that is not operand 0: of the result, or of its gradient without padding."""
        return item.operands[1].shape if self.makes_weights else item.kernel_shapes[0]


CONV = Convolution(data=(0,), transposed=False)
CONV_TRANSPOSE = Convolution(data=(0,), transposed=True)
CONV_WEIGHT_GRAD = Convolution(data=(0, 1), transposed=False)


class Slide(NamedTuple):
    """Strides and dilations of a convolution's windows, and its number of channel groups."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1


def slide_of(item: Instruction) -> Slide:
    """Return how windows move, by steps of one where none are given, of a program without axes of groups."""
    ones = (1,) * (len(item.kernel_shapes[0]) - 2)
    strides, dilations = (tuple(item.attrs.get(name) or ones) for name in ("strides", "dilations"))
    return Slide(strides, dilations, groups_of(item))


def groups_of(item: Instruction) -> int:
    """Return the number of groups of a convolution of a program without axes of groups."""
    return int(item.attrs.get("group", 1))


def clipped(extents: Sequence[int], pads: Pads) -> tuple[Pads, Pads]:
    """The (start, stop) of what negative padding leaves of each axis, and the rest of ``pads``."""
    box = tuple((max(-b, 0), n + min(a, 0)) for n, (b, a) in zip(extents, pads, strict=True))
    return box, tuple((max(b, 0), max(a, 0)) for b, a in pads)


def flipped_pads(item: Instruction) -> Pads:
    """Paddings of the convolution that a transposed one of stride one is.

    They are the zeros that the wanted box needs on both sides of each axis of space; negative: elements of
    the operand that it does not see.
    """
    x, crop, shape = item.operands[0], crop_of(item)[2:], item.kernel_shapes[0][2:]
    taps = padded_shape(item.operands[1])[2:]
    found = []
    for axis, (before, _) in enumerate(spatial_pads(x)):
        start = crop[axis] - before
        left = slide_of(item).dilations[axis] * (taps[axis] - 1) - start
        found.append((left, start + shape[axis] - x.shape[axis + 2]))
    return tuple(found)


def without_group_axes(program: Program) -> Program:
    """Return the program with the groups of its convolutions counted by ``group``, as ONNX counts them.

    Data ``[n, g, c, space]`` become ``[n, g c, space]`` and weights ``[g, o, c, taps]`` become ``[g o, c,
    taps]``: the same elements in the same order, so slots stay as they are.
    """
    if not any(item.attrs.get("grouped") for item in program.instructions):
        return program
    items = (_merged(item) if item.attrs.get("grouped") else item for item in program.instructions)
    return replace(program, instructions=tuple(items))


def _merged(item: Instruction) -> Instruction:
    """A convolution with groups, without their axis."""
    makes_weights = "kernel_shape" in item.attrs
    places = (1, 1, 0) if makes_weights else (1, 0, 1)  # where the operands and the result have their groups
    attrs = {name: value for name, value in item.attrs.items() if name != "grouped"}
    if "crop" in attrs:
        attrs["crop"] = _joined(attrs["crop"], places[2], 0)
    attrs["group"] = item.operands[0].shape[1]
    shapes = tuple(_product(shape, places[2]) for shape in item.kernel_shapes)
    operands = tuple(map(_without_groups, item.operands, places))
    return replace(item, operands=operands, kernel_shapes=shapes, attrs=attrs)


def _without_groups(operand: Operand, place: int) -> Operand:
    pads = None if operand.pads is None else _joined(operand.pads, place, (0, 0))
    return operand._replace(shape=_product(operand.shape, place), pads=pads)


def _product(shape: Shape, place: int) -> Shape:
    return (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])


def _joined(items: Sequence[T], place: int, none: T) -> tuple[T, ...]:
    """``items``, one for each axis, without one of the axes at ``place`` and after, which have ``none``."""
    if tuple(items[place : place + 2]) != (none, none):
        raise ValueError(f"groups or their channels are padded or cropped: {tuple(items)}")
    return (*items[:place], *items[place + 1 :])
