"""The gradient of weights by a compiled loop, for shapes of which oneDNN's kernels are slow.

Without AVX-512 oneDNN gathers the windows of a volume in memory before it multiplies, and its kernels for
images are half as fast as the convolution. Depthwise windows wider than three are slow with AVX-512, too.
docs/explanation/kernel-measurements.md, section 6, has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.engines.torch.layout import has_channels_last
from oocdl.engines.torch.torch_threads import team_of
from oocdl.fusion.window_sums import SumLoop, Taps, add_window_sums, loop_for
from oocdl.graph.ir.operands import Pads

LANES = {"AVX2": 8, "AVX512": 16}
"""Capability of the processor, by PyTorch's name -> float32 numbers in a vector."""
LEAST_INPUTS = 4
"""Fewest channels of the data for which the loop is faster than oneDNN."""
ONEDNN_DEPTHWISE_TAPS = 9
"""Most taps of a depthwise window for which, without AVX-512, oneDNN is as fast as the loop."""


def loop_of(x: Tensor, dy: Tensor, shape: Sequence[int], slide: Slide) -> SumLoop | None:
    """Return the loop that is the fastest for weights of ``shape``; None where another kernel is."""
    has_order = has_channels_last(x) and has_channels_last(dy)
    return loop_by_shape(shape, slide, str(x.dtype)[6:]) if has_order else None


def loop_by_shape(shape: Sequence[int], slide: Slide, dtype: str) -> SumLoop | None:
    """Return the same for data of channels last."""
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype != "float32" or len(shape) < 4 or capability not in LANES:
        return None
    (outputs, inputs, *window), lanes = shape, LANES[capability]
    if slide.groups > 1:
        slow = prod(window) > ONEDNN_DEPTHWISE_TAPS if capability == "AVX2" else window[-1] > 3
        return loop_for(1, outputs, True, lanes) if slow and inputs == 1 and slide.groups == outputs else None
    slow = capability == "AVX2" and inputs >= LEAST_INPUTS
    return loop_for(inputs, outputs, False, lanes) if slow else None


def weight_gradient(
    loop: SumLoop, x: Tensor, dy: Tensor, shape: Sequence[int], pads: Pads, slide: Slide
) -> Tensor:
    """The gradient of weights of ``shape``, [d, c, *window], of ``x[n, c, *space]`` without its padding."""
    axes = zip(shape[2:], slide.strides, slide.dilations, [before for before, _ in pads], strict=True)
    window = [Taps(*axis) for axis in axes]
    data, grads = (tensor.movedim(1, -1).numpy() for tensor in (x, dy))
    if len(window) == 2:
        window, data, grads = [Taps(1, 1, 1, 0), *window], data[:, None], grads[:, None]
    channels = (shape[1], shape[0]) if loop.block else (shape[0],)
    made = x.new_zeros((*(taps.count for taps in window), *channels))
    add_window_sums(loop, data, grads, made.numpy(), window, team_of(torch.get_num_threads()))
    made = made.view(*shape[2:], -1, shape[0])
    return made.movedim((-1, -2), (0, 1))
