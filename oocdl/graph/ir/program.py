"""Programs, which engines run: the nodes of one layer, for one shard, on local arrays.

A program is made by ``graph/partition/tiling.py`` from a layer and the geometry of a shard.
Its values are numbered slots. Kernels see ordinary ONNX axes: every operand is
first cropped, reshaped to its node's own axes, and padded with the node's fill.
Programs of equal geometry are equal, so interior shards share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Node, Shape


class Operand(NamedTuple):
    """An operand of an instruction: a slot, cropped, viewed in the node's own axes, and padded."""

    slot: int
    crop: tuple[tuple[int, int], ...] | None
    """(start, stop) for each axis of the slot's array; None: all of it."""
    shape: Shape
    """The shape in which the cropped array is viewed: the node's own axes."""
    pads: tuple[tuple[int, int], ...] | None
    """(before, after) for each axis of ``shape``, filled with ``Instruction.fill``; None: no padding."""


def padded_shape(operand: Operand) -> Shape:
    """Return the shape of an operand with its padding."""
    if operand.pads is None:
        return operand.shape
    return tuple(
        before + extent + after for extent, (before, after) in zip(operand.shape, operand.pads, strict=True)
    )


@dataclass(frozen=True, eq=False)
class Instruction:
    """One call of a kernel."""

    op: str
    operands: tuple[Operand, ...]
    outputs: tuple[int, ...]
    """The slots that it makes."""
    kernel_shapes: tuple[Shape, ...]
    """The shapes of the outputs in the node's own axes, as the kernel returns them."""
    shapes: tuple[Shape, ...]
    """The shapes of the outputs as their slots have them (same elements, same order)."""
    dtypes: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """The node's attributes, and ``crop``: per axis of the first output, how many
    elements of the kernel's uncropped result come before the wanted region (operators
    whose rule has ``Inverse`` or ``Around`` axes; negative: that many zeros come first)."""
    fill: float = 0.0

    @property
    def node(self) -> Node:
        """A node without names, to ask the operator's rule for costs."""
        return Node("", self.op, (), (), self.attrs)


@dataclass(frozen=True, eq=False)
class Program:
    """Instructions in order, over slots."""

    inputs: tuple[int, ...]
    input_shapes: tuple[Shape, ...]
    input_dtypes: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Operand, ...]
    """The slots of the results, cropped to the region that the shard owns; they have no pads."""
    key: str
    """A digest, equal for equal programs, by which engines cache."""
    orders: tuple[tuple[int, Order], ...] = ()
    """(slot, order of its axes in memory) for the slots that are not in C order."""
    threads: int = 1
    """Number of threads that each kernel is cut for; sums that they share have other bits by it."""

    @property
    def input_orders(self) -> tuple[Order, ...]:
        """The order in memory of each input's axes; empty: C order."""
        orders = dict(self.orders)
        return tuple(orders.get(slot, ()) for slot in self.inputs)

    @property
    def output_orders(self) -> tuple[Order, ...]:
        """The order in memory of each output's axes; empty: C order."""
        orders = dict(self.orders)
        return tuple(orders.get(item.slot, ()) for item in self.outputs)


_programs: WeakValueDictionary[str, Program] = WeakValueDictionary()


def make_program(
    inputs: tuple[int, ...],
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    instructions: tuple[Instruction, ...],
    outputs: tuple[Operand, ...],
    orders: tuple[tuple[int, Order], ...] = (),
    threads: int = 1,
) -> Program:
    """Make a program and its key, a digest of everything that the arithmetic depends on.

    Equal programs are one object while any of them lives.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((inputs, shapes, dtypes, outputs, orders)).encode())
    for step in instructions:
        fields = (
            step.op,
            step.operands,
            step.outputs,
            step.kernel_shapes,
            step.shapes,
            step.dtypes,
            step.fill,
        )
        digest.update(repr(fields).encode())
        for name, attr in sorted(step.attrs.items()):
            digest.update(name.encode())
            digest.update(attr.tobytes() if isinstance(attr, np.ndarray) else repr(attr).encode())
    if threads > 1:
        digest.update(f"{threads} threads".encode())
    key = digest.hexdigest()
    # Thousands of shards have a few programs between them: one of each is enough.
    program = Program(inputs, shapes, dtypes, instructions, outputs, key, orders, threads)
    return _programs.setdefault(key, program)
