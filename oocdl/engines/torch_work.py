"""What a program takes of the heap with PyTorch, beside its inputs and the arrays its results go to.

The same walk over stages that runs it: what chains make takes blocks, what lies in the memory of
another takes nothing, and of a convolution whose operands have their channels last oneDNN makes no
copies. The plan reserves this much for each program, so it is an upper bound; a test measures it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod

import numpy as np

from oocdl.engines.chain_step import ROW
from oocdl.engines.fused import Fused
from oocdl.engines.operands import pads_of, spatial_pads
from oocdl.engines.torch_chain import ChainStep
from oocdl.engines.torch_columns import has_few_taps
from oocdl.engines.torch_into import POINTWISE
from oocdl.engines.torch_pads import evened, flipped_pads, rows_alone
from oocdl.engines.torch_points import is_point
from oocdl.engines.torch_pool import CHUNK
from oocdl.graph.cost import HOLES
from oocdl.graph.ir import Shape
from oocdl.graph.layout import DATA, SPACED
from oocdl.graph.program import Instruction, Program, padded_shape
from oocdl.graph.rates import is_thin
from oocdl.graph.rule import Rules

_VIEWS = frozenset({"Identity", "Transpose", "Expand", "Slice", "Pad"})
"""Operators whose result is a way to see operand 0."""
POOLED, UNPOOLED = 2, 6
"""Times what is pooled at a time that the stages of a pooling take, and those of its gradient."""
_TEMPORARIES = {"Moments": 1, "LogSumExp": 2, "Dropout": 1, "Where": 1, "Softplus": 1}
"""Blocks that a member of a chain takes while it runs."""


def _bytes(shape: Iterable[int], dtype: str) -> int:
    return prod(shape) * int(np.dtype(dtype).itemsize)


class _Heap:
    """What is alive, by the slot it was made for; slots that are views of another count with it."""

    def __init__(self, program: Program) -> None:
        self.inputs = frozenset(program.inputs)
        self.dtype_of = dict(zip(program.inputs, program.input_dtypes, strict=True))
        self.shape_of = dict(zip(program.inputs, program.input_shapes, strict=True))
        self.order_of = dict(program.orders)
        self.ordered = frozenset(self.order_of)
        self.owner: dict[int, int] = {}
        self.users: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.live = self.peak = 0

    def add(self, slot: int, nbytes: int) -> None:
        """New memory for a slot."""
        self.owner[slot] = slot
        self.users[slot], self.size[slot] = 1, nbytes
        self.live += nbytes

    def share(self, slot: int, other: int) -> None:
        """A slot in the memory of another, which may be that of an input."""
        if other in self.owner:
            self.owner[slot] = self.owner[other]
            self.users[self.owner[other]] += 1

    def drop(self, slot: int) -> None:
        """Nothing reads a slot any more."""
        owner = self.owner.pop(slot, None)
        if owner is not None:
            self.users[owner] -= 1
            if not self.users[owner]:
                self.live -= self.size[owner]

    def need(self, nbytes: int) -> None:
        """So much beside what is alive, for a moment."""
        self.peak = max(self.peak, self.live + nbytes)


def _blocks_bytes(step: ChainStep) -> int:
    """What a chain takes beside its results: sums of its loop, or blocks and parts of sums."""
    plan = step.plan
    if isinstance(plan, Fused):
        return plan.work_bytes
    block = prod(step.chain.block)
    width = max((np.dtype(dtype).itemsize for _, dtype in plan.kinds.values()), default=8)
    blocks = sum(_bytes([min(block, prod(shape))], dtype) for shape, dtype in plan.registers)
    temporaries = max((_TEMPORARIES.get(item.op, 0) for item in step.chain.members), default=0)
    blocks += temporaries * block * int(width)
    if step.chain.last:
        blocks += ROW * int(width) * len(step.columns)
    for item in step.chain.members:
        if item.outputs in plan.parts:
            count = prod(len(step.blocks.sizes[axis]) for axis in plan.parts[item.outputs])
            for shape, dtype in zip(item.kernel_shapes, item.dtypes, strict=True):
                # Parts in the precision of the result, and put together in float64.
                blocks += count * (_bytes(shape, dtype) + 4 * _bytes(shape, "float64"))
    return blocks


def _run_chain(heap: _Heap, step: ChainStep, direct: Collection[int]) -> None:
    """Whole memory for what is read after it, blocks for what stays inside."""
    for item in step.chain.members:
        heap.shape_of.update(zip(item.outputs, item.shapes, strict=True))
        for slot, shape, dtype in zip(item.outputs, item.kernel_shapes, item.dtypes, strict=True):
            heap.dtype_of[slot] = dtype
            if slot in step.summed:
                heap.add(slot, _bytes(shape, dtype))
            if slot not in step.full or slot in direct:
                continue
            old = step.reuse.get(slot)
            # A part of a larger result has gaps if there are several samples, and is not taken over.
            if old is not None and (shape[0] == 1 or old in heap.inputs):
                heap.share(slot, old)
            else:
                heap.add(slot, _bytes(shape, dtype))
    heap.need(_blocks_bytes(step))


def _has_gaps(item: Instruction, index: int, heap: _Heap) -> bool:
    """Whether an operand is a part of its slot whose places do not follow each other in memory."""
    operand = item.operands[index]
    if operand.crop is None:
        return False
    shape = heap.shape_of[operand.slot]
    before = 1
    for axis in heap.order_of.get(operand.slot) or range(len(shape)):
        start, stop = operand.crop[axis]
        if before > 1 and stop - start != shape[axis]:
            return True
        before *= stop - start
    return False


def _is_copied(item: Instruction, strides: Sequence[int], weights: Shape) -> bool:
    """Whether operand 0 of a convolution is copied: padded by hand, or cut so that it has gaps."""
    pads: Sequence[tuple[int, int]] = spatial_pads(item.operands[0])
    dilations = item.attrs.get("dilations") or (1,) * len(pads)
    if item.op == "ConvTranspose":
        if set(strides) != {1}:
            return len(weights) == 5
        pads = flipped_pads(item, dilations)
    else:
        pads = evened(pads, item.operands[0].shape[2:], weights[2:], strides, dilations)
    first, *others = [before != after for before, after in pads]
    inside = any(before < 0 or after < 0 for before, after in pads[1:])
    if any(others) or inside:
        return True
    rows = (item.operands[1].shape if item.op == "ConvWeightGrad" else item.kernel_shapes[0])[2]
    return first and not rows_alone(item.operands[0].shape, weights[2], pads, strides, dilations, rows)


def _data_bytes(item: Instruction, index: int, dtype: str) -> int:
    """Bytes of one operand with its padding."""
    return _bytes(padded_shape(item.operands[index]), dtype)


def _point_last(item: Instruction, dtype: str, strides: Sequence[int]) -> int:
    """Copies that a convolution of one tap makes of what it sees and makes (``torch_points``)."""
    x, shape = item.operands[0], item.kernel_shapes[0]
    if item.op == "ConvTranspose":
        whole = set(strides) == {1} and shape[2:] == x.shape[2:]
        return 0 if whole else _bytes((*shape[:2], *x.shape[2:]), dtype) + _data_bytes(item, 0, dtype)
    if set(strides) == {1}:
        return 0
    space = item.operands[1].shape[2:] if item.op == "ConvWeightGrad" else shape[2:]
    return _bytes((*x.shape[:2], *space), dtype)


def _window_last(item: Instruction, dtype: str, heap: _Heap) -> int:
    """Scratch of a convolution whose data has its channels last."""
    x = item.operands[0]
    result = _bytes(item.kernel_shapes[0], item.dtypes[0])
    weights = item.kernel_shapes[0] if item.op == "ConvWeightGrad" else padded_shape(item.operands[1])
    strides = item.attrs.get("strides") or (1,) * (len(weights) - 2)
    ordered = heap.ordered
    # In the order of the data, in oneDNN's blocks of 16, and turned round.
    scratch = 4 * _bytes((-(-weights[0] // 16) * 16, -(-weights[1] // 16) * 16, *weights[2:]), dtype)
    point = is_point(weights, () if item.op == "ConvTranspose" else spatial_pads(x))
    for index in DATA[item.op]:
        alone = point and index == 0 and set(strides) != {1}  # what is seen of it is taken out, sorted or not
        if not alone and (item.operands[index].slot not in ordered or _has_gaps(item, index, heap)):
            scratch += _bytes(item.operands[index].shape, dtype)  # sorted first
    few = has_few_taps(weights, strides) and dtype != "bfloat16"
    if point:
        scratch += _point_last(item, dtype, strides)
    else:
        scratch += _data_bytes(item, 0, dtype) if few or _is_copied(item, strides, weights) else 0
    if item.op == "ConvWeightGrad":
        if pads_of(item.operands[1]) is not None:
            scratch += _data_bytes(item, 1, dtype)
        if dtype == "bfloat16":  # both are sorted into blocks of 16 channels
            for operand in item.operands:
                batch, channels, *space = padded_shape(operand)
                scratch += _bytes((batch, -(-channels // 16) * 16, *space), dtype)
        if dtype == "float32" and is_thin(x.shape) and prod(weights[2:]) > 1 and not few:
            # One plane at most is copied (``torch_taps``); there are as many as the third axis has.
            planes = [padded_shape(operand)[2] for operand in item.operands]
            scratch += sum(2 * _data_bytes(item, i, dtype) // max(n, 1) for i, n in enumerate(planes))
    elif set(strides) == {1}:
        scratch += result // 8 + (0 if item.outputs[0] in ordered else result)
    else:
        scratch += result // 8 + (2 * result if dtype == "float32" and is_thin(x.shape) else 0)
    return scratch + (_plane(item, dtype) if few else 0)


def _plane(item: Instruction, dtype: str) -> int:
    """Columns of one plane (``torch_columns``), twice: a product may want them turned."""
    seen = padded_shape(item.operands[0])
    weights = item.kernel_shapes[0] if item.op == "ConvWeightGrad" else padded_shape(item.operands[1])
    return 2 * _bytes((seen[1], *weights[2:], *seen[3:]), dtype)


def _pool(item: Instruction, dtype: str, last: bool) -> int:
    """Scratch of a pooling or its gradient: padded copies, and of what is taken at a time its stages."""
    x = padded_shape(item.operands[0])
    copies = sum(
        _data_bytes(item, index, dtype)
        for index, operand in enumerate(item.operands)
        if operand.pads is not None or (operand.crop is not None and not last)
    )
    if item.op == "MaxPoolGrad" and pads_of(item.operands[0]) is not None:
        copies += _bytes(x, dtype)
    stages = POOLED if item.op == "MaxPool" else UNPOOLED
    return copies + stages * _bytes([min(_portion(item, x, last), prod(x))], dtype)


def _portion(item: Instruction, x: Shape, last: bool) -> int:
    """Elements that are pooled at a time (``torch_pool``): a chunk, or as much as has to be seen at once."""
    if not last:
        return max(CHUNK, prod(x[2:]))
    stride = int((item.attrs.get("strides") or (1,))[0])
    span = (int(item.attrs["kernel_shape"][0]) - 1) * int((item.attrs.get("dilations") or (1,))[0]) + 1
    return prod(x[1:]) if span > stride else max(CHUNK, stride * x[1] * prod(x[3:]))


def _scratch(item: Instruction, heap: _Heap, rules: Rules) -> int:
    """What an instruction that runs by itself takes beside operands and results."""
    dtype = heap.dtype_of[item.operands[0].slot] if item.operands else item.dtypes[0]
    seen = [operand for operand in item.operands if len(operand.shape) in SPACED]
    last = any(operand.slot in heap.ordered for operand in seen) or item.outputs[0] in heap.ordered
    if item.op in DATA and last:
        return _window_last(item, dtype, heap)
    if item.op in ("MaxPool", "MaxPoolGrad"):
        return _pool(item, dtype, last)
    shapes: list[Shape] = [padded_shape(operand) for operand in item.operands]
    scratch = rules[item.op].workspace(item.node, shapes, list(item.kernel_shapes))
    copies = sum(
        _bytes(shape, heap.dtype_of[operand.slot])
        for operand, shape in zip(item.operands, shapes, strict=True)
        if operand.pads is not None or operand.crop is not None
    )
    if item.op in POINTWISE and item.outputs[0] in heap.ordered:  # made as planes, then sorted
        copies += _bytes(item.kernel_shapes[0], item.dtypes[0])
    return _bytes([scratch], item.dtypes[0]) + copies


def _run_alone(heap: _Heap, item: Instruction, direct: Collection[int], rules: Rules) -> None:
    scratch = _scratch(item, heap, rules)
    for slot, shape, dtype in zip(item.outputs, item.shapes, item.dtypes, strict=True):
        heap.dtype_of[slot], heap.shape_of[slot] = dtype, shape
        if item.op in _VIEWS and pads_of(item.operands[0]) is None:
            heap.share(slot, item.operands[0].slot)
        elif slot not in direct:
            heap.add(slot, _bytes(shape, dtype))
    heap.need(scratch)


def work_bytes(
    program: Program,
    stages: Iterable[tuple[ChainStep | Instruction, Collection[int]]],
    direct: Collection[int],
    rules: Rules,
) -> int:
    """Upper bound of the heap that a run of ``program`` takes.

    ``stages``: each chain or instruction in order, and the slots that nothing reads after it.
    ``direct``: slots that are made where the program's results belong.
    """
    heap = _Heap(program)
    for step, dying in stages:
        if isinstance(step, ChainStep):
            _run_chain(heap, step, direct)
        else:
            _run_alone(heap, step, direct, rules)
        for slot in dying:
            heap.drop(slot)
    return heap.peak * HOLES // 4
