"""Convolutions of values that were put side by side, part by part, and gradients that are sliced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oocdl.engines.torch.split_concat import in_parts
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Program
from tests.kit.programs import Pads, operand, program, step

torch = pytest.importorskip("torch")

SPACE = (6, 9, 8)
PADS: Pads = ((0, 0),) * 2 + ((1, 1),) * 3
ATTRS = {"strides": (1,) * 3, "dilations": (1,) * 3, "kernel_shape": (3,) * 3}
LAST = (0, 2, 3, 4, 1)


def data(channels: int, batch: int = 1) -> Shape:
    return (batch, channels, *SPACE)


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
    steps = [step("ConvTranspose", reads, 5, data(48), spatial=SPACE, **attrs)]
    for slot, (start, stop) in enumerate(spans, start=6):
        crop = [(0, 1), (start, stop), *((0, n) for n in SPACE)]
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
