"""The geometry of windows that slide along spatial axes: attributes, counts, letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oocdl.graph.ir.graph import Node, Shape
from oocdl.ops._broadcast import fail

SPATIAL = "dhw"
"""Letters of the spatial axes, aligned from the right."""


@dataclass(frozen=True)
class Slide:
    """The geometry of a window that slides along one axis."""

    kernel: int
    stride: int
    dilation: int
    pad: int
    """Padding before the axis."""
    pad_after: int

    @property
    def reach(self) -> int:
        """The extent of the dilated window."""
        return self.dilation * (self.kernel - 1) + 1

    def count(self, extent: int) -> int:
        """Return the number of windows along an axis of ``extent``."""
        return (extent + self.pad + self.pad_after - self.reach) // self.stride + 1

    def fields(self) -> tuple[int, int, int, int]:
        """Return the arguments of an index expression, after its letter."""
        return self.kernel, self.stride, self.dilation, self.pad


def slides(node: Node, kernel: Sequence[int]) -> list[Slide]:
    """Return the window of each spatial axis; raises ModelError for attributes of wrong length or sign."""
    rank = len(kernel)
    strides, dilations, pads = (node.attrs[name] for name in ("strides", "dilations", "pads"))
    if (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank):
        fail(node, f"strides, dilations and pads do not fit a kernel of {rank} axes")
    if min((*strides, *dilations, *kernel)) < 1 or min(pads) < 0:
        fail(node, "strides, dilations and kernel must be positive, pads not negative")
    return [Slide(kernel[i], strides[i], dilations[i], pads[i], pads[rank + i]) for i in range(rank)]


def spatial_letters(rank: int) -> str:
    """Return the letters of ``rank`` spatial axes."""
    return SPATIAL[3 - rank :]


def window_shape(node: Node, spatial: Sequence[int], windows: Sequence[Slide]) -> Shape:
    """Return how many windows there are along each axis of ``spatial``."""
    found = tuple(slide.count(extent) for slide, extent in zip(windows, spatial, strict=True))
    if min(found, default=1) < 1:
        fail(node, f"its window does not fit into spatial shape {list(spatial)}")
    return found
