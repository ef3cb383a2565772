"""Transposed 3D convolutions with windows and steps of two, as on a U-Net's way up.

The windows do not overlap, so each place of the operand makes one block of 2 x 2 x 2 places of the result. A
convolution of one tap computes the blocks of some planes as its channels, and a copy from the cache writes
them into the result. oneDNN's transposed convolution copies thin slabs into a format of its own and back
(`docs/explanation/kernel-measurements.md`, 3, compares them).
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
"""Extents of windows that are faster by blocks. Blocks of 4^3 leave the cache before they are copied."""
LEAST_PLACES = 1 << 10
"""Minimum number of places of a sample; below, the calls take longer than oneDNN's kernel."""
CHUNK_ELEMENTS = 1 << 19
"""Maximum elements that one call computes, but at least a plane: they are copied while in the cache."""


def makes_blocks(item: Instruction) -> bool:
    """Whether ``convolve`` computes a transposed convolution: windows and steps of two, nothing cropped."""
    x, weights, slide = item.operands[0], padded_shape(item.operands[1]), slide_of(item)
    if weights[2:] != TAPS or slide.strides != TAPS or slide.groups > 1 or item.dtypes[0] != "float32":
        return False
    if prod(x.shape[2:]) < LEAST_PLACES or 0 in x.shape:
        return False
    if any(crop_of(item)) or any(map(any, spatial_pads(x))):
        return False
    return item.kernel_shapes[0][2:] == tuple(2 * extent for extent in x.shape[2:])


def planes_at_once(shape: Shape, made: int) -> int:
    """Return the number of planes of an operand of ``shape`` that one call convolves to ``made`` channels."""
    return max(min(shape[2], CHUNK_ELEMENTS // (8 * made * shape[3] * shape[4])), 1)


def convolve(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the transposed convolution of ``x[n, c, d, h, w]`` with ``w[c, o, 2, 2, 2]`` in steps of two.

    The result has its channels last, and lies in ``out`` if that is given.
    """
    x, (channels, made, *_) = channels_last(x), w.shape
    samples, _, depth, rows, columns = x.shape
    if out is None:
        out = x.new_empty((samples, 2 * depth, 2 * rows, 2 * columns, made)).movedim(-1, 1)
    blocks = channels_last(w.movedim(1, -1).reshape(channels, -1).t().reshape(-1, channels, 1, 1, 1))
    step, one = planes_at_once(tuple(x.shape), made), Slide((1, 1, 1), (1, 1, 1))
    places = out.movedim(1, -1).view(samples, depth, 2, rows, 2, columns, 2 * made)
    # All calls share one buffer: the heap might not reuse the block of one that was freed.
    buffer = x.new_empty((1, step, rows, columns, 8 * made)).movedim(-1, 1)
    for sample in range(samples):
        for first in range(0, depth, step):
            part = channels_last(x[sample : sample + 1, :, first : first + step])
            found = channels_last(buffer[:, :, : part.shape[2]])
            conv_calls.into(found, part, blocks, [0, 0, 0], one)
            block = found[0].movedim(0, -1).view(-1, rows, columns, 2, 2, 2 * made)
            places[sample, first : first + step].copy_(block.permute(0, 3, 1, 4, 2, 5))
    return out
