"""Statistics out of core are NumPy's, and so are the numbers that voxels become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as some
from numpy.typing import NDArray

from oocdl.augmentation.normalization import METHODS, moments, numbers_of, percentiles
from oocdl.augmentation.preparation import Stream

Array = NDArray[Any]
DTYPES = st.sampled_from(["uint8", "int16", "uint16", "float32"])
FLOATS = {"allow_nan": False, "allow_infinity": False}
VALUES = DTYPES.flatmap(
    lambda dtype: some.arrays(dtype, st.integers(1, 60), elements=FLOATS if dtype == "float32" else None)
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.lists(st.floats(0, 100), min_size=1, max_size=3), st.integers(1, 9))
def test_percentiles_are_exact(values: Array, asked: list[float], size: int) -> None:
    blocks = [values[at : at + size] for at in range(0, len(values), size)]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.percentile(values.astype("float64"), asked)
    np.testing.assert_allclose(percentiles(lambda: blocks, asked), expected, rtol=1e-12, atol=1e-40)


def test_moments_are_numpys_and_ends_are_exact() -> None:
    values = np.random.default_rng(0).normal(100, 3, 10007)
    found = moments(lambda: np.array_split(values, 13))
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.deviation == pytest.approx(values.std(), rel=1e-12)
    assert (found.low, found.high) == (values.min(), values.max())


def test_a_constant_sample_is_divided_by_one() -> None:
    for method in METHODS:
        *_, shift, divisor = numbers_of(method, lambda: [np.full(5, 7.0)])
        assert (shift, divisor) == (7, 1)
    assert numbers_of("zscore_nonzero", lambda: [np.zeros(5)])[2:] == (0, 1)
    for value in (7, 13, 201):
        scaled = np.full((7, 9, 11), value / 255)  # whose mean is rounded
        for method in ("zscore", "zscore_nonzero"):
            assert numbers_of(method, lambda scaled=scaled: [scaled])[3] == 1.0


def test_voxels_become_what_their_method_says() -> None:
    image = np.random.default_rng(0).integers(0, 9, (1, 6, 7)).astype("float64")
    low, high = np.percentile(image, [0.5, 99.5])
    inner = image[image > 0]
    expected = {
        "zscore": (image - image.mean()) / image.std(),
        "zscore_nonzero": np.where(image == 0, 0, (image - inner.mean()) / inner.std()),
        "percentiles": (np.clip(image, low, high) - low) / (high - low),
        "ct": (np.clip(image, low, high) - image.mean()) / image.std(),
    }
    for method in METHODS:
        table = np.array([[numbers_of(method, lambda: list(image))]])
        stream, block = Stream(0, numbers=table, nonzero=method == "zscore_nonzero"), image.copy()
        stream.normalize(block, 0, ((0, 1), (0, 6), (0, 7)))
        np.testing.assert_allclose(block, expected[method], atol=1e-12)
