"""The record of all that the torch engine knows of one operator, and the heap that its kernels take.

The records stand in ``torch_kernels.KERNELS``. An operator without one is refused before a run. Functions
here and in ``conv.conv_scratch`` are the ``scratch`` and ``device_scratch`` of records, in bytes. A plan
reserves what they return: they are upper bounds, and a test measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from math import prod

from torch import Tensor

from oocdl.engines.convolution import Convolution
from oocdl.engines.torch.torch_pooling import CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import pads_of
from oocdl.graph.ir.program import Instruction, Program, padded_shape
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

Run = Callable[..., list[Tensor]]
"""A kernel: operands and an instruction to results; the tensor to make its result in, where it ``lands``, or
one for each result, or None, where results are ``placed``."""


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
        self.channels_last, self.threads = frozenset(self.order_of), program.threads
        self.direct: Collection[int] = ()
        """Slots that are made where the program's results belong."""

    def has_channels_last(self, item: Instruction) -> bool:
        """Whether an operand with axes of space, or the result, has its channels last."""
        seen = [operand.slot for operand in item.operands if len(operand.shape) in SPATIAL_RANKS]
        return any(slot in self.channels_last for slot in (*seen, item.outputs[0]))

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
    pairs = zip(item.operands, shapes, strict=True)
    copied = [(shape, o.slot) for o, shape in pairs if o.pads is not None or o.crop is not None]
    copies = sum(nbytes(shape, slots.dtype_of[slot]) for shape, slot in copied)
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


class Result(Enum):
    """Memory of the results of an instruction outside of chains."""

    VIEW = auto()
    """Results are views of operand 0, and take no memory of their own, unless that is padded."""
    EITHER = auto()
    """Results count as new memory, but may be views: nothing is written over them or their operands."""
    OWN = auto()
    """Results lie in new memory."""


@dataclass(frozen=True)
class Kernel:
    """The kernels of one operator, and the facts that the engine tells operators apart by.

    Defaults are those of an operator without windows that runs by itself.
    """

    run: Run
    result: Result
    on_device: Run | None = None
    """The kernel for tensors of any device, by PyTorch's general functions; None: ``run`` is one."""
    on_host: bool = False
    """Whether devices have no kernel that gives equal bits in all runs: then the processor does the work."""
    takes_unpadded: bool = False
    """Whether operands come without their padding, because the kernel can do without a padded copy."""
    convolution: Convolution | None = None
    """Given for convolutions and their gradients, None for other operators."""
    planes: bool = False
    """Whether results are made contiguous, where they are not to have their channels last."""
    scratch: Scratch = by_rule
    """Bytes that an instruction outside of chains takes beside operands and results."""
    device_scratch: DeviceScratch | None = None
    """Bytes that an instruction takes on a device beside what its operator's rule says; None: nothing."""
    lands: Callable[[Instruction], bool] | None = None
    """Whether ``run`` makes the result in the memory of the program's output without a copy, if operand 0 and
    the result have their channels last; None: it never does."""
    placed: int = 0
    """Number of first results that ``run`` makes where the program's outputs lie, in whatever order."""
