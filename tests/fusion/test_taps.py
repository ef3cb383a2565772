"""The loop of Resample beside a matrix product, for extents around the widths of vectors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from oocdl.fusion.taps import DTYPES, weigh
from oocdl.graph.ir.graph import Array

EXTENT, TAPS = 9, 3


def taps_of(results: int) -> tuple[Array, Array, Array]:
    """Columns, weights, and the matrix that they stand for."""
    random = np.random.default_rng(results)
    columns = random.integers(0, EXTENT, (TAPS, results)).astype(np.int32)
    weights = random.normal(size=columns.shape)
    matrix = np.zeros((results, EXTENT))
    np.add.at(matrix, (np.arange(results), columns), weights)
    return columns, weights, matrix


def mapped(x: Array, axis: int, columns: Array, weights: Array, out: Array | None = None) -> Array:
    shape = (*x.shape[:axis], columns.shape[1], *x.shape[axis + 1 :])
    out = np.full(shape, np.nan, x.dtype) if out is None else out
    weigh(x, axis, columns, weights, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("results", [1, 2, 5, 17, 130])
@pytest.mark.parametrize("after", [(), (1,), (3,), (17,), (64,), (3, 50)])
def test_sums_are_those_of_a_matrix(dtype: str, results: int, after: tuple[int, ...]) -> None:
    columns, weights, matrix = taps_of(results)
    x = np.random.default_rng(1).normal(size=(2, EXTENT, *after)).astype(dtype)
    expected = np.moveaxis(np.moveaxis(x.astype(float), 1, -1) @ matrix.T, -1, 1)
    np.testing.assert_allclose(
        mapped(x, 1, columns, weights), expected, rtol=0, atol=1e-5 if dtype == "float32" else 1e-12
    )


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_orders_gaps_and_threads_change_no_bit(axis: int) -> None:
    x = np.random.default_rng(2).normal(size=(3, EXTENT, EXTENT, EXTENT)).astype(np.float32)
    columns, weights, _ = taps_of(21)
    expected = mapped(x, axis, columns, weights)
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    to_last = np.moveaxis(np.empty_like(np.moveaxis(expected, 1, -1), order="C"), -1, 1)
    gaps = np.empty((*expected.shape[:-1], 2 * expected.shape[-1]), np.float32)[..., ::2]
    for given in (x, last, np.repeat(x, 2, axis=0)[::2]):
        for out in (None, to_last, gaps):
            np.testing.assert_array_equal(mapped(given, axis, columns, weights, out), expected)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: mapped(x, axis, columns, weights), range(8)):
            np.testing.assert_array_equal(found, expected)


def test_nothing_is_read_or_written_where_there_is_nothing() -> None:
    columns, weights, _ = taps_of(4)
    assert mapped(np.empty((0, EXTENT)), 1, columns, weights).shape == (0, 4)
