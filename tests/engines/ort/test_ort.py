"""The onnxruntime engine: kernels for channels last against PyTorch in float64, products on one thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from oocdl.engines.engine import get_engine
from oocdl.engines.ort import blocks, ort_windows
from oocdl.engines.ort.blocks import block
from oocdl.engines.ort.ort_engine import OnnxRuntimeEngine, make_engine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction, Operand, Program, make_program
from oocdl.graph.transforms.channels_last import has_enough
from tests.kit.kernel_cases import noise

LAST = (0, 2, 3, 4, 1)
PADS = ((0, 0), (0, 0), (1, 0), (1, 1), (0, 1))
PLAIN = {"strides": (1, 1, 1), "dilations": (1, 1, 1)}
TILED = {"strides": (2, 1, 2), "dilations": (1, 1, 1)}
POOLED = {"kernel_shape": (2, 1, 3), "strides": (2, 1, 3), "dilations": (1, 1, 1)}


def build(op: str, shapes: list[Shape], made: Shape, pads: Any, attrs: dict[str, Any], dtype: str) -> Program:
    """One instruction; volumes of many channels have them last, weights do not."""
    operands = tuple(Operand(i, None, shape, pads if i == 0 else None) for i, shape in enumerate(shapes))
    slots = (*range(len(shapes)), len(shapes))
    item = Instruction(op, operands, slots[-1:], (made,), (made,), (dtype,), attrs)
    weights = {"Conv": 1, "ConvTranspose": 1, "ConvWeightGrad": 2}.get(op)
    pairs = zip(slots, [*shapes, made], strict=True)
    orders = tuple((slot, LAST) for slot, shape in pairs if slot != weights and has_enough(shape[1]))
    output, dtypes = (Operand(slots[-1], None, made, None),), (dtype,) * len(shapes)
    return make_program(slots[:-1], tuple(shapes), dtypes, (item,), output, orders)


def lying(program: Program, arrays: list[Array], dtype: str) -> list[Array]:
    orders = dict(program.orders)
    found = []
    for slot, array in enumerate(arrays):
        found.append(ordered(np.empty, array.shape, dtype, orders.get(slot, ())))
        found[-1][...] = array
    return found


def check(
    op: str, shapes: list[Shape], made: Shape, pads: Any, attrs: dict[str, Any], in_blocks: bool = True
) -> None:
    arrays = [noise(*shape, seed=seed).astype("float32") for seed, shape in enumerate(shapes)]
    if op.startswith("MaxPool"):
        arrays[0] = arrays[0].round(0)  # the largest of a window is there twice
    single = build(op, shapes, made, pads, attrs, "float32")
    double = build(op, shapes, made, pads, attrs, "float64")
    [want] = get_engine("torch").compile(double)(lying(double, arrays, "float64"))
    run = OnnxRuntimeEngine().compile(single)
    with pytest.MonkeyPatch.context() as patch:
        if in_blocks:
            patch.delattr(ort_windows, "run")  # the kernels for planes are not called
        [got] = run(lying(single, arrays, "float32"))
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
        assert run(lying(single, arrays, "float32"))[0].tobytes() == got.tobytes()


def check_all(x: Shape, y: Shape, w: Shape, attrs: dict[str, Any]) -> None:
    """A convolution and its gradients."""
    for op, shapes, made in (
        ("Conv", [x, w], y),
        ("ConvTranspose", [y, w], x),
        ("ConvWeightGrad", [x, y], w),
    ):
        check(op, shapes, made, None, attrs)


@pytest.mark.parametrize("inside", range(1, 8))
def test_few_channels_in_planes(inside: int) -> None:
    """Blocks of eight, of a processor without AVX-512, are filled by channels that no operator sorts."""
    x, y, w = (1, inside, 4, 16, 9), (1, 16, 3, 16, 8), (16, inside, 3, 3, 3)
    check("Conv", [x, w], y, PADS, PLAIN, in_blocks=False)
    check("ConvWeightGrad", [x, y], w, PADS, PLAIN, in_blocks=False)


@pytest.mark.skipif(block() == 1, reason="this processor has no blocks of channels")
@pytest.mark.parametrize(
    ("inside", "outside"), [(16, 16), (32, 16), (16, 32), (1, 16), (2, 16), (24, 12), (40, 48)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_windows(inside: int, outside: int, batch: int) -> None:
    x, y, w = (batch, inside, 4, 16, 9), (batch, outside, 3, 16, 8), (outside, inside, 3, 3, 3)
    check("Conv", [x, w], y, PADS, PLAIN)
    if inside > 2:  # few channels, that lie in planes, would be made
        check("ConvTranspose", [y, w], x, None, {**PLAIN, "crop": (0, 0, 1, 1, 0)})
        check("ConvTranspose", [y, w], (*x[:2], 3, 15, 8), None, {**PLAIN, "crop": (0, 0, -1, 2, 1)})
    check("ConvWeightGrad", [x, y], w, PADS, PLAIN)


@pytest.mark.skipif(block() == 1, reason="this processor has no blocks of channels")
def test_points() -> None:
    for outside in (3, 24):
        check_all((1, 16, 4, 5, 6), (1, outside, 4, 5, 6), (outside, 16, 1, 1, 1), PLAIN)


@pytest.mark.parametrize("batch", [1, 2])
def test_tiles(batch: int) -> None:
    check_all((batch, 16, 4, 5, 6), (batch, 8, 2, 5, 3), (8, 16, 2, 1, 2), TILED)


@pytest.mark.parametrize("batch", [1, 2])
def test_pools(batch: int) -> None:
    x, y = (batch, 8, 4, 5, 6), (batch, 8, 2, 5, 2)
    check("MaxPool", [x], y, None, POOLED)
    check("MaxPoolGrad", [x, y], x, None, POOLED)


def test_pools_of_which_a_part_is_wanted() -> None:
    """A cut that does not fall between two windows leaves the gradient fewer planes than the value."""
    x, y = (2, 8, 4, 5, 6), (2, 8, 2, 5, 2)
    arrays = [noise(*shape, seed=seed).astype("float32") for seed, shape in enumerate((x, y))]
    program = build("MaxPoolGrad", [x, y], (2, 8, 3, 5, 6), None, POOLED, "float32")
    [want] = get_engine("torch").compile(program)(lying(program, arrays, "float32"))
    [got] = OnnxRuntimeEngine().compile(program)(lying(program, arrays, "float32"))
    assert np.array_equal(got, want)


def test_moves() -> None:
    a, b = (2, 8, 3, 4, 5), (2, 16, 3, 4, 5)
    check("Concat", [a, b, a], (2, 32, 3, 4, 5), None, {"axis": 1})
    check("Concat", [a, a], (2, 8, 3, 8, 5), None, {"axis": -2})
    check("Slice", [b], b, None, {"axis": 1, "step": 1})
    check("Slice", [b], (2, 8, 3, 4, 5), None, {"axis": 1, "step": 2})


def test_a_processor_without_blocks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all convolutions run as sessions, with the same results."""
    monkeypatch.setattr(blocks, "DOMAIN", "com.microsoft.nothing")
    with pytest.warns(UserWarning, match="no kernels for channels in blocks"):
        assert blocks.block.__wrapped__() == 1


def test_an_engine_gives_products_one_thread() -> None:
    with threadpool_limits(2, user_api="blas"):  # those of before, afterwards
        make_engine()
        assert {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"} == {1}
