"""What an engine runs: the nodes of one layer, for one shard, on local arrays.

A program is made by ``graph/cut.py`` from a layer and the geometry of a shard.
Its values are numbered slots. Kernels see ordinary ONNX axes: every operand is
first cropped, reshaped to its node's own axes, and padded with the node's fill.
Programs of equal geometry are equal, so interior shards share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Node, Shape


@dataclass(frozen=True)
class Operand:
    """How a kernel sees one slot."""

    slot: int
    crop: tuple[tuple[int, int], ...] | None
    """(start, stop) an axis of the slot's array; None: all of it."""
    shape: Shape
    """The shape to view the cropped array as: the node's own axes."""
    pads: tuple[tuple[int, int], ...] | None
    """(before, after) an axis of ``shape``, filled with ``Instruction.fill``; None: nothing."""


def padded_shape(operand: Operand) -> Shape:
    """The shape of an operand as its node sees it."""
    if operand.pads is None:
        return operand.shape
    return tuple(
        before + extent + after for extent, (before, after) in zip(operand.shape, operand.pads, strict=True)
    )


@dataclass(frozen=True, eq=False)
class Instruction:
    """One kernel call."""

    op: str
    operands: tuple[Operand, ...]
    outputs: tuple[int, ...]
    """Slots."""
    kernel_shapes: tuple[Shape, ...]
    """Shapes of the outputs with the node's own axes, as the kernel returns them."""
    shapes: tuple[Shape, ...]
    """Shapes of the outputs as they are kept in their slots (same elements, same order)."""
    dtypes: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """The node's attributes, and ``crop``: per axis of the first output, how many
    elements of the kernel's uncropped result come before the wanted region (operators
    whose rule has ``Inverse`` or ``Around`` axes; negative: that many zeros come first)."""
    fill: float = 0.0

    @property
    def node(self) -> Node:
        """A node without names, for rules that tell costs."""
        return Node("", self.op, (), (), self.attrs)


@dataclass(frozen=True, eq=False)
class Program:
    """Instructions in order, over slots."""

    inputs: tuple[int, ...]
    input_shapes: tuple[Shape, ...]
    input_dtypes: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Operand, ...]
    """Cropped to the owned region; ``shape`` is that of the cropped array (no pads)."""
    key: str
    """Equal for equal programs; engines cache by it."""
    orders: tuple[tuple[int, Order], ...] = ()
    """(slot, how it lies in memory) of slots that do not lie as their axes are numbered."""

    @property
    def input_orders(self) -> tuple[Order, ...]:
        """The order of each input; empty: as its axes are numbered."""
        orders = dict(self.orders)
        return tuple(orders.get(slot, ()) for slot in self.inputs)

    @property
    def output_orders(self) -> tuple[Order, ...]:
        """The order of each output; empty: as its axes are numbered."""
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
) -> Program:
    """A program with its key: a digest of everything that the arithmetic depends on."""
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
    key = digest.hexdigest()
    # Thousands of shards have a few programs between them: one of each is enough.
    program = Program(
        inputs=inputs,
        input_shapes=shapes,
        input_dtypes=dtypes,
        instructions=instructions,
        outputs=outputs,
        key=key,
        orders=orders,
    )
    return _programs.setdefault(key, program)
