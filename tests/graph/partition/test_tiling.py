"""Every operator, planned, cut into pieces and run by the engine, against the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms import channels_last
from oocdl.ops import RULES
from oocdl.ops._broadcast import is_float
from oocdl.testing import run_graph
from tests.kit.interpret import evaluate
from tests.kit.op_cases import AS_CONVOLUTIONS, CASES, Case, params


def finished(build: Builder, outputs: tuple[str, ...]) -> None:
    """Declare the outputs; an operator that only renames gets a node behind it, to have a layer."""
    build.outputs = [build("Neg", name) if is_float(build.dtype(name)) else name for name in outputs]
    build.values = {
        name: replace(value, role=Role.WEIGHT) if value.role is Role.INPUT else value
        for name, value in build.values.items()
    }


def run_cut(graph: Any, given: dict[str, Any], count: int, last: bool = False) -> Any:
    """Cut every class of axes that there is into ``count``."""
    rules = AS_CONVOLUTIONS if last else RULES
    return run_graph(graph, rules, given, cuts=dict.fromkeys(range(20), count), channels_last=last)


def check(case: Case, last: bool) -> None:
    """In one piece and in several it is what PyTorch makes of the whole."""
    arrays = case.arrays()
    build, inputs, outputs = case.node(arrays)
    finished(build, outputs)
    graph = build.graph()
    given = {name: array for name, array in zip(inputs, arrays, strict=True) if name not in graph.constants}
    expected = evaluate(graph, given)
    for count in (1, 2, 3):
        found = run_cut(graph, given, count, last).outputs
        for name, result in zip(graph.outputs, found.values(), strict=True):
            np.testing.assert_allclose(result, expected[name], rtol=1e-10, atol=1e-11, err_msg=f"{count}")


@pytest.mark.parametrize("case", params(CASES))
def test_cut_is_whole(case: Case) -> None:
    check(case, last=False)


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)], ids=["mean", "variance", "both"])
def test_a_result_that_nothing_reads_is_combined_with_the_others(read: tuple[int, ...]) -> None:
    arrays = np.random.default_rng(0).normal(size=(2, 7, 6))
    build = Builder(RULES)
    names = [build.value(name, (7, 6), "float64", Role.INPUT) for name in "xy"]
    made = [build.node("Moments", [name], {"axes": (0,)})[place] for name in names for place in read]
    finished(build, tuple(made))
    found = run_cut(build.graph(), dict(zip("xy", arrays, strict=True)), 3).outputs
    truth = [-moment(array, 0, keepdims=True) for array in arrays for moment in (np.mean, np.var)]
    truth = truth if len(read) == 2 else truth[read[0] :: 2]
    for array, wanted in zip(found.values(), truth, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-12)


@pytest.mark.parametrize("extent", [1, 2])
def test_no_shard_computes_a_part_that_it_does_not_need(extent: int) -> None:
    build = Builder(RULES)
    names = [build.value(name, (extent, 6), "float64", Role.INPUT) for name in "xyz"]
    parts = [build("Concat", build("Sin", name), build("Cos", name), axis=1) for name in names]
    joined = build("Concat", *parts, axis=0)
    finished(build, (joined,))
    arrays = np.random.default_rng(0).normal(size=(3, extent, 6))
    ran = run_cut(build.graph(), dict(zip("xyz", arrays, strict=True)), 3)
    units = [unit for layer in ran.plan.layers for unit in layer.units]
    assert len(units) > 2
    for unit in units:
        read = {operand.slot for item in unit.program.instructions for operand in item.operands}
        read |= {operand.slot for operand in unit.program.outputs}
        assert all(read.intersection(item.outputs) for item in unit.program.instructions)


def _has_space(case: Case) -> bool:
    return any(array.ndim in (4, 5) for array in case.arrays())


@pytest.mark.parametrize("case", params([case for case in CASES if _has_space(case)]))
def test_cut_is_whole_with_channels_last(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with everything that has axes of space, and not convolutions alone."""
    monkeypatch.setattr(channels_last, "LEAST_CHANNELS", 1)
    monkeypatch.setattr(channels_last, "CHANNELS_MULTIPLE", 1)
    check(case, last=True)
