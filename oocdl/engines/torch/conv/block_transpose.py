"""Transposed 3D convolutions whose windows of two touch and do not overlap, as on a U-Net's way up.

Each place of the operand makes a block of places of the result, all alone: a convolution of one tap to as
many channels as a block has elements, whose results are put where they belong. oneDNN's own kernel takes thin
slabs in a format of its own, into which operand and result are copied (32 to 16 channels, 5 x 64 x 64: 17 ms,
by blocks 1.2), and the result of thick ones has to be copied to its place (32 x 64 x 64: 13 ms, by blocks 8).
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from oocdl.engines.convolution import Slide, slide_of
from oocdl.engines.torch.conv import conv_calls
from oocdl.engines.torch.layout import channels_last
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import crop_of, spatial_pads
from oocdl.graph.ir.program import Instruction, padded_shape

TAPS = (2, 2, 2)
"""Windows that are faster by blocks. Blocks of 4^3 leave the cache before they are put in place."""
LEAST_PLACES = 1 << 10
"""Places of a sample from which on blocks are worth their calls."""
CHUNK_ELEMENTS = 1 << 19
"""Elements of blocks that one call makes, or a plane of them: they are put in place from the cache."""


def is_apart(item: Instruction) -> bool:
    """Whether a transposed convolution is one of such windows, and all that it makes is wanted."""
    x, weights, slide = item.operands[0], padded_shape(item.operands[1]), slide_of(item)
    if weights[2:] != TAPS or slide.strides != TAPS or slide.groups > 1 or item.dtypes[0] != "float32":
        return False
    if prod(x.shape[2:]) < LEAST_PLACES or 0 in x.shape:
        return False
    if any(crop_of(item)) or any(map(any, spatial_pads(x))):
        return False
    return item.kernel_shapes[0][2:] == tuple(2 * extent for extent in x.shape[2:])


def planes_at_once(shape: Shape, made: int) -> int:
    """Return how many planes of an operand of ``shape`` one call convolves to ``made`` channels."""
    return max(min(shape[2], CHUNK_ELEMENTS // (8 * made * shape[3] * shape[4])), 1)


def convolve(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """The transposed convolution of ``x[n, c, d, h, w]`` with ``w[c, o, 2, 2, 2]``, in steps of two.

    The result has its channels last; it is made in ``out`` where that is given.
    """
    x, (channels, made, *_) = channels_last(x), w.shape
    samples, _, depth, rows, columns = x.shape
    if out is None:
        out = x.new_empty((samples, 2 * depth, 2 * rows, 2 * columns, made)).movedim(-1, 1)
    blocks = channels_last(w.movedim(1, -1).reshape(channels, -1).t().reshape(-1, channels, 1, 1, 1))
    step, one = planes_at_once(tuple(x.shape), made), Slide((1, 1, 1), (1, 1, 1))
    places = out.movedim(1, -1).view(samples, depth, 2, rows, 2, columns, 2 * made)
    # One for all calls: once it was freed, the heap might find no room for the next one.
    room = x.new_empty((1, step, rows, columns, 8 * made)).movedim(-1, 1)
    for sample in range(samples):
        for first in range(0, depth, step):
            part = channels_last(x[sample : sample + 1, :, first : first + step])
            found = channels_last(room[:, :, : part.shape[2]])
            conv_calls.into(found, part, blocks, [0, 0, 0], one)
            block = found[0].movedim(0, -1).view(-1, rows, columns, 2, 2, 2 * made)
            places[sample, first : first + step].copy_(block.permute(0, 3, 1, 4, 2, 5))
    return out
