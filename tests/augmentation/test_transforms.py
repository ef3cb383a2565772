"""Every transform, whole and by regions: the same bits, and those of NumPy, PyTorch and MONAI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from oocdl import transforms
from oocdl.augmentation import filters, nnunet
from oocdl.augmentation.draws import Draws
from oocdl.augmentation.preparation import Stream, evaluate
from oocdl.augmentation.transform import Operation, Sample, Transform, parts
from oocdl.errors import InputError
from oocdl.graph.ir.index import Region, as_slices, region_shape, whole

Array = NDArray[Any]
SHAPE = (2, 9, 7, 9)
IMAGE = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 5, SHAPE[1:], dtype="uint8")[None]
RANGES = np.stack([IMAGE.min((1, 2, 3)), IMAGE.max((1, 2, 3)), IMAGE.mean((1, 2, 3))], 1).astype("float64")
AFFINE: dict[str, Any] = {
    "rotate_range": (0.5, 0.4, 0.3), "shear_range": (0.1,) * 6, "translate_range": (3.0, 2.0, 1.0),
    "scale_range": (0.3, 0.2, (-0.1, 0.1)),
}  # fmt: skip
ALL: tuple[Transform, ...] = (
    transforms.RandFlip(1.0),
    transforms.RandFlip(1.0, (0, -1)),
    transforms.RandRotate90(1.0, spatial_axes=(0, 2)),
    transforms.RandRotate90(1.0, spatial_axes=(2, 0)),
    *(transforms.RandAffine(1.0, **AFFINE, padding_mode=mode) for mode in ("zeros", "border", "reflection")),
    *(transforms.Rand3DElastic((1, 2), (3, 9), 1.0, mode) for mode in ("zeros", "border", "reflection")),
    nnunet.RotateAndScale(1.0, 1.0),
    transforms.RandScaleIntensity(0.3, 1.0, channel_wise=True),
    transforms.RandShiftIntensity((0.1, 0.3), 1.0),
    transforms.RandScaleIntensityFixedMean(1.0, 0.4, preserve_range=True, channel_wise=True),
    transforms.RandAdjustContrast(1.0, (0.7, 1.5)),
    transforms.RandAdjustContrast(1.0, (0.7, 1.5), invert_image=True, channel_wise=True),
    transforms.RandGaussianNoise(1.0, 0.1, 0.5),
    transforms.RandGaussianSmooth(prob=1.0),
    nnunet.Blur(1.0, p_per_channel=0.7),
    nnunet.LowResolution(1.0, p_per_channel=0.7),
)
every_transform = pytest.mark.parametrize("transform", ALL, ids=lambda one: type(one).__name__)


def operation(transform: Transform, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Operation:
    """The transform with parameters drawn; a seed for which it does something."""
    transform.check(shape[1:])
    found = None
    while found is None:
        found, seed = transform.draw(Draws(seed), Sample(shape[0], shape[1:], RANGES)), seed + 1000
    return found


def made(operations: list[Operation], image: Array, region: Region, most_bytes: int = 1 << 30) -> Array:
    """A region of what the operations make of an image, read by regions."""
    out = np.empty(region_shape(region), image.dtype)

    def read(box: Region, block: Array) -> None:
        assert all(0 <= low < high <= n for (low, high), n in zip(box, image.shape, strict=True)), box
        block[...] = image[as_slices(box)]

    evaluate(operations, region, read, out, most_bytes, image.dtype)
    return out


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE) -> Region:
    ends = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in shape]
    return tuple((low, high + 1) for low, high in ends)


@every_transform
@settings(max_examples=25, deadline=None)
@given(region=regions(), seed=st.integers(0, 9), most=st.sampled_from([64, 1 << 10, 1 << 30]))
def test_a_region_is_that_of_the_whole(transform: Transform, region: Region, seed: int, most: int) -> None:
    one = operation(transform, seed)
    expected = made([one], IMAGE, whole(SHAPE))[as_slices(region)]
    assert np.array_equal(made([one], IMAGE, region, most), expected)
    if transform.spatial:
        one, box = operation(transform, seed, LABELS.shape), ((0, 1), *region[1:])
        expected = made([one], LABELS, whole(LABELS.shape))
        assert expected.dtype == LABELS.dtype
        assert np.array_equal(made([one], LABELS, box, most), expected[as_slices(box)])


@settings(max_examples=50, deadline=None)
@given(region=regions(), row=st.integers(0, 99), most=st.sampled_from([256, 1 << 12, 1 << 30]))
def test_a_region_of_nnunets_chain_is_that_of_the_whole(region: Region, row: int, most: int) -> None:
    ranges = np.broadcast_to(RANGES, (100, *RANGES.shape))
    stream = Stream(1 << 20, nnunet.nnunet(SHAPE[1:]), SHAPE[1:], image=True, ranges=ranges)
    chain = stream.operations(5, 3, row, SHAPE[0])
    expected = made(chain, IMAGE, whole(SHAPE))[as_slices(region)]
    assert np.array_equal(made(chain, IMAGE, region, most), expected)


@every_transform
def test_parameters_are_a_function_of_seed_pass_row_and_place(transform: Transform) -> None:
    ranges = np.broadcast_to(RANGES, (9, *RANGES.shape))
    stream = Stream(1 << 20, [transform, transform], SHAPE[1:], image=True, ranges=ranges)
    chains = [stream.operations(*key, 2) for key in ((0, 1, 2), (0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3))]
    assert repr(chains[0]) == repr(chains[1])
    if not isinstance(transform, transforms.RandFlip | transforms.RandRotate90):
        drawn = [repr(one) for chain in chains[1:] for one in chain]
        assert len(set(drawn)) == len(drawn) > 1


def test_labels_go_where_their_image_goes() -> None:
    image = LABELS.astype("float32")
    for transform in ALL[:4]:
        one = operation(transform, 3, LABELS.shape)
        box = whole(LABELS.shape)
        assert np.array_equal(made([one], image, box), made([one], LABELS, box))


def test_transforms_of_numbers_leave_labels_alone() -> None:
    for transform in ALL:
        chain = Stream(1 << 20, [transform], SHAPE[1:]).operations(0, 0, 0, 1)
        assert transform.spatial or not chain


def test_a_probability_is_that_of_a_transform() -> None:
    flip, sample = transforms.RandFlip(0.3), Sample(1, (4, 4))
    applied = sum(flip.draw(Draws("p", row), sample) is not None for row in range(4000))
    assert abs(applied - 1200) < 4 * (4000 * 0.3 * 0.7) ** 0.5


def test_noise_is_normal_and_by_place() -> None:
    one = transforms.RandGaussianNoise(1.0, 0.5, 2.0, sample_std=False)
    noise = operation(one, 0, (1, 60, 60, 60))
    found = made([noise], np.zeros((1, 60, 60, 60), "float32"), whole((1, 60, 60, 60)))
    assert abs(found.mean() - 0.5) < 4 * 2 / 60**1.5
    assert abs(found.std() - 2) < 0.02
    shares = [(np.abs(found - 0.5) < 2 * bound).mean() for bound in (1, 2, 3)]
    np.testing.assert_allclose(shares, [0.6827, 0.9545, 0.9973], atol=4e-3)
    assert abs(np.corrcoef(found.ravel()[:-1], found.ravel()[1:])[0, 1]) < 0.01


def test_nnunets_noise_is_the_same_in_all_channels() -> None:
    (noise,) = (one for one in nnunet.nnunet(SHAPE[1:]) if isinstance(one, transforms.RandGaussianNoise))
    drawn = noise.operation(Draws(0), Sample(SHAPE[0], SHAPE[1:], RANGES))
    assert drawn is not None
    first, second = made([drawn], np.zeros_like(IMAGE), whole(SHAPE))
    assert np.array_equal(first, second) and first.std() > 0
    region = ((1, 2), (2, 5), (0, 7), (3, 9))
    part = made([drawn], np.zeros_like(IMAGE), region)
    assert np.array_equal(part[0], first[as_slices(region[1:])])


def test_an_elastic_field_has_the_size_that_monais_has() -> None:
    """The root mean square of uniform numbers convolved with a Gaussian; its width by its correlation."""
    shape, sigma, magnitude = (1, 100, 100, 100), 4.0, 50.0
    one: Any = operation(transforms.Rand3DElastic((sigma, sigma), (magnitude, magnitude), 1.0), 0, shape)
    moved = one.points(whole(shape[1:]))[0] - np.arange(100).reshape(-1, 1, 1)
    noise = torch.as_tensor(np.random.default_rng(0).uniform(-1, 1, (1, 1, *shape[1:])))
    taps = torch.exp(-(torch.arange(-16, 17).double() ** 2) / (2 * sigma**2))
    taps /= taps.sum()
    for axis in range(3):
        size = [1, 1, 1, 1, 1]
        size[axis + 2] = 33
        noise = torch.nn.functional.conv3d(noise, taps.reshape(size))
    assert moved.std() == pytest.approx(magnitude * float(noise.std()), rel=0.15)
    shifted = [np.corrcoef(moved[:-5].ravel(), moved[5:].ravel())[0, 1]]
    shifted += [np.corrcoef(noise.numpy()[0, 0, :-5].ravel(), noise.numpy()[0, 0, 5:].ravel())[0, 1]]
    assert shifted[0] == pytest.approx(shifted[1], abs=0.1)


def test_mirrors_and_turns_are_numpys() -> None:
    box = whole(SHAPE)
    for axes in ((0, 2), (np.int64(0), np.int64(-1))):
        flipped = made([operation(transforms.RandFlip(1.0, axes))], IMAGE, box)
        assert np.array_equal(flipped, np.flip(IMAGE, (1, 3)))
    flipped = made([operation(transforms.RandFlip(1.0, np.int64(1)))], IMAGE, box)
    assert np.array_equal(flipped, np.flip(IMAGE, 2))
    for seed in range(6):
        one: Any = operation(transforms.RandRotate90(1.0, 3, (0, 2)), seed)
        assert np.array_equal(made([one], IMAGE, box), np.rot90(IMAGE, one.turns, (1, 3)))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("shape", [(2, 9, 7, 8), (1, 6, 9), (1, 1, 9, 5)])
def test_an_affine_map_is_that_of_pytorchs_grid_sample(padding: str, shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(2).normal(size=shape)
    rank = len(shape) - 1
    ranges = {name: found[: 2 * rank - 3 if "rotate" in name else rank] for name, found in AFFINE.items()}
    one: Any = operation(transforms.RandAffine(1.0, **ranges, padding_mode=padding), 4, shape)
    points = np.stack(np.broadcast_arrays(*one.points(whole(shape[1:]))), -1)
    extents = np.array(shape[1:])
    grid = torch.as_tensor(((2 * points + 1) / extents - 1)[..., ::-1].copy())[None]
    how = {"padding_mode": padding, "align_corners": False}
    sampled = torch.nn.functional.grid_sample(torch.as_tensor(image)[None], grid, **how)
    np.testing.assert_allclose(made([one], image, whole(shape)), sampled[0].numpy(), atol=1e-9)


def test_low_resolution_is_that_of_pytorchs_interpolation() -> None:
    one: Any = operation(nnunet.LowResolution(1.0, p_per_channel=1.0), 1)
    for channel, found in enumerate(made([one], IMAGE, whole(SHAPE))):
        fewer = [round(n * zoom) for n, zoom in zip(SHAPE[1:], one.numbers[channel], strict=True)]
        one_channel = torch.as_tensor(IMAGE[None, channel : channel + 1])
        small = torch.nn.functional.interpolate(one_channel, fewer, mode="nearest-exact")
        large = torch.nn.functional.interpolate(small, SHAPE[1:], mode="trilinear")
        np.testing.assert_allclose(found, large[0, 0].numpy(), atol=1e-5)


def test_kernels_of_random_deviations_do_not_pile_up() -> None:
    for seed in range(100):
        operation(transforms.RandGaussianSmooth(prob=1.0), seed).source(whole(SHAPE))
    assert filters._kernel.cache_info().currsize < 100


def test_parts_make_up_a_region() -> None:
    region = ((1, 4), (2, 9), (0, 5))
    found = np.zeros((4, 9, 5), int)
    for part in parts(region, 12):
        assert np.prod(region_shape(part)) <= 12
        found[as_slices(part)] += 1
    assert (found[as_slices(region)] == 1).all() and found.sum() == 3 * 7 * 5


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: transforms.RandFlip(2.0), "takes a prob from 0 to 1, got 2.0"),
        (lambda: transforms.RandFlip(1.0, 3).check((4, 4, 4)), "names the spatial axes .3,., there are 3"),
        (lambda: transforms.RandRotate90(1.0).check((4, 5, 4)), "axes 0 and 1 have 4 and 5"),
        (lambda: transforms.RandRotate90(1.0, 0), "takes a max_k of at least 1"),
        (lambda: transforms.RandRotate90(1.0, 1, (1,)).check((4, 4)), "takes two spatial_axes"),
        (lambda: transforms.RandScaleIntensity((1, 2, 3)), "a number or a pair of numbers for factors"),
        (lambda: transforms.RandAffine(rotate_range=(1, 1, 1, 1)).check((4, 4, 4)), "takes 3 ranges"),
        (lambda: transforms.RandAffine(padding_mode="wrap"), "takes a padding_mode of zeros, border"),
        (lambda: transforms.RandAffine().check((4,)), "takes 2 or 3 spatial axes, there are 1"),
        (lambda: transforms.Rand3DElastic((5, 8), (1, 2)).check((4, 4)), "takes 3 spatial axes, there are 2"),
        (lambda: transforms.Rand3DElastic((0, 8), (1, 2)), "sigma_range of at least 0.5"),
        (lambda: transforms.RandGaussianNoise(std=-1.0), "no negative numbers for std"),
        (lambda: transforms.RandGaussianNoise(std=(0.05, 0.1)), "takes a number for std, got .0.05, 0.1."),
        (lambda: transforms.RandGaussianNoise(mean="x"), "takes a number for mean, got 'x'"),
        (lambda: transforms.RandGaussianNoise(mean=float("nan")), "takes a number for mean, got nan"),
        (lambda: transforms.RandFlip(1.0, (0, 0)), "takes different axes, as whole numbers, got .0, 0."),
        (lambda: transforms.RandFlip(1.0, 0.5), "takes different axes, as whole numbers, got 0.5"),
        (lambda: transforms.RandFlip(1.0, "x"), "takes different axes, as whole numbers, got 'x'"),
        (lambda: transforms.RandFlip(1.0, (0, -2)).check((4, 4)), "names the spatial axes .0, -2., there"),
        (lambda: transforms.RandRotate90(1.0, 1, 0), "takes different axes, as whole numbers, got 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"augment: Rand.* {message}"):
        make()
