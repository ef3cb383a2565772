"""Values that are made where they belong: convolutions into the arrays of results, chains over inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oocdl.engines.engine import get_engine
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Program, make_program
from oocdl.ops import RULES
from tests.kit.programs import Pads, operand, step

torch = pytest.importorskip("torch")
from tests.kit.torch_heap import arrays_of, peak_bytes  # noqa: E402

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
    for program in (
        make_program(first.inputs, *kinds, (*first.instructions, again), outputs, orders),
        make_program(first.inputs, *kinds, first.instructions, kept, first.orders),
    ):
        assert get_engine("torch").scratch_of(program, RULES).overwrites == frozenset()


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
