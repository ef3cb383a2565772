"""How much of the heap each of PyTorch's kernels takes beside its operands and results.

Functions here are the ``scratch`` and ``device_scratch`` of records (``record.Kernel``), in bytes. A plan
reserves what they return: they are upper bounds, and a test measures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np

from oocdl.engines.convolution import Convolution, groups_of
from oocdl.engines.torch.conv.conv_padding import evened, flipped_pads, rows_alone
from oocdl.engines.torch.conv.im2col import has_few_taps
from oocdl.engines.torch.conv.one_by_one import is_point
from oocdl.engines.torch.torch_pooling import CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS
from oocdl.graph.ir.graph import Node, Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction, Program, padded_shape
from oocdl.graph.ir.slabs import is_thin
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

POOLING_STAGES, POOLING_GRADIENT_STAGES = 2, 6
"""Intermediate results that a pooling holds at once, each as large as what is pooled at a time; the same of
its gradient."""


class Slots:
    """The dtypes, shapes and memory orders of a program's slots, as far as it has run."""

    def __init__(self, program: Program) -> None:
        self.inputs = frozenset(program.inputs)
        self.dtype_of = dict(zip(program.inputs, program.input_dtypes, strict=True))
        self.shape_of = dict(zip(program.inputs, program.input_shapes, strict=True))
        self.order_of = dict(program.orders)
        self.channels_last = frozenset(self.order_of)

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
    return prod(shape) * int(np.dtype(dtype).itemsize)


def by_rule(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Adds to what the operator's rule says copies of operands that are padded or parts of their slots."""
    shapes: list[Shape] = [padded_shape(operand) for operand in item.operands]
    node = Node("", item.op, (), (), item.attrs)
    scratch = rules[item.op].scratch_elements(node, shapes, list(item.kernel_shapes))
    copies = sum(
        nbytes(shape, slots.dtype_of[operand.slot])
        for operand, shape in zip(item.operands, shapes, strict=True)
        if operand.pads is not None or operand.crop is not None
    )
    return nbytes([scratch], item.dtypes[0]) + copies


def elementwise(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Adds to ``by_rule`` that a result with its channels last is made as planes, and then sorted."""
    planes = nbytes(item.kernel_shapes[0], item.dtypes[0]) if item.outputs[0] in slots.channels_last else 0
    return by_rule(item, slots, rules) + planes


def convolution(kind: Convolution, item: Instruction, slots: Slots, rules: Rules) -> int:
    """Returns ``by_rule`` for planes, and less for channels last, of which oneDNN makes fewer copies."""
    if not slots.has_channels_last(item):
        return by_rule(item, slots, rules)
    return _channels_last_bytes(kind, item, slots.dtype(item), slots)


def pooling(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Counts padded copies, and the intermediate results of what is pooled at a time."""
    return _pooling_bytes(item, slots, POOLING_STAGES)


def pooling_gradient(item: Instruction, slots: Slots, rules: Rules) -> int:
    """Counts as ``pooling`` does; the gradient of a padded operand is made whole, and then cut."""
    padded = pads_of(item.operands[0]) is not None
    whole = _data_bytes(item, 0, slots.dtype(item)) if padded else 0
    return whole + _pooling_bytes(item, slots, POOLING_GRADIENT_STAGES)


def no_more(item: Instruction, dtype: str, on_host: bool) -> int:
    """Returns 0: on a device the operator takes what its rule says."""
    return 0


def device_pooling(item: Instruction, dtype: str, on_host: bool) -> int:
    """Counts the intermediate results of what is pooled at a time on a device."""
    x = padded_shape(item.operands[0])
    return POOLING_GRADIENT_STAGES * nbytes([min(max(DEVICE_CHUNK_ELEMENTS, prod(x[2:])), prod(x))], dtype)


def device_convolution(kind: Convolution, item: Instruction, dtype: str, on_host: bool) -> int:
    """Counts the im2col of a sample where no library convolves on a device.

    On the host that is so in thin slabs; on a GPU if the convolution is dilated, since cuDNN's kernels for
    that do not give equal bits.
    """
    dilated = set(item.attrs.get("dilations") or (1,)) != {1}
    if not (dilated or on_host):
        return 0
    data = [padded_shape(item.operands[index]) for index in kind.data]
    if not kind.makes_weights:
        data.append(item.kernel_shapes[0])
    return nbytes(kind.weights(item)[1:], dtype) * max(prod(shape[2:]) for shape in data)


def _has_gaps(item: Instruction, index: int, slots: Slots) -> bool:
    """Whether an operand is a part of its slot whose places do not follow each other in memory."""
    operand = item.operands[index]
    if operand.crop is None:
        return False
    shape = slots.shape_of[operand.slot]
    before = 1
    for axis in slots.order_of.get(operand.slot) or range(len(shape)):
        start, stop = operand.crop[axis]
        if before > 1 and stop - start != shape[axis]:
            return True
        before *= stop - start
    return False


def _copies_data(kind: Convolution, item: Instruction, strides: Sequence[int], weights: Shape) -> bool:
    """Whether operand 0 of a convolution is copied: padded by hand, or cut so that it has gaps."""
    pads: Sequence[tuple[int, int]] = spatial_pads(item.operands[0])
    dilations = item.attrs.get("dilations") or (1,) * len(pads)
    if kind.transposed:
        if set(strides) != {1}:
            return len(weights) == 5
        pads = flipped_pads(item, dilations)
    else:
        pads = evened(pads, item.operands[0].shape[2:], weights[2:], strides, dilations)
    first, *others = [before != after for before, after in pads]
    inside = any(before < 0 or after < 0 for before, after in pads[1:])
    if any(others) or inside:
        return True
    rows = kind.other_data(item)[2]
    return first and not rows_alone(item.operands[0].shape, weights[2], pads, strides, dilations, rows)


def _leaves_rows_out(item: Instruction, strides: Sequence[int], weights: Shape) -> bool:
    """Whether a gradient of weights takes end rows of several images apart: what is left of them has gaps."""
    x, dilations = item.operands[0], item.attrs.get("dilations") or (1,) * len(strides)
    (before, after), *_ = evened(spatial_pads(x), x.shape[2:], weights[2:], strides, dilations)
    return x.shape[0] > 1 and before != after


def _data_bytes(item: Instruction, index: int, dtype: str) -> int:
    """Bytes of one operand with its padding."""
    return nbytes(padded_shape(item.operands[index]), dtype)


def _one_tap_bytes(kind: Convolution, item: Instruction, dtype: str, strides: Sequence[int]) -> int:
    """Counts copies that a convolution of one tap makes of its operand and result (``conv.one_by_one``)."""
    x, shape = item.operands[0], item.kernel_shapes[0]
    if kind.transposed:
        whole = set(strides) == {1} and shape[2:] == x.shape[2:]
        return 0 if whole else nbytes((*shape[:2], *x.shape[2:]), dtype) + _data_bytes(item, 0, dtype)
    if set(strides) == {1}:
        return 0
    return nbytes((*x.shape[:2], *kind.other_data(item)[2:]), dtype)


def _channels_last_bytes(kind: Convolution, item: Instruction, dtype: str, slots: Slots) -> int:
    """Counts the scratch of a convolution whose data has its channels last."""
    x = item.operands[0]
    result = nbytes(item.kernel_shapes[0], item.dtypes[0])
    weights = kind.weights(item)
    strides = item.attrs.get("strides") or (1,) * (len(weights) - 2)
    # Weights in the order of the data, in oneDNN's blocks of 16 channels, and flipped.
    scratch = 4 * nbytes((-(-weights[0] // 16) * 16, -(-weights[1] // 16) * 16, *weights[2:]), dtype)
    scratch += _group_blocks_bytes(kind, item, dtype)
    alone = groups_of(item) == 1
    point = alone and is_point(weights, () if kind.transposed else spatial_pads(x))
    for index in kind.data:
        taken = point and index == 0 and set(strides) != {1}  # what is seen of it is taken out, sorted or not
        if not taken and (
            item.operands[index].slot not in slots.channels_last or _has_gaps(item, index, slots)
        ):
            scratch += nbytes(item.operands[index].shape, dtype)  # sorted first
    few = alone and has_few_taps(weights, strides) and dtype != "bfloat16"
    if point:
        scratch += _one_tap_bytes(kind, item, dtype, strides)
    else:
        scratch += _data_bytes(item, 0, dtype) if few or _copies_data(kind, item, strides, weights) else 0
    if kind.makes_weights:
        if pads_of(item.operands[1]) is not None or _leaves_rows_out(item, strides, weights):
            scratch += _data_bytes(item, 1, dtype)
        if dtype == "bfloat16":  # both are sorted into blocks of 16 channels
            for operand in item.operands:
                batch, channels, *space = padded_shape(operand)
                scratch += nbytes((batch, -(-channels // 16) * 16, *space), dtype)
        if dtype == "float32" and is_thin(x.shape) and prod(weights[2:]) > 1 and not few:
            # One plane at most is copied (``conv.thin_slab``); there are as many as the third axis has.
            planes = [padded_shape(operand)[2] for operand in item.operands]
            scratch += sum(2 * _data_bytes(item, i, dtype) // max(n, 1) for i, n in enumerate(planes))
    elif set(strides) == {1}:
        scratch += result // 8 + (0 if item.outputs[0] in slots.channels_last else result)
    else:
        scratch += result // 8 + (2 * result if dtype == "float32" and is_thin(x.shape) else 0)
        scratch += 0 if alone else result  # one that is cut is copied where its channels are factors
    return scratch + (_im2col_bytes(kind, item, dtype) if few else 0)


def _group_blocks_bytes(kind: Convolution, item: Instruction, dtype: str) -> int:
    """Counts the blocks of 16 by 16 channels that oneDNN makes of the weights of each group.

    It has kernels without them for one channel of windows of up to 3 in a row, not dilated, and
    for results that are data.
    """
    groups, weights = groups_of(item), kind.weights(item)
    dilated = any(d != 1 for d in item.attrs.get("dilations") or ())
    one = weights[0] == groups and weights[1] == 1
    if groups == 1 or (one and not dilated and (weights[-1] <= 3 or not kind.makes_weights)):
        return 0
    blocks = (groups, -(-weights[0] // groups // 16) * 16, -(-weights[1] // 16) * 16, *weights[2:])
    return nbytes(blocks, dtype)


def _im2col_bytes(kind: Convolution, item: Instruction, dtype: str) -> int:
    """Columns of one plane (``conv.im2col``), twice: a product may want them transposed."""
    seen = padded_shape(item.operands[0])
    weights = kind.weights(item)
    return 2 * nbytes((seen[1], *weights[2:], *seen[3:]), dtype)


def _pooling_bytes(item: Instruction, slots: Slots, stages: int) -> int:
    """Counts padded copies of the operands, and ``stages`` times what is pooled at a time."""
    x, dtype = padded_shape(item.operands[0]), slots.dtype(item)
    channels_last = slots.has_channels_last(item)
    copies = sum(
        _data_bytes(item, index, dtype)
        for index, operand in enumerate(item.operands)
        if operand.pads is not None or (operand.crop is not None and not channels_last)
    )
    return copies + stages * nbytes([min(_portion_elements(item, x, channels_last), prod(x))], dtype)


def _portion_elements(item: Instruction, x: Shape, channels_last: bool) -> int:
    """Elements that are pooled at a time (``pooling``): a chunk, or as much as has to be seen at once."""
    if not channels_last:
        return max(CHUNK_ELEMENTS, prod(x[2:]))
    stride = int((item.attrs.get("strides") or (1,))[0])
    span = (int(item.attrs["kernel_shape"][0]) - 1) * int((item.attrs.get("dilations") or (1,))[0]) + 1
    return prod(x[1:]) if span > stride else max(CHUNK_ELEMENTS, stride * x[1] * prod(x[3:]))
