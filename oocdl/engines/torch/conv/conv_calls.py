"""PyTorch's convolutions as they are called here: by the kernel it chooses, or by oneDNN's, asked by hand.

oneDNN 3.12, that of PyTorch 2.13 and 2.14, makes wrong numbers of some shapes, or writes past the end of its
work space. In bfloat16: a window longer than an axis or shorter than its step, an axis that ends before a
second step, dilated gradients of weights, and on processors with AMX most gradients of weights of volumes. In
float32: a single window in steps, and gradients of weights in steps of volumes thinner than a window.
``tests/engines/torch/test_any_convolution.py`` looks for more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.graph.ir.operands import Pads

aten = torch.ops.aten


def has_onednn() -> bool:
    """Whether this PyTorch is built with oneDNN."""
    found: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return found


def has_room(extents: Sequence[int], taps: Sequence[int], slide: Slide) -> bool:
    """Whether each axis of space holds a window, and a step beside it if steps are larger than one.

    >>> has_room((5, 3), (3, 3), Slide((2, 1), (1, 1))), has_room((4, 3), (3, 3), Slide((2, 1), (1, 1)))
    (True, False)
    """
    axes = zip(extents, taps, slide.strides, slide.dilations, strict=True)
    return all(n > d * (k - 1) + (s if s > 1 else 0) for n, k, s, d in axes)


def widens(
    extents: Sequence[int], taps: Sequence[int], slide: Slide, dtype: str, makes_weights: bool = False
) -> bool:
    """Whether a convolution in bfloat16 is computed in float32, where products of such numbers are exact."""
    if dtype != "bfloat16":
        return False
    skips = any(step > count for step, count in zip(slide.strides, taps, strict=True))
    return skips or not has_room(extents, taps, slide) or (makes_weights and set(slide.dilations) != {1})


def takes_planes(extents: Sequence[int], taps: Sequence[int], slide: Slide, dtype: str) -> bool:
    """Whether a gradient of weights of volumes is computed by ``thin_slab``, however thick they are.

    In bfloat16 that takes as long as one call: 16 to 16 channels, 16 x 128 x 128: 7.6 ms, not 8.4.
    """
    if len(taps) != 3 or dtype == "float64":
        return False
    return dtype == "bfloat16" or (max(slide.strides) > 1 and not has_room(extents, taps, slide))


def in_one_step(
    x: Tensor, pads: Pads, taps: Sequence[int], made: Sequence[int], slide: Slide
) -> tuple[Tensor, Pads, Slide]:
    """Return ``x``, its padding and its steps, in steps of one along each axis that has a single window.

    ``x`` is cut off behind that window. ``made``: extents of the result's axes of space.
    """
    strides, around = list(slide.strides), list(pads)
    for axis, count in enumerate(made):
        window, before = slide.dilations[axis] * (taps[axis] - 1) + 1, pads[axis][0]
        seen = min(x.shape[axis + 2], window - before)
        if count == 1 and strides[axis] > 1 and seen > 0:
            x = x.narrow(axis + 2, 0, seen)
            strides[axis], around[axis] = 1, (before, window - before - seen)
    return x, tuple(around), slide._replace(strides=tuple(strides))


def _widens(x: Tensor, taps: Sequence[int], slide: Slide, makes_weights: bool = False) -> bool:
    """``widens``, of tensors: only the processor's kernels are distrusted."""
    return x.device.type == "cpu" and widens(x.shape[2:], taps, slide, str(x.dtype)[6:], makes_weights)


def convolve(x: Tensor, w: Tensor, padding: Sequence[int], slide: Slide) -> Tensor:
    """A convolution by the kernel that PyTorch chooses."""
    if _widens(x, w.shape[2:], slide):
        call = by_onednn if x.dim() > 3 else convolve  # PyTorch might choose im2col of a thin slab
        return call(x.float(), w.float(), padding, slide).to(x.dtype)
    return torch.convolution(
        x, w, None, slide.strides, padding, slide.dilations, False, [0] * len(padding), slide.groups
    )


def by_onednn(x: Tensor, w: Tensor, padding: Sequence[int], slide: Slide) -> Tensor:
    """A convolution by oneDNN, also where PyTorch would choose another kernel."""
    made: Tensor = aten.mkldnn_convolution(x, w, None, padding, *slide)
    return made


def into(out: Tensor, x: Tensor, w: Tensor, padding: Sequence[int], slide: Slide) -> Tensor:
    """A convolution by oneDNN that makes its result in ``out``, which has the memory order of ``x``.

    oneDNN takes an output only to add to it, so ``out`` is zeroed first.
    """
    if _widens(x, w.shape[2:], slide):
        return out.copy_(convolve(x, w, padding, slide))
    made: Tensor = torch.ops.mkldnn._convolution_pointwise_.binary(
        out.zero_(), x, w, None, padding, *slide, "add", 1.0, None, [], None
    )
    return made


def weight_gradient(dy: Tensor, x: Tensor, w: Tensor, padding: Sequence[int], slide: Slide) -> Tensor:
    """The gradient of the weights, of which only the shape of ``w`` and how it lies matter."""
    if _widens(x, w.shape[2:], slide, makes_weights=True):
        return weight_gradient(dy.float(), x.float(), w.float(), padding, slide)
    strides, dilations, groups = slide
    none, wanted = [0] * len(strides), [False, True, False]
    made: Tensor = aten.convolution_backward(
        dy, x, w, None, strides, padding, dilations, False, none, groups, wanted
    )[1]
    return made
