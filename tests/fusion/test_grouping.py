"""Chains of elementwise instructions and reductions: the same values however they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from oocdl.engines.engine import get_engine
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.fusion.chain import arrange, items_of
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.program import Instruction, Program
from tests.kit.kernel_cases import noise
from tests.kit.programs import operand, program, step

SHAPE, ROW = (2, 3, 5, 4), (1, 3, 1, 1)
AXES = {"axes": (0, 2, 3)}


def item(op: str, reads: list[tuple[int, Shape]], made: dict[int, Shape], **attrs: object) -> Instruction:
    """One instruction on whole slots."""
    operands = tuple(operand(slot, shape) for slot, shape in reads)
    shapes = tuple(made.values())
    return Instruction(op, operands, tuple(made), shapes, shapes, ("float64",) * len(made), attrs)


def norm_and_softmax() -> tuple[Program, list[Array], list[Array]]:
    """Moments and sums over what is cut, log-sum-exp over what is not, a crop, results in the midst."""
    x, g = noise(*SHAPE), noise(*SHAPE, seed=1)
    thin = (2, 1, 5, 4)
    steps = [
        item("Mul", [(0, SHAPE), (1, SHAPE)], {2: SHAPE}),
        item("Moments", [(2, SHAPE)], {3: ROW, 4: ROW}, **AXES),
        item("Normalize", [(2, SHAPE), (3, ROW), (4, ROW)], {5: SHAPE}, eps=0.1),
        item("LogSumExp", [(5, SHAPE)], {6: thin}, axes=(1,)),
        item("Sub", [(5, SHAPE), (6, thin)], {7: SHAPE}),
        item("Exp", [(7, SHAPE)], {8: SHAPE}),
        item("Mul", [(8, SHAPE), (5, SHAPE)], {9: SHAPE}),
        item("ReduceSum", [(9, SHAPE)], {10: ROW}, **AXES),
        item("ReduceMax", [(9, SHAPE)], {11: ROW}, **AXES),
        item("LogSumExp", [(7, SHAPE)], {12: ROW}, **AXES),
    ]
    inner = (2, 3, 3, 4)
    part = operand(9, inner, crop=[(0, 2), (0, 3), (1, 4), (0, 4)])
    steps.append(step("Neg", [part], 13, inner, "float64"))
    outputs = [(7, SHAPE), (3, ROW), (4, ROW), (10, ROW), (11, ROW), (12, ROW), (13, inner)]
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
