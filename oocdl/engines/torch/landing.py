"""Which instructions can make their result in given memory, without a copy, with PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from oocdl.engines.convolution import Convolution, groups_of
from oocdl.engines.torch.conv.conv_padding import evened, flipped_pads, rows_alone
from oocdl.engines.torch.conv.im2col import has_few_taps
from oocdl.engines.torch.conv.one_by_one import REGISTER_CHANNELS, has_onednn, is_point
from oocdl.graph.ir.operands import crop_of, pads_of, spatial_pads
from oocdl.graph.ir.program import Instruction, padded_shape
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

ONEDNN_DTYPES = frozenset({"float32", "bfloat16"})
"""dtypes of oneDNN's convolutions."""


def pooling(item: Instruction) -> bool:
    """Whether all of a pooling's gradient is wanted, and channels lie last."""
    made = item.kernel_shapes[0]
    whole = made == padded_shape(item.operands[0]) and not any(crop_of(item))
    return whole and len(made) in SPATIAL_RANKS and made[1] > 1


def convolution(kind: Convolution, item: Instruction) -> bool:
    """Whether one call of oneDNN makes all of the result of a convolution, or of a transposed one.

    With groups, adding to zeros takes longer than a copy (depthwise, 32 channels of 48^3: 4.7 ms, not 3.2).
    """
    if groups_of(item) > 1:
        return False
    made, (data, weights) = item.kernel_shapes[0], item.operands
    outside = data.pads is not None and any(map(any, data.pads[:2]))
    if (
        item.dtypes[0] not in ONEDNN_DTYPES
        or not has_onednn()
        or len(made) not in SPATIAL_RANKS
        or pads_of(weights) is not None
    ):
        return False
    if item.fill or outside or any(crop_of(item)[:2]) or 0 in (*data.shape, *made):
        return False
    shape = weights.shape
    if kind.transposed:
        shape = (shape[1], shape[0], *shape[2:])
    return shape[0] == made[1] and _slides(kind, item, shape)


def _slides(kind: Convolution, item: Instruction, weights: Sequence[int]) -> bool:
    """Whether a convolution with ``weights[d, c, ..]`` makes no more than is wanted."""
    data, rank = item.operands[0], len(weights) - 2
    strides = tuple(item.attrs.get("strides") or (1,) * rank)
    dilations = tuple(item.attrs.get("dilations") or (1,) * rank)
    pads: Sequence[tuple[int, int]] = spatial_pads(data)
    if kind.transposed:
        if set(strides) != {1}:
            return False
        pads = flipped_pads(item, dilations)
        if prod(weights[2:]) == 1:
            return not any(map(any, pads)) and min(weights[:2]) >= REGISTER_CHANNELS
    elif is_point(weights, pads):
        return min(weights[:2]) >= REGISTER_CHANNELS
    elif has_few_taps(weights, strides) and weights[0] >= REGISTER_CHANNELS and item.dtypes[0] != "bfloat16":
        return False
    seen = [extent + min(b, 0) + min(a, 0) for extent, (b, a) in zip(data.shape[2:], pads, strict=True)]
    outside = [(max(b, 0), max(a, 0)) for b, a in pads]
    if min(seen) <= 0:
        return False
    even = evened(outside, seen, weights[2:], strides, dilations)
    if even[0][0] == even[0][1]:
        return True
    shape, rows = (*data.shape[:2], *seen), item.kernel_shapes[0][2]
    return rows_alone(shape, weights[2], even, strides, dilations, rows) > 0
