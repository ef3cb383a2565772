"""Heap that each of PyTorch's kernels takes beside its operands and results.

Functions here and in ``conv.conv_scratch`` are the ``scratch`` and ``device_scratch`` of records
(``torch_record.Kernel``), in bytes. A plan reserves what they return: they are upper bounds, and a test
measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import prod

from oocdl.engines.torch.torch_pooling import CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import pads_of
from oocdl.graph.ir.program import Instruction, Program, padded_shape
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

POOLING_STAGES, POOLING_GRADIENT_STAGES = 2, 6
"""Number of intermediate results that a pooling, and its gradient, hold at once, each as large as what is
pooled at a time."""


class Slots:
    """The dtypes, shapes and memory orders of a program's slots, as far as it has run."""

    def __init__(self, program: Program) -> None:
        self.inputs = frozenset(program.inputs)
        self.dtype_of = dict(zip(program.inputs, program.input_dtypes, strict=True))
        self.shape_of = dict(zip(program.inputs, program.input_shapes, strict=True))
        self.order_of = dict(program.orders)
        self.channels_last = frozenset(self.order_of)
        self.direct: Collection[int] = ()
        """Slots that are made where the program's results belong."""

    def has_channels_last(self, item: Instruction) -> bool:
        """Whether an operand with axes of space, or the result, has its channels last."""
        seen = [operand for operand in item.operands if len(operand.shape) in SPATIAL_RANKS]
        return (
            any(operand.slot in self.channels_last for operand in seen)
            or item.outputs[0] in self.channels_last
        )

    def dtype(self, item: Instruction) -> str:
        """The dtype that an instruction computes in."""
        return self.dtype_of[item.operands[0].slot] if item.operands else item.dtypes[0]


Scratch = Callable[[Instruction, Slots, Rules], int]
DeviceScratch = Callable[[Instruction, str, bool], int]
"""(instruction, dtype of operand 0, whether the device is the host) -> bytes."""


def nbytes(shape: Iterable[int], dtype: str) -> int:
    """Bytes of an array."""
    return prod(shape) * itemsize(dtype)


def by_rule(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Adds copies of operands that are padded, or parts of their slots, to what the operator's rule says."""
    shapes: list[Shape] = [padded_shape(operand) for operand in item.operands]
    scratch = rules[item.op].scratch_elements(item.node, shapes, list(item.kernel_shapes))
    copies = sum(
        nbytes(shape, slots.dtype_of[operand.slot])
        for operand, shape in zip(item.operands, shapes, strict=True)
        if operand.pads is not None or operand.crop is not None
    )
    return nbytes([scratch], item.dtypes[0]) + copies


def elementwise(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Adds to ``by_rule`` the planes that a result with its channels last is made in, before it is sorted."""
    planes = nbytes(item.kernel_shapes[0], item.dtypes[0]) if item.outputs[0] in slots.channels_last else 0
    return by_rule(item, slots, rules) + planes


def pooling(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Counts padded copies of operands, and the intermediate results of what is pooled at a time.

    The gradient of a padded operand is made whole, and then cut.
    """
    x, dtype, in_rows = padded_shape(item.operands[0]), slots.dtype(item), slots.has_channels_last(item)
    copied = [o for o in item.operands if o.pads is not None or (o.crop is not None and not in_rows)]
    stages = POOLING_STAGES
    if len(item.operands) > 1:
        stages = POOLING_GRADIENT_STAGES
        copied += item.operands[:1] if pads_of(item.operands[0]) else ()
    portion = min(_portion_elements(item, x, in_rows), prod(x))
    return sum(nbytes(padded_shape(o), dtype) for o in copied) + stages * nbytes([portion], dtype)


def _portion_elements(item: Instruction, x: Shape, in_rows: bool) -> int:
    """Elements that are pooled at a time: a chunk, or as much as has to be seen at once."""
    if not in_rows:
        return max(CHUNK_ELEMENTS, prod(x[2:]))
    stride = int((item.attrs.get("strides") or (1,))[0])
    span = (int(item.attrs["kernel_shape"][0]) - 1) * int((item.attrs.get("dilations") or (1,))[0]) + 1
    return prod(x[1:]) if span > stride else max(CHUNK_ELEMENTS, stride * x[1] * prod(x[3:]))


def device_pooling(item: Instruction, dtype: str, on_host: bool) -> int:
    """Counts the intermediate results of what is pooled at a time on a device."""
    x = padded_shape(item.operands[0])
    return POOLING_GRADIENT_STAGES * nbytes([min(max(DEVICE_CHUNK_ELEMENTS, prod(x[2:])), prod(x))], dtype)
