"""PyTorch's convolutions as they are called here: by the kernel it chooses, or by oneDNN's, asked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.engines.torch.conv.trusted import widens

aten = torch.ops.aten


def has_onednn() -> bool:
    """Whether this PyTorch is built with oneDNN."""
    found: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return found


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
