"""Compiled loops beside what they compute: functions, maps along an axis, sums of windows; compiled once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from oocdl.engines.torch.conv import compiled_gradient
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.fusion.taps import DTYPES, weigh
from oocdl.fusion.window_sums import Taps, add_window_sums, loop_for
from oocdl.graph.ir.graph import Array, Shape
from tests.kit.commands import python
from tests.kit.kernels import counting
from tests.kit.programs import Pads, program, step
from tests.kit.random_convolutions import Convolution, check, runs

SHAPE = (64, 1024)
PATTERNS = 1 << 32
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Exp": np.exp, "Log": np.log, "Sigmoid": special.expit, "Tanh": np.tanh, "Erf": special.erf,
    "Elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
}  # fmt: skip


def number(values: Array) -> Array:
    """The place of each float32 in their order."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def off(op: str, patterns: Array) -> int:
    """How far results are off at most, for float32 of these bit patterns; what is no number stays so."""
    x = patterns.astype(np.uint32).view(np.float32).reshape(SHAPE)
    made = program([x], [step(op, [(0, SHAPE)], 1, SHAPE, alpha=1.0)], [(1, SHAPE)], f"function {op}")
    found = TorchEngine(small_elements=4).compile(made)([x])[0]
    with np.errstate(all="ignore"):
        wanted = FUNCTIONS[op](x.astype(np.float64)).astype(np.float32)
    real = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), ~real)
    return int(np.abs(number(found[real]) - number(wanted[real])).max())


@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_result_is_the_right_one_or_its_neighbour(op: str) -> None:
    """Patterns of all exponents and signs, the smallest and the largest numbers, and what is no number."""
    size = SHAPE[0] * SHAPE[1]
    special_ones = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-45, -1e-45, 88.8, -103.9])
    ends = np.concatenate([special_ones.view(np.uint32).astype(np.uint64), [0x007FFFFF, 0x00800000]])
    even = np.arange(size, dtype=np.uint64) * (PATTERNS // size) + np.uint64(12345)
    even[: len(ends)] = ends
    usual = np.random.default_rng(0).standard_normal(size).astype(np.float32).view(np.uint32)
    assert max(off(op, even), off(op, usual)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_result_is_the_right_one_or_its_neighbour_for_every_argument(op: str) -> None:
    size = SHAPE[0] * SHAPE[1]
    worst = (off(op, np.arange(start, start + size, dtype=np.uint64)) for start in range(0, PATTERNS, size))
    assert max(worst) <= 1


EXTENT, COUNT = 9, 3


def taps_of(results: int) -> tuple[Array, Array, Array]:
    """Columns, weights, and the matrix that they stand for."""
    random = np.random.default_rng(results)
    columns = random.integers(0, EXTENT, (COUNT, results)).astype(np.int32)
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
    for data in (x, last, np.repeat(x, 2, axis=0)[::2]):
        for out in (None, to_last, gaps):
            np.testing.assert_array_equal(mapped(data, axis, columns, weights, out), expected)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: mapped(x, axis, columns, weights), range(8)):
            np.testing.assert_array_equal(found, expected)


def test_nothing_is_read_or_written_where_there_is_nothing() -> None:
    columns, weights, _ = taps_of(4)
    assert mapped(np.empty((0, EXTENT)), 1, columns, weights).shape == (0, 4)


TAPS = st.builds(Taps, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(-1, 2))


def sums(x: Array, dy: Array, window: list[Taps], depthwise: bool) -> Array:
    """The gradient of all weights, tap by tap and place by place."""
    weights = (x.shape[4],) if depthwise else (x.shape[4], dy.shape[4])
    total = np.zeros((*(taps.count for taps in window), *weights))
    for tap, place in product(np.ndindex(*total.shape[:3]), np.ndindex(*dy.shape[1:4])):
        at = tuple(taps.element(t, p) for taps, t, p in zip(window, tap, place, strict=True))
        if all(0 <= index < extent for index, extent in zip(at, x.shape[1:4], strict=True)):
            seen, grads = x[:, *at].astype(float), dy[:, *place].astype(float)
            total[tap] += (seen * grads).sum(0) if depthwise else seen.T @ grads
    return total


@given(
    extents=st.tuples(*[st.integers(1, 5)] * 3),
    places=st.tuples(*[st.integers(1, 5)] * 3),
    window=st.tuples(TAPS, TAPS, TAPS),
    channels=st.tuples(st.integers(1, 9), st.sampled_from([2, 4, 8, 12, 16, 24, 64])),
    lanes=st.sampled_from([4, 8, 16]),
    depthwise=st.booleans(),
    samples=st.integers(1, 2),
)
def test_sums_are_those_over_all_places(
    extents: Shape, places: Shape, window: Any, channels: Shape, lanes: int, depthwise: bool, samples: int
) -> None:
    inputs, outputs = channels
    loop = loop_for(inputs, outputs, depthwise, lanes)
    if outputs % (lanes // 2):
        assert loop is None
        return
    assert loop is not None
    random, inputs = np.random.default_rng(0), outputs if depthwise else inputs
    # Both are parts of arrays of more channels, as those of what was concatenated.
    sizes = [(samples, *extents, inputs + 3), (samples, *places, outputs + 3)]
    x, dy = (random.standard_normal(size, np.float32)[..., 1:-2] for size in sizes)
    wanted = sums(x, dy, [*window], depthwise)
    found = np.ones(wanted.shape, np.float32)
    add_window_sums(loop, x, dy, found, window)
    np.testing.assert_allclose(found - 1.0, wanted, rtol=0, atol=2e-5 * (1 + np.abs(wanted).max()))


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize(
    ("space", "pads"),
    [((9, 70), ((2, 1), (0, 2))), ((3, 8, 9), ((1, 1), (1, 0), (2, 2))), ((1, 5, 5), ((2, 2),) * 3)],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_engine_takes_it_where_onednn_is_slow(
    groups: int, space: tuple[int, ...], pads: Pads, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_gradient.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    calls, ones = counting(monkeypatch, compiled_gradient, "weight_gradient"), (1,) * len(space)
    window, strides = (5,) * len(space), (stride,) * len(space)
    case = Convolution((16, 16), space, window, pads, strides, ones, 2, groups)
    check(runs(case, "float32")[2])
    assert len(calls) == 1


STORES_SEVEN = """
import ctypes, sys, llvmlite.binding as llvm
from oocdl.fusion.jit import compiled

class Seven:
    def write(self, name):
        return f"define void @{name}(ptr %arguments) {{\\n  store i64 7, ptr %arguments\\n  ret void\\n}}\\n"

if sys.argv[1] == "kept":
    llvm.TargetMachine.emit_object = None  # nothing may be compiled
number = ctypes.c_int64()
compiled(Seven())(ctypes.addressof(number))
print(number.value)
"""


def test_a_machine_compiles_a_loop_once(tmp_path: Path) -> None:
    for how in ("compiled", "kept"):
        told = python("-c", STORES_SEVEN, how, XDG_CACHE_HOME=str(tmp_path))
        assert told.stdout == "7\n", told.stderr
