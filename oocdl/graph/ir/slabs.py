"""Tells thin slabs of volumes, which engines convolve at another speed than thick ones."""

from __future__ import annotations

from math import prod

from oocdl.graph.ir.graph import Shape

THIN_SLAB_ELEMENTS = 20480
"""Channels x depth x height of one sample up to which PyTorch computes a 3D convolution by im2col, unless
the engine avoids it. Such slabs are slower for the gradient of the weights."""


def is_thin(shape: Shape, most: int = THIN_SLAB_ELEMENTS) -> bool:
    """Whether ``shape`` (batch, channels, depth, height, width) is one thin slab of a volume.

    ``most``: channels x depth x height of the thickest that is thin, as ``Engine.thin_slab_elements`` says.

    >>> is_thin((1, 16, 4, 64, 64)), is_thin((1, 16, 64, 64, 64)), is_thin((1, 16, 4, 64, 64), 0)
    (True, False, False)
    """
    return len(shape) == 5 and shape[0] == 1 and prod(shape[:4]) <= most < prod(shape)
