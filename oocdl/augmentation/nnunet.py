"""nnU-Net's set of transforms, and those of its transforms that MONAI does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Any, ClassVar, Literal

from oocdl.augmentation.deformation import Affine, affine
from oocdl.augmentation.draws import Draws, Shape
from oocdl.augmentation.filters import ByChannel, Coarse, Smoothed
from oocdl.augmentation.intensity import (
    Noise,
    RandAdjustContrast,
    RandGaussianNoise,
    RandScaleIntensity,
    RandScaleIntensityFixedMean,
)
from oocdl.augmentation.rigid import RandFlip
from oocdl.augmentation.transform import Operation, Sample, Transform

Augment = Literal["nnunet"] | Transform | Sequence[Transform | Literal["nnunet"]] | None
"""Transforms, and the name of a set of them."""
ROTATION_3D, ROTATION_2D = pi / 6, pi  # largest angle about each axis, in radians
LONG = 1.5  # ratio of the extents of an image above which it is turned by no more than ``pi / 12``


@dataclass(frozen=True)
class RotateAndScale(Transform):
    """Rotation about each axis, and one scale for all, each with its own probability."""

    spatial: ClassVar[bool] = True
    ranks: ClassVar[tuple[int, ...]] = (2, 3)
    prob: float = 1.0
    p_rotation: float = 0.2
    p_scaling: float = 0.2
    scaling: tuple[float, float] = (0.7, 1.4)

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        rank = len(sample.spatial)
        turns, scales = draws.uniform() < self.p_rotation, draws.uniform() < self.p_scaling
        if not (turns or scales):
            return None
        most = ROTATION_3D if rank == 3 else ROTATION_2D
        if rank == 2 and max(sample.spatial) > LONG * min(sample.spatial):
            most = pi / 12
        angles = [draws.uniform(-most, most) for _ in range(2 * rank - 3)] if turns else ()
        scale = draws.uniform(*self.scaling) if scales else 1.0
        return Affine(sample.shape, "zeros", affine(rank, angles, (), (), (scale,) * rank))


@dataclass(frozen=True)
class SameNoise(RandGaussianNoise):
    """Normal noise that is the same in all channels."""

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        deviation = draws.uniform(*self._ends("std"))
        return Noise(draws.key, self.mean, (deviation,) * sample.channels, (1, *sample.spatial))


@dataclass(frozen=True)
class Blur(Transform):
    """Gaussian blur of half of the channels, each axis with its own deviation in voxels."""

    apart: ClassVar[bool] = True  # whether a channel has a number for each axis, or one for all of them
    prob: float = 0.2
    ends: tuple[float, float] = (0.5, 1.0)  # ends of the range of a channel's numbers
    p_per_channel: float = 0.5

    def operation(self, draws: Draws, sample: Sample) -> Operation | None:
        rank, p = len(sample.spatial), self.p_per_channel
        numbers = tuple(
            draws.each(rank, *self.ends, apart=self.apart) if draws.uniform() < p else None
            for _ in range(sample.channels)
        )
        return self.made(numbers, sample.shape) if any(numbers) else None

    def made(self, numbers: ByChannel, shape: Shape) -> Operation:
        """Return the operation with these numbers."""
        return Smoothed(numbers, shape, reflects=True)


@dataclass(frozen=True)
class LowResolution(Blur):
    """Half of the channels at a lower resolution, the same along all axes, and back."""

    apart: ClassVar[bool] = False
    prob: float = 0.25

    def made(self, numbers: ByChannel, shape: Shape) -> Operation:
        return Coarse(numbers, shape)


def nnunet(spatial: Shape) -> tuple[Transform, ...]:
    """Return nnU-Net v2's transforms in its order, with its probabilities, less what is not local.

    Gamma does not put mean and deviation of the sample back; labels are those of the nearest voxel.
    """
    return (
        RotateAndScale(),
        SameNoise(prob=0.1, std=0.1),
        Blur(),
        RandScaleIntensity((-0.25, 0.25), prob=0.15, channel_wise=True),
        RandScaleIntensityFixedMean(0.15, (-0.25, 0.25), preserve_range=True, channel_wise=True),
        LowResolution(),
        RandAdjustContrast(0.1, (0.7, 1.5), invert_image=True, channel_wise=True),
        RandAdjustContrast(0.3, (0.7, 1.5), channel_wise=True),
        *(RandFlip(0.5, axis) for axis in range(len(spatial))),
    )


def transforms_of(augment: Any, spatial: Shape) -> tuple[Transform, ...]:
    """Return the transforms that ``augment=`` stands for, for samples of these spatial extents."""
    items: Any = (augment,) if isinstance(augment, str | Transform) else augment or ()
    sets = (nnunet(spatial) if item == "nnunet" else (item,) for item in items)
    return tuple(one for found in sets for one in found)
