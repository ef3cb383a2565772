"""Transposed convolutions with windows and steps of two are computed by blocks, in their results' place."""

from __future__ import annotations

import numpy as np
import pytest

from oocdl.engines.engine import get_engine
from oocdl.engines.torch.conv import block_transpose
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Program, make_program
from oocdl.ops import RULES
from tests.kit.programs import operand, step

torch = pytest.importorskip("torch")
from tests.kit.torch_heap import arrays_of, peak_bytes  # noqa: E402

LAST = (0, 2, 3, 4, 1)
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
