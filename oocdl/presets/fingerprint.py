"""What nnU-Net plans from the headers of a dataset: spacing, and the network's depth, kernels and strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Numbers = tuple[float, ...]
Sizes = tuple[int, ...]

ANISOTROPIC = 3  # ratio of spacings, and of extents, above which an axis counts as of low resolution
LEAST_EXTENT, MOST_CHANNELS = 4, 320  # smallest extent of the deepest level, and its most channels


@dataclass(frozen=True)
class Topology:
    """A U-Net by level, the largest first."""

    widths: Sizes  # channels
    kernels: tuple[Sizes, ...]  # extents [z, y, x] of the convolutions
    strides: tuple[Sizes, ...]  # strides with which a level is made from the one above; 1 for the first


def target_spacing(spacings: Sequence[Numbers], shapes: Sequence[Sizes]) -> Numbers:
    """Return the spacing to resample all volumes to: the median, as nnU-Net's ``ExperimentPlanner``.

    ``spacings`` are in millimetres, ``shapes`` in voxels, both [z, y, x]. An axis whose median is more than
    three times coarser than the others, in volumes with three times fewer voxels along it, takes the tenth
    percentile of its spacings, but no finer one than the others have.
    """
    target, size = np.percentile(spacings, 50, axis=0), np.percentile(shapes, 50, axis=0)
    worst = int(np.argmax(target))
    others = [axis for axis in range(len(target)) if axis != worst]
    if target[worst] > ANISOTROPIC * max(target[others]) and size[worst] * ANISOTROPIC < min(size[others]):
        low = float(np.percentile([row[worst] for row in spacings], 10))
        target[worst] = low if low >= max(target[others]) else max(target[others]) + 1e-5
    return tuple(float(step) for step in target)


def median_shape(spacings: Sequence[Numbers], shapes: Sequence[Sizes], target: Numbers) -> Sizes:
    """Return the median extents [z, y, x], in voxels, of volumes that are resampled to ``target``."""
    resampled = np.round(np.multiply(shapes, spacings) / target)
    return tuple(int(extent) for extent in np.median(resampled, axis=0))


def topology_of(spacing: Numbers, shape: Sizes, base: int) -> Topology:
    """Return the levels for volumes of a size and spacing, as nnU-Net's ``get_pool_and_conv_props``.

    An axis is halved while it keeps four voxels and is less than twice as coarse as the finest that can be
    halved; its kernels have one voxel until the others have come within a factor of two of it.
    """
    steps, extents, kernel = list(spacing), list(shape), [1, 1, 1]
    strides, kernels = list[Sizes]([(1, 1, 1)]), list[Sizes]()
    while True:
        wide = [axis for axis in range(3) if extents[axis] >= 2 * LEAST_EXTENT]
        axes = [axis for axis in wide if steps[axis] < 2 * min(steps[other] for other in wide)]
        if not axes or (len(axes) == 1 and extents[axes[0]] < 3 * LEAST_EXTENT):
            break
        finest = min(steps)
        kernel = [3 if steps[axis] < 2 * finest else kernel[axis] for axis in range(3)]
        kernels.append(tuple(kernel))
        strides.append(tuple(2 if axis in axes else 1 for axis in range(3)))
        for axis in axes:
            steps[axis], extents[axis] = 2 * steps[axis], -(-extents[axis] // 2)
    kernels.append((3, 3, 3))
    widths = tuple(min(base << level, MOST_CHANNELS) for level in range(len(strides)))
    return Topology(widths, tuple(kernels), tuple(strides))
