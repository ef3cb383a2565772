"""Values that are made where they belong: convolutions into results, chains over inputs, blocks, parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from oocdl.engines.engine import get_engine
from oocdl.engines.torch.conv import block_transpose
from oocdl.engines.torch.split_concat import in_parts
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Program, make_program
from oocdl.ops import RULES
from tests.kit.programs import Pads, operand, program, step
from tests.kit.torch_heap import arrays_of, peak_bytes

CHANNELS, SPACE = 16, (9, 24, 28)
SHAPE = (1, CHANNELS, *SPACE)
ROW = (1, CHANNELS, 1, 1, 1)
LAST = (0, 2, 3, 4, 1)
ATTRS = {"strides": (1,) * 3, "dilations": (1,) * 3, "kernel_shape": (3,) * 3}


def block(pads: Pads, shape: Shape) -> Program:
    """What a layer does: normalize and rectify (0), convolve with 1, add 2."""
    whole = (*SHAPE[:2], *(n + sum(p) for n, p in zip(SPACE, pads[2:], strict=True)))
    assert tuple(n - 2 for n in whole[2:]) == shape[2:]
    weights = (CHANNELS, CHANNELS, 3, 3, 3)
    instructions = (
        step("Mul", [(0, SHAPE), (3, ROW)], 4, SHAPE),
        step("LeakyRelu", [(4, SHAPE)], 5, SHAPE, alpha=0.1),
        step("Conv", [operand(5, SHAPE, pads=pads), (1, weights)], 6, shape, **ATTRS),
        step("Add", [(6, shape), (2, ROW)], 7, shape),
    )
    shapes = (SHAPE, weights, ROW, ROW)
    orders = tuple((slot, LAST) for slot in (0, 4, 5, 6, 7))
    return make_program((0, 1, 2, 3), shapes, ("float32",) * 4, instructions, (operand(7, shape),), orders)


def expected(arrays: list[Array], pads: Pads) -> Array:
    x, w, bias, scale = (torch.from_numpy(np.ascontiguousarray(array)).double() for array in arrays)
    x = torch.nn.functional.leaky_relu(x * scale, 0.1)
    x = torch.nn.functional.pad(x, [n for pair in reversed(pads) for n in pair])
    return np.asarray(torch.nn.functional.conv3d(x, w) + bias)


INNER: Pads = ((0, 0),) * 3 + ((1, 1),) * 2
FIRST: Pads = ((0, 0),) * 2 + ((1, 0),) + ((1, 1),) * 2
ALL: Pads = ((0, 0),) * 2 + ((1, 1),) * 3


@pytest.mark.parametrize("pads", [INNER, FIRST, ALL], ids=["inner", "first", "all"])
def test_a_block_takes_next_to_nothing(pads: Pads) -> None:
    """Its first chain writes over the input, its convolution makes the result where it belongs."""
    shape = (*SHAPE[:2], *(n + sum(p) - 2 for n, p in zip(SPACE, pads[2:], strict=True)))
    program = block(pads, shape)
    engine = get_engine("torch")
    needs = engine.scratch_of(program, RULES)
    assert needs.overwrites == {0}
    arrays = arrays_of(program, -1.5)
    wanted, before = expected(arrays, pads), [array.copy() for array in arrays]
    out = ordered(np.empty, shape, "float32", LAST)
    engine.compile(program)(arrays, [out])
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)
    assert peak_bytes(program) < out.nbytes // 2 and needs.scratch_bytes < out.nbytes
    assert not np.array_equal(arrays[0], before[0])
    assert all(np.array_equal(a, b) for a, b in zip(arrays[1:], before[1:], strict=True))


def test_what_may_only_be_read_is_not_written_over() -> None:
    program = block(INNER, (*SHAPE[:2], 7, *SPACE[1:]))
    arrays = arrays_of(program, -1.5)
    arrays[0].flags.writeable = False
    with pytest.raises(ValueError, match="input 0 is written over"):
        get_engine("torch").compile(program)(arrays)


def test_a_room_is_written_instead_of_an_input() -> None:
    program = block(INNER, (*SHAPE[:2], 7, *SPACE[1:]))
    run, arrays = get_engine("torch").compile(program), arrays_of(program, -1.5)
    (wanted,) = run([arrays[0].copy(order="K"), *arrays[1:]])
    before, room = arrays[0].copy(order="K"), np.zeros_like(arrays[0])
    arrays[0].flags.writeable = False
    (found,) = run(arrays, None, {0: room})
    assert np.array_equal(found, wanted) and np.array_equal(arrays[0], before)
    assert room.any() and not np.array_equal(room, before)


def test_operands_may_lie_otherwise_each_time() -> None:
    program = block(INNER, (*SHAPE[:2], 7, *SPACE[1:]))
    run, arrays = get_engine("torch").compile(program), arrays_of(program, -1.5)
    wide = np.zeros((*arrays[3].shape, 3), arrays[3].dtype)
    wide[..., 1] = arrays[3]
    (wanted,) = run([arrays[0].copy(order="K"), *arrays[1:]])
    for scale in (wide[..., 1], arrays[3], wide[..., 1]):
        assert scale.strides != arrays[3].strides or scale is arrays[3]
        (found,) = run([arrays[0].copy(order="K"), *arrays[1:3], scale])
        assert np.array_equal(found, wanted)


def test_an_input_that_is_read_again_is_left_alone() -> None:
    """By a later chain, or as a result."""
    first = block(INNER, (*SHAPE[:2], 7, *SPACE[1:]))
    again = step("Sub", [(0, SHAPE), (3, ROW)], 8, SHAPE)
    outputs = (first.outputs[0], operand(8, SHAPE))
    kinds = (first.input_shapes, first.input_dtypes)
    orders, kept = (*first.orders, (8, LAST)), (first.outputs[0], operand(0, SHAPE))
    for made in (
        make_program(first.inputs, *kinds, (*first.instructions, again), outputs, orders),
        make_program(first.inputs, *kinds, first.instructions, kept, first.orders),
    ):
        assert get_engine("torch").scratch_of(made, RULES).overwrites == frozenset()


def test_double_precision_goes_another_way() -> None:
    """oneDNN has none of it: the result is copied to its place."""
    program = block(ALL, SHAPE)
    double = tuple(replace(item, dtypes=("float64",)) for item in program.instructions)
    wide = make_program(program.inputs, program.input_shapes, ("float64",) * 4, double, program.outputs)
    arrays = [array.astype("float64") for array in arrays_of(program, -1.5)]
    wanted = expected(arrays, ALL)
    np.testing.assert_allclose(TorchEngine().compile(wide)(arrays)[0], wanted, rtol=1e-12, atol=1e-12)


def test_a_result_that_no_loop_can_write_as_it_lies_is_copied_there() -> None:
    # Groups of channels, which are last in memory together: GroupNorms of diffusion models make such values.
    shape, order = (4, 4, 2, 16, 24), (0, 3, 4, 1, 2)
    item = step("Exp", [(0, shape)], 1, shape)
    program = make_program(
        (0,), (shape,), ("float32",), (item,), (operand(1, shape),), ((0, order), (1, order))
    )
    x, out = (ordered(np.ones, shape, "float32", order) for _ in range(2))
    get_engine("torch").compile(program)([x], [out])
    assert np.allclose(out, np.e)


CASES: dict[str, tuple[Shape, int]] = {
    "slab": ((1, 32, 5, 32, 24), 16),
    "several planes at once, the last ones fewer": ((1, 16, 7, 50, 40), 16),
    "few channels": ((1, 3, 4, 40, 16), 2),
    "two samples": ((2, 16, 3, 24, 20), 8),
}


def program_of(shape: Shape, made: int, orders: bool, crop: tuple[int, ...] = (0,) * 5) -> Program:
    """A transposed convolution of ``shape`` to ``made`` channels, all of its result but ``crop``."""
    weights: Shape = (shape[1], made, 2, 2, 2)
    result = (shape[0], made, *(2 * n - c for n, c in zip(shape[2:], crop[2:], strict=True)))
    attrs = {"strides": (2,) * 3, "dilations": (1,) * 3, "kernel_shape": (2,) * 3, "crop": crop}
    item = step("ConvTranspose", [(0, shape), (1, weights)], 2, result, **attrs)
    order = ((0, LAST), (2, LAST)) if orders else ()
    return make_program((0, 1), (shape, weights), ("float32",) * 2, (item,), (operand(2, result),), order)


@pytest.mark.parametrize("orders", [True, False], ids=["channels last", "planes"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_the_transposed_convolution(case: str, orders: bool) -> None:
    program = program_of(*CASES[case], orders)
    assert block_transpose.makes_blocks(program.instructions[0])
    x, w = arrays = arrays_of(program, -1.0)
    doubles = (torch.from_numpy(np.ascontiguousarray(array)).double() for array in (x, w))
    wanted = torch.nn.functional.conv_transpose3d(*doubles, stride=2).numpy()
    (found,) = get_engine("torch").compile(program)(arrays)
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max() * x.shape[1]


def test_blocks_are_made_where_the_result_belongs() -> None:
    """Nothing of the result's size is taken from the heap."""
    program = program_of((1, 16, 8, 40, 40), 16, orders=True)
    engine, arrays = get_engine("torch"), arrays_of(program, -1.0)
    out = ordered(np.empty, program.instructions[0].kernel_shapes[0], "float32", LAST)
    engine.compile(program)(arrays, [out])
    (wanted,) = engine.compile(program)(arrays)
    assert np.array_equal(out, wanted)
    told = engine.scratch_of(program, RULES).scratch_bytes
    assert peak_bytes(program) <= told < out.nbytes // 3


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_a_part_of_a_block_is_left_to_onednn(axis: int) -> None:
    crop = tuple(int(number == axis) for number in range(5))
    program = program_of((1, 16, 5, 32, 24), 16, True, crop)
    assert not block_transpose.makes_blocks(program.instructions[0])
    arrays = arrays_of(program, -1.0)
    given = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    whole = torch.nn.functional.conv_transpose3d(*given, stride=2).numpy()
    (found,) = get_engine("torch").compile(program)(arrays)
    np.testing.assert_allclose(found, whole[tuple(slice(start, None) for start in crop)], atol=1e-4)


EXTENTS = (6, 9, 8)
PADS: Pads = ((0, 0),) * 2 + ((1, 1),) * 3


def data(channels: int, batch: int = 1) -> Shape:
    return (batch, channels, *EXTENTS)


def noise(shape: Shape, seed: int, dtype: str) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def skipped(widths: tuple[int, ...], dtype: str, batch: int) -> tuple[Program, list[Array]]:
    """Parts side by side (10), convolved with weights (11); the gradient of the weights (12)."""
    count, total = len(widths), sum(widths)
    arrays = [noise(data(n, batch), i, dtype) for i, n in enumerate(widths)]
    arrays += [noise((20, total, 3, 3, 3), 8, dtype), noise(data(20, batch), 9, dtype)]
    parts = [(i, data(n, batch)) for i, n in enumerate(widths)]
    seen, weights = operand(10, data(total, batch), pads=PADS), (20, total, 3, 3, 3)
    steps = [
        step("Concat", parts, 10, data(total, batch), dtype, axis=1),
        step("Conv", [seen, (count, weights)], 11, data(20, batch), dtype, **ATTRS),
        step("ConvWeightGrad", [seen, (count + 1, data(20, batch))], 12, weights, dtype, **ATTRS),
    ]
    outputs = [(11, data(20, batch)), (12, (20, total, 3, 3, 3))]
    made = program(arrays, steps, outputs, f"skipped {widths} {dtype} {batch}")
    return replace(made, orders=tuple((slot, LAST) for slot in (*range(count), count + 1, 10, 11))), arrays


def ops(made: Program) -> list[str]:
    return [item.op for item in made.instructions]


def wanted(arrays: list[Array]) -> list[Array]:
    *parts, weights, grad = (torch.from_numpy(array).double() for array in arrays)
    x, w = torch.cat(parts, 1), weights.clone().requires_grad_()
    y = torch.nn.functional.conv3d(x, w, padding=1)
    y.backward(grad)
    return [y.detach().numpy(), w.grad.numpy()]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("widths", [(16, 32), (16, 16, 20)], ids=["two", "three"])
def test_what_lies_side_by_side_is_convolved_apart(widths: tuple[int, ...], dtype: str, batch: int) -> None:
    made, arrays = skipped(widths, dtype, batch)
    count = len(widths)
    adds = ["Conv"] + ["Conv", "Add"] * (count - 1)
    assert ops(in_parts(made)) == [*adds, *["ConvWeightGrad"] * count, "Concat"]
    tolerance = {"float64": 1e-12, "float32": 2e-5}[dtype]
    for found, array in zip(TorchEngine().compile(made)(arrays), wanted(arrays), strict=True):
        assert np.abs(found - array).max() <= tolerance * np.abs(array).max()


def test_slices_of_a_gradient_are_made_apart() -> None:
    arrays = [noise(data(20), 1, "float32"), noise((20, 48, 3, 3, 3), 2, "float32")]
    spans = [(0, 16), (16, 48)]
    reads, attrs = [operand(0, data(20), pads=PADS), (1, arrays[1].shape)], {**ATTRS, "crop": (0, 0, 2, 2, 2)}
    steps = [step("ConvTranspose", reads, 5, data(48), spatial=EXTENTS, **attrs)]
    for slot, (start, stop) in enumerate(spans, start=6):
        crop = [(0, 1), (start, stop), *((0, n) for n in EXTENTS)]
        seen = operand(5, data(stop - start), crop=crop)
        attrs = {"axis": 1, "start": start, "stop": stop, "step": 1}
        steps.append(step("Slice", [seen], slot, data(stop - start), **attrs))
    outputs = [(6, data(16)), (7, data(32))]
    made = program(arrays, steps, outputs, "sliced")
    made = replace(made, orders=tuple((slot, LAST) for slot in (0, 5, 6, 7)))
    assert ops(in_parts(made)) == ["ConvTranspose"] * 2
    dy, w = (torch.from_numpy(array).double() for array in arrays)
    whole_gradient = torch.nn.functional.conv_transpose3d(dy, w, padding=1).numpy()
    for found, (start, stop) in zip(TorchEngine().compile(made)(arrays), spans, strict=True):
        assert np.abs(found - whole_gradient[:, start:stop]).max() <= 2e-5 * np.abs(whole_gradient).max()
    kept = replace(made, outputs=(*made.outputs, operand(5, data(48))))
    assert in_parts(kept) is kept, "all of it is wanted, too"


def test_what_others_read_or_is_small_stays_whole() -> None:
    made, _ = skipped((16, 16), "float32", 1)
    also, outputs = step("Relu", [(10, data(32))], 13, data(32)), (*made.outputs, operand(13, data(32)))
    read = replace(made, instructions=(*made.instructions, also), outputs=outputs)
    assert in_parts(read) is read
    kept = replace(made, outputs=(*made.outputs, operand(10, data(32))))
    assert in_parts(kept) is kept
    few, _ = skipped((4, 16), "float32", 1)
    assert in_parts(few) is few
    half, _ = skipped((16, 16), "float32", 1)
    items = tuple(replace(item, dtypes=("bfloat16",)) for item in half.instructions)
    half = replace(half, instructions=items)
    assert in_parts(half) is half, "the sum would be rounded once more"
