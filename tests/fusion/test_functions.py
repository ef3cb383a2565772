"""Compiled loops beside what they compute, and chains: the same values however they are cut."""

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

from oocdl.engines.engine import get_engine
from oocdl.engines.torch.conv import compiled_gradient
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.fusion.chain import arrange, items_of
from oocdl.fusion.taps import DTYPES, weigh
from oocdl.fusion.window_sums import Taps, add_window_sums, loop_for
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction, Program
from tests.kit.commands import python
from tests.kit.kernel_cases import noise
from tests.kit.kernels import counting
from tests.kit.programs import Pads, operand, program, step
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


BLOCK, ROW = (2, 3, 5, 4), (1, 3, 1, 1)
AXES = {"axes": (0, 2, 3)}


def item(op: str, reads: list[tuple[int, Shape]], made: dict[int, Shape], **attrs: object) -> Instruction:
    """One instruction on whole slots."""
    operands = tuple(operand(slot, shape) for slot, shape in reads)
    shapes = tuple(made.values())
    return Instruction(op, operands, tuple(made), shapes, shapes, ("float64",) * len(made), attrs)


def norm_and_softmax() -> tuple[Program, list[Array], list[Array]]:
    """Moments and sums over what is cut, log-sum-exp over what is not, a crop, results in the midst."""
    x, g = noise(*BLOCK), noise(*BLOCK, seed=1)
    thin = (2, 1, 5, 4)
    steps = [
        item("Mul", [(0, BLOCK), (1, BLOCK)], {2: BLOCK}),
        item("Moments", [(2, BLOCK)], {3: ROW, 4: ROW}, **AXES),
        item("Normalize", [(2, BLOCK), (3, ROW), (4, ROW)], {5: BLOCK}, eps=0.1),
        item("LogSumExp", [(5, BLOCK)], {6: thin}, axes=(1,)),
        item("Sub", [(5, BLOCK), (6, thin)], {7: BLOCK}),
        item("Exp", [(7, BLOCK)], {8: BLOCK}),
        item("Mul", [(8, BLOCK), (5, BLOCK)], {9: BLOCK}),
        item("ReduceSum", [(9, BLOCK)], {10: ROW}, **AXES),
        item("ReduceMax", [(9, BLOCK)], {11: ROW}, **AXES),
        item("LogSumExp", [(7, BLOCK)], {12: ROW}, **AXES),
    ]
    inner = (2, 3, 3, 4)
    part = operand(9, inner, crop=[(0, 2), (0, 3), (1, 4), (0, 4)])
    steps.append(step("Neg", [part], 13, inner, "float64"))
    outputs = [(7, BLOCK), (3, ROW), (4, ROW), (10, ROW), (11, ROW), (12, ROW), (13, inner)]
    a = x * g
    mean, var = (f(a, (0, 2, 3), keepdims=True) for f in (np.mean, np.var))
    b = (a - mean) / np.sqrt(var + 0.1)
    c = b - np.log(np.exp(b).sum(1, keepdims=True))
    d = np.exp(c) * b
    sums = [d.sum((0, 2, 3), keepdims=True), d.max((0, 2, 3), keepdims=True)]
    total = np.log(np.exp(c).sum((0, 2, 3), keepdims=True))
    return program([x, g], steps, outputs, "chains"), [x, g], [c, mean, var, *sums, total, -d[:, :, 1:4]]


def test_chains_change_no_value() -> None:
    made, arrays, expected = norm_and_softmax()
    copies = [array.copy() for array in arrays]  # programs write over inputs
    run = TorchEngine(small_elements=2).compile(made)
    results = run(copies)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    outs = [np.empty_like(array) for array in results]
    run(arrays, outs)
    assert all(one.tobytes() == two.tobytes() for one, two in zip(results, outs, strict=True))


def test_chains_end_where_a_member_reads_what_they_reduce() -> None:
    made, _, _ = norm_and_softmax()
    groups = arrange(made, 2)
    found = [[one.op for one in items_of(group)] for group in groups]
    # Loops have exponentials in float32 alone, and no largest of what is not next to each other.
    first, second = ["Mul", "Moments"], ["Mul", "ReduceSum"]
    alone = [[op] for op in ("Normalize", "LogSumExp", "Sub", "Exp", "ReduceMax", "LogSumExp", "Neg")]
    assert found == [first, *alone[:4], second, *alone[4:]]


@pytest.mark.parametrize("last", ["Mul", "Normalize", "Where"])
def test_what_is_read_again_is_not_overwritten(last: str) -> None:
    """Results may lie in the memory of operands that end there, but never in that of others."""
    shape = (4, 6)
    x = noise(*shape)
    reads = {"Mul": (2, 2), "Normalize": (2, 3, 2), "Where": (4, 2, 3)}[last]
    steps = [
        item("Exp", [(0, shape)], {2: shape}),
        item("Sub", [(2, shape), (0, shape)], {3: shape}),
        step("Less", [(2, shape), (3, shape)], 4, shape, "bool"),
        item(last, [(slot, shape) for slot in reads], {5: shape}, eps=0.0),
        item("Add", [(5, shape), (0, shape)], {6: shape}),
    ]
    made = program([x, x], steps, [(6, shape)], f"again {last}")
    e = np.exp(x)
    d = e - x
    want = {"Mul": e * e, "Normalize": (e - d) / np.sqrt(e), "Where": np.where(e < d, e, d)}[last] + x
    for engine in (TorchEngine(small_elements=2), get_engine("torch")):
        np.testing.assert_allclose(engine.compile(made)([x, x])[0], want, rtol=1e-12)
