"""Chains as one compiled loop: what members do, sums in every order of axes, gaps, and values made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oocdl.engines.engine import Engine
from oocdl.engines.numpy.numpy_kernels import KERNELS as NUMPY_KERNELS
from oocdl.engines.ort.ort_engine import OnnxRuntimeEngine
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.fusion.chain import Chain, arrange
from oocdl.fusion.loop_ops import COMPARE, EXPONENTIALS, FLOATS, LOGIC
from oocdl.fusion.recompute import recomputed
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction, Program
from tests.kit import programs
from tests.kit.op_cases import CASES
from tests.kit.programs import operand, program
from tests.kit.threads import Together

ENGINES: list[Callable[[], Engine]] = [
    lambda: TorchEngine(4), lambda: Together(3), lambda: OnnxRuntimeEngine(4)
]  # fmt: skip
CASE_OF = {case.op: case for case in CASES}
"""Attributes and count of operands."""
ALPHA = CASE_OF["LeakyRelu"].attrs["alpha"]


@pytest.fixture(autouse=True)
def _cuts_small_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that threads run together are cut, however small."""
    monkeypatch.setattr("oocdl.fusion.loop_nest.SPLIT_ELEMENTS", 2)


def expected(op: str, *values: Array) -> Array:
    """What an elementwise operator makes of float64 numbers or bools."""
    shape = np.broadcast_shapes(*(value.shape for value in values))
    item = Instruction(op, (), (0,), (shape,), (shape,), ("float64",), CASE_OF[op].attrs)
    return np.asarray(NUMPY_KERNELS[op].run(values, item)[0])


def noise(shape: Shape, dtype: str, seed: int = 0) -> Array:
    """Numbers that all operators are defined on; some are equal."""
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return np.asarray(np.abs(np.round(values, 1)) + 0.1, dtype)


def step(op: str, reads: Sequence[Any], made: int, shape: Shape, dtype: str, **attrs: Any) -> Instruction:
    """An elementwise instruction with the attributes of its case."""
    return programs.step(op, reads, made, shape, dtype, **{**CASE_OF[op].attrs, **attrs})


def assert_is_a_loop(made: Program) -> None:
    (group,) = arrange(made, 4)
    assert isinstance(group, Chain), "runs by itself"


def close(found: Array, wanted: Array, dtype: str) -> None:
    tolerance = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 8e-3, "bool": 0}[dtype]
    wide = [np.asarray(array, np.float64) for array in (found, wanted)]
    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for op in sorted([*FLOATS, *COMPARE, *LOGIC])
        for dtype in ("float32", "float64", "bfloat16")
        if dtype != "float64" or op not in EXPONENTIALS
    ],
)
def test_every_operator(op: str, dtype: str) -> None:
    check_operator(op, dtype, (3, 37))


@pytest.mark.parametrize("op", ["Add", "Max", "Floor", "Greater", "Sigmoid"])
def test_bfloat16_on_a_processor_that_has_no_instructions_for_it(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM calls functions of its own there, which are not linked: the process crashed."""
    monkeypatch.setattr("oocdl.fusion.llvm_ir.has_feature", lambda name: False)
    check_operator(op, "bfloat16", (3, 41))  # of another shape: not compiled yet


def test_numbers_are_rounded_to_bfloat16_by_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocdl.fusion.llvm_ir.has_feature", lambda name: False)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    bits[:8] = 0x7FC00001, 0xFF800000, 0x3F808000, 0x3F818000, 0x00000001, 0x7F7FFFFF, 0x80000000, 0x7F800001
    bits[8:] &= np.uint32(0xFFFFFFFF) << np.random.default_rng(1).integers(0, 17, 4088, np.uint32)  # ties
    array, shape = bits.view(np.float32), (4096,)
    steps = [step("Cast", [(0, shape)], 1, shape, "bfloat16", to="bfloat16")]
    made = program([array], steps, [(1, shape)], "rounded by bits")
    assert_is_a_loop(made)
    with np.errstate(invalid="ignore"):
        wanted = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(TorchEngine().compile(made)([array])[0].astype(np.float32), wanted)


def test_float64_is_rounded_to_bfloat16_by_way_of_float32() -> None:
    """As PyTorch does. No processor has an instruction for it, and LLVM's function is not linked."""
    array, shape = noise((4, 33), "float64") / 3, (4, 33)
    steps = [step("Cast", [(0, shape)], 1, shape, "bfloat16", to="bfloat16")]
    made = program([array], steps, [(1, shape)], "bfloat16 of float64")
    assert_is_a_loop(made)
    wanted = array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(TorchEngine().compile(made)([array])[0].astype(np.float32), wanted)


def check_operator(op: str, dtype: str, shape: Shape) -> None:
    arrays = [noise(shape, "float32", seed) for seed in range(3)]
    count = len(CASE_OF[op].operands)
    arrays = arrays[:count]
    steps, seen, kind = [], [], "bool" if op in LOGIC else dtype
    for slot in range(count):
        made = 10 + slot
        steps.append(step("Cast", [(slot, shape)], made, shape, dtype, to=dtype))
        seen.append(made)
        if kind == "bool":
            steps.append(step("Greater", [(made, shape), (10, shape)], 20 + slot, shape, "bool"))
            seen[-1] = 20 + slot
    last = dtype if op in FLOATS else "bool"
    steps.append(step(op, [(slot, shape) for slot in seen], 30, shape, last))
    whole = program(arrays, steps, [(30, shape)], f"fused {op} {dtype} {shape}")
    assert_is_a_loop(whole)
    kinds = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    values = [np.asarray(array, kinds).astype(np.float64) for array in arrays]
    if kind == "bool":
        values = [value > values[0] for value in values]
    for make in ENGINES[: 3 if dtype == "float32" else 2]:
        close(make().compile(whole)(arrays)[0], expected(op, *values), last)


def sums_of(
    shape: Shape, axes: tuple[int, ...], dtype: str, key: str
) -> tuple[Program, list[Array], list[Array]]:
    """A value scaled by channels, its sum and its moments over ``axes``."""
    row = tuple(1 if axis != 1 else n for axis, n in enumerate(shape))
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    arrays = [noise(shape, dtype) * 3, noise(row, dtype, 1)]
    arrays[0][..., ::2] += 40  # moments by sums of squares alone would lose digits
    steps = [
        step("Mul", [(0, shape), (1, row)], 2, shape, dtype),
        reduction("ReduceSum", 2, 3, shape, axes, dtype),
        reduction("Moments", 2, 4, shape, axes, dtype),
    ]
    value = arrays[0].astype(np.float64) * arrays[1]
    wanted = [value, *(f(value, axes, keepdims=True) for f in (np.sum, np.mean, np.var))]
    outputs = [(2, shape), (3, kept), (4, kept), (5, kept)]
    return program(arrays, steps, outputs, key), arrays, wanted


@pytest.mark.parametrize(
    ("make", "dtype"), [*product(ENGINES[:2], ("float64", "float32")), (ENGINES[2], "float32")]
)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1, 16, 3, 5, 7), (0, 2, 3, 4)), ((2, 5, 7, 9), (0, 2, 3)), ((3, 4, 50, 41), (2, 3)),
        ((600, 40), (0,)), ((600, 40), (1,)), ((2, 3, 1500), (0, 1, 2)), ((2, 3000), (0,)),
        ((300, 2, 3), (0, 2)),
    ],
)  # fmt: skip
def test_sums_and_moments(
    shape: Shape, axes: tuple[int, ...], dtype: str, make: Callable[[], Engine]
) -> None:
    made, arrays, wanted = sums_of(shape, axes, dtype, f"fused sums {shape} {axes} {dtype}")
    assert_is_a_loop(made)
    for found, array in zip(make().compile(made)(arrays), wanted, strict=True):
        scale = np.abs(array).max()
        close(found / scale, array / scale, dtype)


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("channels", [4, 16, 24, 40, 200])
def test_channels_last(channels: int, make: Callable[[], Engine]) -> None:
    """Also where an operand is a part of a larger one, so that its rows do not follow each other."""
    shape, large = (1, channels, 6, 5, 300), (1, channels, 8, 6, 301)
    order = (0, 2, 3, 4, 1)
    x, y = ordered(np.empty, large, np.float32, order), ordered(np.empty, shape, np.float32, order)
    x[...], y[...] = noise(large, "float32"), noise(shape, "float32", 1)
    row = (1, channels, 1, 1, 1)
    bias = noise(row, "float32", 2)
    part = operand(0, shape, crop=[(0, 1), (0, channels), (1, 7), (0, 5), (1, 301)])
    axes = (0, 2, 3, 4)
    steps = [
        step("Add", [part, (2, row)], 3, shape, "float32"),
        step("LeakyReluGrad", [(1, shape), (3, shape)], 4, shape, "float32"),
        step("ReduceSum", [(4, shape)], 5, row, "float32", axes=axes),
    ]
    made = program([x, y, bias], steps, [(4, shape), (5, row)], f"fused last {channels}")
    made = replace(made, orders=((0, order), (1, order), (3, order), (4, order)))
    assert_is_a_loop(made)
    inner = x[:, :, 1:7, :5, 1:301].astype(np.float64) + bias
    wide = y.astype(np.float64)
    wanted = np.where(inner > 0, wide, wide * ALPHA)
    found, total = make().compile(made)([x, y, bias])
    assert found.strides[1] == found.itemsize
    close(found, wanted, "float32")
    close(total / total.max(), wanted.sum(axes, keepdims=True) / total.max(), "float32")


@pytest.mark.parametrize("make", ENGINES)
def test_gaps_change_no_bit(make: Callable[[], Engine]) -> None:
    """The order of sums is that of the chain, however an operand lies."""
    shape = (2, 3, 40, 70)
    made, (x, scale), _ = sums_of(shape, (0, 2, 3), "float32", "fused gaps")
    wide = np.zeros((2, 3, 41, 140), np.float32)
    wide[:, :, :40, ::2] = x
    run = make().compile(made)
    dense, gaps = run([x, scale]), run([wide[:, :, :40, ::2], scale])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(dense, gaps, strict=True))


def test_what_loops_do_not_know_runs_by_itself() -> None:
    shape = (8, 32)
    steps = [step("Add", [(0, shape), (0, shape)], 1, shape, "float32")]
    steps.append(step("Sin", [(1, shape)], 2, shape, "float32"))
    x = noise(shape, "float32")
    made = program([x], steps, [(2, shape)], "fused not")
    first, second = arrange(made, 4)
    assert isinstance(first, Chain) and second is steps[1]
    wanted = np.sin(2 * x.astype(np.float64))
    close(TorchEngine(small_elements=4).compile(made)([x])[0], wanted, "float32")


def test_a_later_chain_makes_cheap_values_again() -> None:
    """Normalized values and those before the activation are not kept for the gradient."""
    shape, inner, row = (1, 16, 6, 4), (1, 16, 4, 4), (1, 16, 1, 1)
    arrays = [noise(shape, "float64") - 0.7, noise(row, "float64", 1), noise(row, "float64", 2)]
    box = [(0, 1), (0, 16), (1, 5), (0, 4)]
    steps = [
        step("Normalize", [(0, shape), (1, row), (2, row)], 3, shape, "float64"),
        step("Mul", [(3, shape), (2, row)], 4, shape, "float64"),
        step("LeakyRelu", [(4, shape)], 5, shape, "float64"),
        programs.step("CumSum", [(5, shape)], 6, shape, "float64"),
        step("LeakyReluGrad", [operand(n, inner, crop=box) for n in (6, 4)], 7, inner, "float64"),
        step("Mul", [(7, inner), operand(3, inner, crop=box)], 8, inner, "float64"),
    ]
    made = program(arrays, steps, [(8, inner)], "fused again")
    groups, _ = recomputed(arrange(made, 4), made)
    first, _, second = groups
    assert isinstance(first, Chain) and isinstance(second, Chain)
    assert [item.op for item in second.members[:2]] == ["Normalize", "Mul"] and len(second.members) == 4
    read = {operand.slot for item in second.members for operand in item.operands}
    assert not read & {3, 4}


def test_one_value_is_made_again_for_each_part_that_is_read() -> None:
    """A later chain reads two boxes of one value, and one of what that was made of."""
    shape, inner, row = (1, 16, 6, 4), (1, 16, 4, 4), (1, 16, 1, 1)
    arrays = [noise(shape, "float64") - 0.7, noise(row, "float64", 1)]
    upper, lower = ([(0, 1), (0, 16), (start, start + 4), (0, 4)] for start in (0, 2))
    turned, corner = (1, 16, 4, 6), [(0, 1), (0, 16), (0, 4), (0, 4)]
    steps = [
        step("Mul", [(0, shape), (1, row)], 2, shape, "float64"),
        step("Relu", [(2, shape)], 3, shape, "float64"),
        step("Neg", [(3, shape)], 8, shape, "float64"),
        step("Transpose", [(8, shape)], 4, turned, "float64", perm=(0, 1, 3, 2)),
        step("Sub", [operand(3, inner, upper), operand(3, inner, lower)], 5, inner, "float64"),
        step("Mul", [(5, inner), operand(2, inner, lower)], 6, inner, "float64"),
        step("Add", [(6, inner), operand(4, inner, corner)], 7, inner, "float64"),
    ]
    made = program(arrays, steps, [(7, inner)], "fused twice")
    groups, _ = recomputed(arrange(made, 4), made)
    second = groups[-1]
    assert isinstance(second, Chain)
    assert not {operand.slot for item in second.members for operand in item.operands} & {2, 3}
    before = arrays[0] * arrays[1]
    value = np.maximum(before, 0)
    expected = (value[:, :, :4] - value[:, :, 2:]) * before[:, :, 2:] - value.swapaxes(2, 3)[..., :4]
    close(ENGINES[0]().compile(made)(arrays)[0], expected, "float64")


REDUCED: Mapping[str, Callable[[Array, tuple[int, ...]], tuple[Array, ...]]] = {
    "ReduceSum": lambda x, axes: (x.sum(axes, keepdims=True),),
    "ReduceMax": lambda x, axes: (x.max(axes, keepdims=True),),
    "Moments": lambda x, axes: (x.mean(axes, keepdims=True), x.var(axes, keepdims=True)),
    "LogSumExp": lambda x, axes: (np.logaddexp.reduce(x, axes, keepdims=True),),
}


def reduction(op: str, read: int, made: int, shape: Shape, axes: tuple[int, ...], dtype: str) -> Instruction:
    """An instruction that reduces a slot, whose results are ``made`` and, of moments, the next slot."""
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    outs = (made, made + 1) if op == "Moments" else (made,)
    kinds = (kept,) * len(outs), (kept,) * len(outs), (dtype,) * len(outs)
    return Instruction(op, (operand(read, shape),), outs, *kinds, {"axes": axes})


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_chains(data: st.DataObject) -> None:
    """Any arithmetic over any shape and broadcast, and any reductions over any axes, which others read."""
    rank = data.draw(st.integers(1, 5))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
    if np.prod(shape) < 5 or data.draw(st.booleans()):
        shape = (*shape[:-1], data.draw(st.sampled_from([40, 70, 300, 1100])))
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    count = data.draw(st.integers(0, 3))
    kinds = [tuple(n if data.draw(st.booleans()) else 1 for n in shape) for _ in range(count)]
    arrays = [noise(one, dtype, seed) for seed, one in enumerate([shape, *kinds])]
    slots = {slot: array.astype(np.float64) for slot, array in enumerate(arrays)}
    boxes: dict[int, list[tuple[int, int]]] = {}
    for slot, array in enumerate(arrays):
        if slot and data.draw(st.booleans()):  # the operand is a part of its slot
            boxes[slot] = [(1, n + 1) for n in array.shape]
            arrays[slot] = np.pad(array, 1)
    steps: list[Instruction] = []
    current, outputs = 0, []
    for made in range(10, 10 + 2 * data.draw(st.integers(1, 7)), 2):
        op = data.draw(st.sampled_from(["Add", "Sub", "Max", "LeakyReluGrad", *REDUCED]))
        if op in REDUCED:
            axes = tuple(axis for axis in range(rank) if data.draw(st.booleans())) or (0,)
            steps.append(reduction(op, current, made, shape, axes, dtype))
            slots |= dict(zip(steps[-1].outputs, REDUCED[op](slots[current], axes), strict=True))
            outputs += [(slot, slots[slot].shape) for slot in steps[-1].outputs]
        else:
            other = data.draw(st.sampled_from(sorted(slots)))
            read = operand(other, slots[other].shape, boxes.get(other))
            steps.append(step(op, [(current, shape), read], made, shape, dtype))
            slots[made] = expected(op, slots[current], slots[other])
            current = made
    outputs.append((current, shape))
    made_program = program(arrays, steps, outputs, f"random {shape} {kinds} {steps} {boxes}")
    for engine in ENGINES[: 3 if dtype == "float32" else 2]:
        given = [array.copy() for array in arrays]  # programs write over inputs
        for found, (slot, _) in zip(engine().compile(made_program)(given), outputs, strict=True):
            scale = max(np.abs(array).max() for array in slots.values())
            close(found / scale, slots[slot] / scale, dtype)


def kept_by(op: str, x: Array, axes: tuple[int, ...]) -> list[Array]:
    """What a loop of one reduction makes of float32 numbers."""
    made = program([x], [reduction(op, 0, 1, x.shape, axes, "float32")], [], f"{op} {x.shape} {axes}")
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    outs = tuple(operand(slot, shape) for slot in made.instructions[0].outputs)
    made = replace(made, outputs=outs)
    assert_is_a_loop(made)
    return TorchEngine(small_elements=4).compile(made)([x])


@pytest.mark.parametrize("axes", [(0,), (1,)])
@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("length", [3, 100, 1000, 4000])
def test_long_sums_lose_no_digits(op: str, length: int, axes: tuple[int, ...]) -> None:
    """Numbers of one sign, whose sums in float32, one after the other, are off by 1e-5 and more."""
    shape = (length, 37) if axes == (0,) else (37, length)
    x = np.random.default_rng(length).random(shape, np.float32) + 5
    for found, wanted in zip(kept_by(op, x, axes), REDUCED[op](x.astype(np.float64), axes), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=6e-7 if op != "Moments" else 3e-6)


@pytest.mark.parametrize("length", [60, 500, 4000])
def test_moments_of_rows_that_begin_with_a_large_number(length: int) -> None:
    """As activations of transformers do: distances to that number would lose the digits of all others."""
    x = np.random.default_rng(length).standard_normal((37, length)).astype(np.float32)
    x[:, 0] = 1e4
    exact = REDUCED["Moments"](x.astype(np.float64), (1,))
    for found, wanted in zip(kept_by("Moments", x, (1,)), exact, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("length", [40, 2000, 8000])
def test_sums_of_infinities_are_infinite(length: int) -> None:
    x = np.ones((37, length), np.float32)
    x[:, length // 2] = -np.inf
    np.testing.assert_array_equal(kept_by("ReduceSum", x, (1,))[0], -np.inf)


@pytest.mark.parametrize("axes", [(0,), (1,)])
@pytest.mark.parametrize(
    "values",
    [[-np.inf] * 2, [np.inf, np.inf, 1], [np.nan, 0], [1e30, -1e30, 1e30], [-np.inf, 2.0], [200.0, 199.0]],
    ids=str,
)
def test_log_sum_exp_of_what_is_not_finite(values: list[float], axes: tuple[int, ...]) -> None:
    row = np.array([*values, *([-np.inf] * (40 - len(values)))], np.float32)
    x = np.stack([np.roll(row, shift) for shift in range(40)], 1 - axes[0])
    (found,) = kept_by("LogSumExp", x, axes)
    with np.errstate(invalid="ignore"):
        wanted = torch.logsumexp(torch.from_numpy(x.astype(np.float64)), axes, keepdim=True).numpy()
    np.testing.assert_allclose(found, wanted, rtol=3e-7)
