"""Operations do what MONAI's transforms do with the same parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oocdl.augmentation.deformation import Affine, affine
from oocdl.augmentation.draws import Draws
from oocdl.augmentation.filters import Smoothed
from oocdl.augmentation.intensity import Gamma, Linear, RandScaleIntensityFixedMean
from oocdl.augmentation.preparation import evaluate
from oocdl.augmentation.rigid import Mirrored, Turned
from oocdl.augmentation.transform import Operation, Sample
from oocdl.graph.ir.index import Region, as_slices, whole

monai: Any = pytest.importorskip("monai.transforms")

Array = NDArray[Any]
SHAPE = (2, 9, 7, 9)
IMAGE = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 5, SHAPE).astype("uint8")


def made(one: Operation, image: Array = IMAGE) -> Array:
    out = np.empty_like(image)

    def read(box: Region, block: Array) -> None:
        block[...] = image[as_slices(box)]

    evaluate([one], whole(image.shape), read, out, 1 << 30, image.dtype)
    return out


def same(one: Operation, theirs: Any, tolerance: float = 2e-6, image: Array = IMAGE) -> None:
    np.testing.assert_allclose(made(one, image), np.asarray(theirs), atol=tolerance)


def test_flips_and_turns() -> None:
    same(Mirrored((1, 3), SHAPE), monai.Flip((0, 2))(IMAGE), 0)
    for turns in (1, 2, 3):
        same(Turned(turns, (1, 3), 9), monai.Rotate90(turns, (0, 2))(IMAGE), 0)


def test_numbers() -> None:
    same(Linear((1.3, 1.3), (0.0, 0.0)), monai.ScaleIntensity(minv=None, maxv=None, factor=0.3)(IMAGE))
    same(Linear((1.0, 1.0), (0.7, 0.7)), monai.ShiftIntensity(0.7)(IMAGE))
    low, high = (float(IMAGE.min()),) * 2, (float(IMAGE.max()),) * 2
    for inverted in (False, True):
        theirs = monai.AdjustContrast(1.7, invert_image=inverted)(IMAGE)
        same(Gamma((1.7, 1.7), low, high, inverted), theirs, 1e-5)


@pytest.mark.parametrize("preserve", [False, True])
def test_contrast_about_the_mean(preserve: bool) -> None:
    ranges = np.array([[channel.min(), channel.max(), channel.mean()] for channel in IMAGE], "float64")
    for channel_wise in (False, True):
        ours = RandScaleIntensityFixedMean(1.0, (0.4, 0.4), preserve, channel_wise)
        one = ours.draw(Draws(0), Sample(2, SHAPE[1:], ranges))
        assert one is not None
        same(one, monai.ScaleIntensityFixedMean(0.4, preserve, True, channel_wise)(IMAGE))


@pytest.mark.parametrize("sigmas", [(0.25, 0.8, 1.5), (2.0, 0.1, 3.0)])
def test_smoothing(sigmas: tuple[float, ...]) -> None:
    same(Smoothed((sigmas, sigmas), SHAPE), monai.GaussianSmooth(sigmas)(IMAGE))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("rank", [2, 3])
def test_affine_maps(padding: str, rank: int) -> None:
    images, labels = (IMAGE, LABELS) if rank == 3 else (IMAGE[:, :, 0], LABELS[:, :, 0])
    angles, shears = (0.5, -0.4, 0.3)[: 2 * rank - 3], (0.1, -0.2, 0.15, 0.05, 0.2, 0.1)[: rank * (rank - 1)]
    shift, scales = (1.5, -2.0, 0.7)[:rank], (1.2, 0.8, 1.1)[:rank]
    one = Affine(images.shape, padding, affine(rank, angles, shears, shift, scales))
    given: dict[str, Any] = {"padding_mode": padding, "image_only": True, "shear_params": shears}
    given |= {"translate_params": shift, "scale_params": scales}
    given |= {"rotate_params": angles if rank == 3 else angles[0]}
    same(one, monai.Affine(**given, mode="bilinear", dtype=np.float64)(images), 1e-5, images)
    theirs = monai.Affine(**given, mode="nearest", dtype=np.float64)(labels)
    assert np.array_equal(made(one, labels), np.asarray(theirs).astype("uint8"))
