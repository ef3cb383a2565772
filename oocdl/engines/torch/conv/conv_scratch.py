"""Memory of convolutions by their shapes: where they make their results, and how much heap they take."""

from __future__ import annotations

from math import prod

from oocdl.engines.convolution import Convolution, clipped, flipped_pads, groups_of, slide_of
from oocdl.engines.torch.conv.block_transpose import makes_blocks, planes_at_once
from oocdl.engines.torch.conv.compiled_gradient import loop_by_shape
from oocdl.engines.torch.conv.conv_calls import has_onednn, takes_planes, widens
from oocdl.engines.torch.conv.conv_padding import evened, rows_alone
from oocdl.engines.torch.conv.im2col import has_few_taps
from oocdl.engines.torch.conv.one_by_one import REGISTER_CHANNELS, is_point
from oocdl.engines.torch.torch_record import Slots, by_rule, nbytes
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import Pads, spatial_pads
from oocdl.graph.ir.program import Instruction, padded_shape
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS, is_thin
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

ONEDNN_DTYPES = frozenset({"float32", "bfloat16"})
"""dtypes of oneDNN's convolutions."""


def lands(kind: Convolution, item: Instruction) -> bool:
    """Whether one call of oneDNN makes all of the result of a convolution, or of a transposed one.

    With groups, adding to zeros takes longer than a copy (depthwise, 32 channels of 48^3: 4.7 ms, not 3.2).
    """
    made, (data, operand), slide = item.kernel_shapes[0], item.operands, slide_of(item)
    if item.dtypes[0] not in ONEDNN_DTYPES or not has_onednn() or len(made) not in SPATIAL_RANKS:
        return False
    if slide.groups > 1 or 0 in (*data.shape, *made):
        return False
    pads, weights = spatial_pads(data), operand.shape
    if kind.transposed:
        if set(slide.strides) != {1}:
            return makes_blocks(item)
        pads, weights = flipped_pads(item), (weights[1], weights[0], *weights[2:])
    if is_point(weights, slide, () if kind.transposed else pads):
        return not any(map(any, pads)) and min(weights[:2]) >= REGISTER_CHANNELS
    if not kind.transposed and has_few_taps(weights, slide, item.dtypes[0]) and made[1] >= REGISTER_CHANNELS:
        return False
    seen, (ends, *others) = _seen(kind, item)
    if min(seen) <= 0:
        return False
    return ends[0] == ends[1] or rows_alone(seen, weights[2], (ends, *others), slide)


def _seen(kind: Convolution, item: Instruction) -> tuple[Shape, Pads]:
    """The shape of operand 0 without what negative padding cuts off, and the rest of its padding, evened."""
    x = item.operands[0]
    box, pads = clipped(x.shape[2:], flipped_pads(item) if kind.transposed else spatial_pads(x))
    extents = [stop - start for start, stop in box]
    return (*x.shape[:2], *extents), evened(pads, extents, kind.weights(item)[2:], slide_of(item))


def convolution(kind: Convolution, item: Instruction, slots: Slots, rules: Rules) -> int:
    """Returns ``by_rule`` for planes, and less for channels last, of which oneDNN makes fewer copies."""
    if not slots.has_channels_last(item):
        return by_rule(item, slots, rules)
    (x, other), dtype, slide = item.operands, slots.dtype(item), slide_of(item)
    result, whole = nbytes(item.kernel_shapes[0], item.dtypes[0]), nbytes(padded_shape(x), dtype)
    weights, in_steps, scratch = kind.weights(item), set(slide.strides) == {1}, 0
    point = is_point(weights, slide, () if kind.transposed else spatial_pads(x))
    few = has_few_taps(weights, slide, dtype)
    for index in kind.data:
        taken = point and index == 0 and not in_steps  # what is seen of it is taken out, sorted or not
        operand = item.operands[index]
        if not taken and (operand.slot not in slots.channels_last or _has_gaps(item, index, slots)):
            scratch += nbytes(operand.shape, dtype)  # sorted first
    if kind.makes_weights and not (point or few) and loop_by_shape(weights, slide, dtype) is not None:
        return scratch + (2 + slots.threads) * nbytes(weights, dtype)  # each thread has sums of its own
    # Weights in the order of the data, in oneDNN's blocks of 16 channels, and flipped.
    blocks = nbytes((_blocks_of_16(weights[0]), _blocks_of_16(weights[1]), *weights[2:]), dtype)
    scratch += (3 + slots.threads) * blocks
    if kind.makes_weights:  # each further thread sorts a block of channels of both operands
        planes = (padded_shape(operand)[2:] for operand in item.operands)
        scratch += (slots.threads - 1) * sum(nbytes((16, *space), dtype) for space in planes)
    if kind.transposed and has_onednn() and makes_blocks(item):  # the blocks of one call
        return scratch + nbytes((planes_at_once(x.shape, weights[1]), *x.shape[3:], *weights[1:]), dtype)
    scratch += _group_blocks_bytes(kind, item, dtype)
    if not (point or few):
        scratch += _columns_bytes(kind, item, slots) + _distrusted_bytes(kind, item, dtype)
    if point:
        scratch += _one_tap_bytes(kind, item, dtype)
    elif few or _copies_data(kind, item):
        scratch += whole
    if few:  # columns of one plane (``im2col``), twice: a product may want them transposed
        scratch += 2 * nbytes((padded_shape(x)[1], *weights[2:], *padded_shape(x)[3:]), dtype)
    if kind.makes_weights:
        (before, after), *_ = evened(spatial_pads(x), x.shape[2:], weights[2:], slide)
        if x.shape[0] > 1 and before != after:  # end rows are taken apart: what is left of images has gaps
            scratch += nbytes(other.shape, dtype)
        if dtype == "bfloat16":  # both are sorted into blocks of 16 channels
            for batch, channels, *space in map(padded_shape, item.operands):
                scratch += nbytes((batch, _blocks_of_16(channels), *space), dtype)
        if dtype == "float32" and is_thin(x.shape) and prod(weights[2:]) > 1 and not few:
            # One plane at most is copied (``thin_slab``); there are as many as the third axis has.
            for shape in map(padded_shape, item.operands):
                scratch += 2 * nbytes(shape, dtype) // max(shape[2], 1)
    elif in_steps:
        scratch += result // 8 + (0 if item.outputs[0] in slots.channels_last else result)
    else:
        scratch += result // 8 + (2 * result if dtype == "float32" and is_thin(x.shape) else 0)
        scratch += result if slide.groups > 1 else 0  # one that is cut is copied: channels are factors
    return scratch


def _columns_bytes(kind: Convolution, item: Instruction, slots: Slots) -> int:
    """Count the im2col of one small sample, for which PyTorch by itself leaves oneDNN out.

    oneDNN takes it where it is told where the result belongs, or is called by hand, as for a thin slab.
    """
    x, dtype, weights = item.operands[0], slots.dtype(item), kind.weights(item)
    by_hand = item.outputs[0] in slots.direct or is_thin(x.shape)
    large = x.shape[0] > 1 or prod(x.shape[:4]) > THIN_SLAB_ELEMENTS or min(weights[-2:]) > 3
    if by_hand or large or groups_of(item) > 1 or dtype != "float32" or len(weights) < 4:
        return 0
    flipped = kind.transposed and set(slide_of(item).strides) == {1}
    places = item.operands[1].shape if kind.makes_weights else item.kernel_shapes[0]
    if kind.transposed and not flipped:
        places = x.shape
    columns = nbytes((weights[0 if flipped else 1], *weights[2:], *places[2:]), dtype)
    copied = (x.shape, places) if len(weights) == 5 else ()  # of volumes both are sorted into planes
    return columns + sum(nbytes(shape, dtype) for shape in copied)


def _distrusted_bytes(kind: Convolution, item: Instruction, dtype: str) -> int:
    """Counts the copies of operands and result of what oneDNN is not trusted with (``conv_calls``)."""
    slide, taps = slide_of(item), kind.weights(item)[2:]
    if kind.transposed and set(slide.strides) != {1}:
        return 0
    axes = zip(kind.other_data(item)[2:], slide.strides, strict=True)
    strides = tuple(1 if n == 1 else s for n, s in axes)
    copies = nbytes(padded_shape(item.operands[0]), dtype) if strides != slide.strides else 0
    slide = slide._replace(strides=strides)
    extents = _seen(kind, item)[0][2:]
    if kind.makes_weights and takes_planes(extents, taps, slide, dtype):
        copies += sum(nbytes(operand.shape, dtype) for operand in item.operands if slide.strides[0] > 1)
        extents, taps = extents[1:], taps[1:]
        slide = slide._replace(strides=slide.strides[1:], dilations=slide.dilations[1:])
    if widens(extents, taps, slide, dtype, kind.makes_weights):
        shapes = (*map(padded_shape, item.operands), item.kernel_shapes[0])
        copies += 2 * sum(nbytes(shape, "float32") for shape in shapes)
    return copies


def _blocks_of_16(channels: int) -> int:
    return -(-channels // 16) * 16


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


def _copies_data(kind: Convolution, item: Instruction) -> bool:
    """Whether operand 0 of a convolution is copied: padded by hand, or cut so that it has gaps."""
    x, slide, taps = item.operands[0], slide_of(item), kind.weights(item)[2:]
    if kind.transposed and set(slide.strides) != {1}:
        return len(taps) == 3
    seen, pads = _seen(kind, item)
    first, *others = [before != after for before, after in pads]
    return any(others) or seen[3:] != x.shape[3:] or (first and not rows_alone(seen, taps[0], pads, slide))


def _one_tap_bytes(kind: Convolution, item: Instruction, dtype: str) -> int:
    """Counts copies that a convolution of one tap makes of its operand and result (``one_by_one``)."""
    x, shape, strides = item.operands[0], item.kernel_shapes[0], slide_of(item).strides
    if kind.transposed:
        whole = set(strides) == {1} and shape[2:] == x.shape[2:]
        data = nbytes(padded_shape(x), dtype)
        return 0 if whole else nbytes((*shape[:2], *x.shape[2:]), dtype) + data
    if set(strides) == {1}:
        return 0
    return nbytes((*x.shape[:2], *kind.other_data(item)[2:]), dtype)


def _group_blocks_bytes(kind: Convolution, item: Instruction, dtype: str) -> int:
    """Counts the blocks of 16 by 16 channels that oneDNN makes of the weights of each group.

    It has kernels without them for one channel of windows of up to 3 in a row, not dilated, and
    for results that are data.
    """
    groups, weights = groups_of(item), kind.weights(item)
    dilated = set(slide_of(item).dilations) != {1}
    one = weights[0] == groups and weights[1] == 1
    if groups == 1 or (one and not dilated and (weights[-1] <= 3 or not kind.makes_weights)):
        return 0
    return nbytes(
        (groups, _blocks_of_16(weights[0] // groups), _blocks_of_16(weights[1]), *weights[2:]), dtype
    )


def device_convolution(kind: Convolution, item: Instruction, dtype: str, on_host: bool) -> int:
    """Counts the im2col of a sample where no library convolves on a device.

    On the host that is so in thin slabs; on a GPU if the convolution is dilated, since cuDNN's kernels for
    that do not give equal bits.
    """
    if not on_host and set(slide_of(item).dilations) == {1}:
        return 0
    data = [padded_shape(item.operands[index]) for index in kind.data]
    if not kind.makes_weights:
        data.append(item.kernel_shapes[0])
    return nbytes(kind.weights(item)[1:], dtype) * max(prod(shape[2:]) for shape in data)
