"""Transforms, as ``fit(augment=[...])`` takes them: names and arguments are MONAI's."""

from oocdl.augmentation.crop import RandSpatialCrop
from oocdl.augmentation.deformation import Rand3DElastic, RandAffine
from oocdl.augmentation.filters import RandGaussianSmooth
from oocdl.augmentation.intensity import (
    RandAdjustContrast,
    RandGaussianNoise,
    RandScaleIntensity,
    RandScaleIntensityFixedMean,
    RandShiftIntensity,
)
from oocdl.augmentation.rigid import RandFlip, RandRotate90

__all__ = ["Rand3DElastic", "RandAdjustContrast", "RandAffine", "RandFlip"]
__all__ += ["RandGaussianNoise", "RandGaussianSmooth", "RandRotate90", "RandScaleIntensity"]
__all__ += ["RandScaleIntensityFixedMean", "RandShiftIntensity", "RandSpatialCrop"]
